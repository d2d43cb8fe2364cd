"""What every rank runs in `test_worlds.py`: tables on hosts, ids that depend on their rows, reshaped tables."""

from __future__ import annotations

from collections.abc import Iterable

import jax
import pytest

import autopar
from tests.support.followed_lookups import BATCH, STEPS, trained

#: Those that differ in what travels: rows of all ids, of all groups, of candidates; weights reduced by MPI, by XLA.
_SOME = ("Q-learning", "shared candidates", "picks, clip", "rows of all groups", "halves", "written", "in a loop")
#: Whose gradients can't leave a loop or branch where there are several ranks.
_REFUSED = {name for name in STEPS if name.endswith((" in turns", ", one by one"))}
_REFUSED |= {"carried", "in a branch", "in train steps"}
if BATCH % jax.device_count() == 0:  # else each rank has all ids, and the loop exchanges nothing
    _REFUSED.add("in a loop")


def check_some_are_followed() -> None:
    _follow(_SOME)


def check_all_are_followed() -> None:
    _follow(STEPS)


def _follow(names: Iterable[str]) -> None:
    with jax.enable_x64(True):
        for name in names:
            if name in _REFUSED:
                with pytest.raises(autopar.StrategyError, match="a loop or branch"):
                    trained(name, rtol=1e-10, strategy=("ps", "hosts"))
                continue
            table = trained(name, rtol=1e-10, strategy=("ps", "hosts"))
            assert table.lifted and "read whole" not in table.reason, (name, table.reason)
