"""What a reduction over rows inside of a loop, branch or checkpoint takes untouched rows for, where they differ."""

from __future__ import annotations

import re

import optax
import pytest

import autopar
from tests.support.explained import explained
from tests.support.nested_reductions import NESTINGS, STEPS, carried, carried_alike, check

HOSTS = ("ps", "hosts")


@pytest.mark.parametrize("name", NESTINGS)
def test_untouched_rows_are_what_they_are(name: str) -> None:
    assert check(NESTINGS[name], strategy="ps").plan.lifts


def test_what_a_loop_carries_is_dense() -> None:
    planned = check(carried, strategy="ps")
    (table,) = planned.plan.parameters[:1]
    assert not table.lifted
    told = explained(planned)
    assert "over all rows, in a loop, of what depends on the turns before" in told
    assert re.search(r"nested_reductions.py:\d+", told)


@pytest.mark.parametrize("name", STEPS)
def test_steps_in_a_loop_lift_unless_rows_can_hide(name: str) -> None:
    nested, lifts = STEPS[name]
    assert check(nested, strategy="ps").plan.lifts == lifts


@pytest.mark.parametrize("options", [{"strategy": "ps"}, {"strategy": HOSTS}])
def test_one_untouched_row_tells_of_those_that_are_like_it(options: dict[str, object]) -> None:
    assert check(carried_alike, **options).plan.lifts


@pytest.mark.parametrize("name", ["checkpoint", "branch", "loop"])
def test_hosts_refuse_what_no_program_has(name: str) -> None:
    """With its line: outside of loops and branches they look at their rows."""
    message = r"(?s)nested_reductions.py:\d+.*Reduce them outside"
    with pytest.raises(autopar.StrategyError, match=message):
        check(NESTINGS[name], strategy=HOSTS)


def test_rows_that_wait_are_not_looked_at() -> None:
    """Adam moves all rows: where a reduction would have to look at them as they are, the table is dense."""
    planned = check(NESTINGS["nothing"], optax.adam(0.1), strategy="ps")
    assert not planned.plan.defers
    assert "reduce_sum is over all of them" in explained(planned)
    assert check(carried_alike, optax.adam(0.1), strategy="ps").plan.defers
