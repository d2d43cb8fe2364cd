"""docs/memories.md: its programs run, and each memory is trained on its touched rows."""

from __future__ import annotations

import itertools
from fnmatch import fnmatch

import numpy as np

import autopar
from benchmarks.memories import MEMORIES, page


def test_the_page_runs_and_memories_are_trained_on_their_touched_rows() -> None:
    """In one test, as the page takes long: it verifies the step of each memory itself, and trains one step."""
    found = page(rows=50_000, keys=224)
    assert found["ROWS"] == 50_000 and found["KEYS"] == 224
    for name, hosts in itertools.product(MEMORIES, (False, True)):
        logits, params, tables = MEMORIES[name]
        strategy = {tables: ("ps", "hosts")} if hosts else "auto"
        step = autopar.parallelize(found["step_of"](found[logits]), strategy=strategy)
        state = found["state_of"]({**found["model"], **found[params]})
        plan = step.planned_for(state, found["batch"]).compiled.plan
        lifted = {table.path: table.where for table in plan.tables if table.lifted}
        wanted = {f"params/{k}" for k in found[params] if fnmatch(f"params/{k}", tables)}
        assert wanted and lifted == dict.fromkeys(wanted, "hosts" if hosts else "devices"), name
    for name in ("memory_2", "memory_3"):  # on hosts they are what they are on the device
        on_device, on_hosts = (np.asarray(found[x]["params"][name]) for x in ("state", "hosted"))
        moved = np.abs(on_device - np.asarray(found["tables"][name])).max()
        assert moved > 1e-4 and np.abs(on_device - on_hosts).max() < 1e-3 * moved
