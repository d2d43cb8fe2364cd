"""docs/memories.md: its programs run, and each memory is trained on its touched rows."""

from __future__ import annotations

from fnmatch import fnmatch
from typing import Any

import numpy as np
import pytest

import autopar
from benchmarks.memories import MEMORIES, page


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    """What the page defines. It verifies the step of each memory itself."""
    return page()


@pytest.mark.parametrize("hosts", [False, True])
@pytest.mark.parametrize("name", MEMORIES)
def test_memories_run_on_their_touched_rows(found: dict[str, Any], name: str, hosts: bool) -> None:
    logits, params, tables = MEMORIES[name]
    strategy = {tables: ("ps", "hosts")} if hosts else "auto"
    step = autopar.parallelize(found["step_of"](found[logits]), strategy=strategy)
    state = found["state_of"]({**found["model"], **found[params]})
    plan = step.planned_for(state, found["batch"]).compiled.plan
    lifted = {table.path: table.where for table in plan.tables if table.lifted}
    wanted = {f"params/{k}" for k in found[params] if fnmatch(f"params/{k}", tables)}
    assert wanted and lifted == dict.fromkeys(wanted, "hosts" if hosts else "devices")


def test_memories_on_hosts_give_the_numbers_of_those_on_the_device(found: dict[str, Any]) -> None:
    """The page trains one step of each, from the same values."""
    for name in ("memory_2", "memory_3"):
        on_device, on_hosts = (np.asarray(found[x]["params"][name]) for x in ("state", "hosted"))
        moved = np.abs(on_device - np.asarray(found["tables"][name])).max()
        assert moved > 1e-4 and np.abs(on_device - on_hosts).max() < 1e-3 * moved
