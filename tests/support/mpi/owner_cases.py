"""Tables on hosts that one rank has whole: named by the strategy or chosen for bags, in stacks, saved, read, moved."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import autopar  # first: it makes the ranks JAX's processes

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar.mpi.machines import exchange
from autopar.passes.choosing import together
from tests.support import many_tables, stacked_tables
from tests.support.mpi.bag_cases import BAGS, EXAMPLES, _agrees, batch_of, pooled, start, step_of

RANK, RANKS = jax.process_index(), jax.process_count()
WHOLE, SPREAD = ("ps:table", "hosts"), ("ps", "hosts")
#: Ranks' work may differ.
ANY_WORK = mock.patch.object(together, "_MOST_WORK", RANKS)


def _owners(state: Any) -> list[int | None]:
    return [table.layout.owner for table in state["params"]["tables"].values()]


def check_many_whole_tables() -> None:
    """2 by themselves and 8 in stacks, of mixed widths, dtypes and optimizers, rows that wait among them."""
    for count, name in ((2, "mixed"), (8, "AdamW")):
        step = many_tables.check(count, name, lambda s: autopar.parallelize(s, strategy={"params/tables/*": WHOLE}))
        found = [t.owner for t in step.plan.tables]
        assert {*found} == {*range(min(count, RANKS))} if RANKS > 1 else {*found} == {None}, found


def check_whole_tables_beside_others() -> None:
    """A stack has tables of both kinds, in any order."""
    tx = optax.adam(0.05, eps=1e-3)
    strategy = {**{f"params/tables/t0{k}": WHOLE for k in (1, 4, 5, 6)}, "params/tables/*": SPREAD}
    planned, plain = autopar.parallelize(many_tables.step_of(tx), strategy=strategy), jax.jit(many_tables.step_of(tx))
    mine, theirs = many_tables.start(8, tx), many_tables.start(8, tx)
    for k in range(3):
        (mine, _), (theirs, _) = planned(mine, many_tables.batch(8, k)), plain(theirs, many_tables.batch(8, k))
    if RANKS > 1:
        assert [owner is not None for owner in _owners(mine)] == [k in (1, 4, 5, 6) for k in range(8)]
        assert stacked_tables.stacks(planned)
    held = sum(t.storage.rows.shape[0] for t in mine["params"]["tables"].values())
    assert RANKS == 1 or held < sum(t.shape[0] for t in mine["params"]["tables"].values())
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(theirs), jax.tree.leaves(mine), strict=True):
        coarse = 4e-2 if a.dtype == jnp.bfloat16 else 1e-4
        a, b = (np.asarray(x, np.float32) for x in (a, b))
        np.testing.assert_allclose(b, a, rtol=coarse, atol=coarse, err_msg=str(path))
    some = np.asarray(theirs["params"]["tables"]["t04"])
    np.testing.assert_allclose(mine["params"]["tables"]["t04"][np.array([3, 0, 3, 32])], some[[3, 0, 3, 32]], atol=1e-4)


@ANY_WORK
def check_bags_of_whole_tables() -> None:
    """Chosen where owners add up bags: a rank gets one sum of each bag, in place of one of each owner."""
    forms = {f"{name} {k}": BAGS[name] for k in range(3) for name in ("sum", "where")}
    tx = optax.sgd(0.3, momentum=0.9)
    planned, state = _agrees(forms, tx, (8,))
    assert pooled(planned.plan) == set(forms) and (RANKS == 1 or None not in _owners(state))
    with mock.patch.object(together, "_saved", lambda *of: 0):
        spread, theirs = _agrees(forms, tx, (8,))
    assert pooled(spread.plan) == set(forms) and {*_owners(theirs)} == {None}
    before = dict(exchange().sent_bytes)
    planned(state, batch_of(9))
    sent = {kind: n - before[kind] for kind, n in exchange().sent_bytes.items()}
    own, bag, bags = _owners(state).count(RANK), 4 * 8, EXAMPLES // RANKS
    assert sent["rows"] == (0 if RANKS == 1 else own * (EXAMPLES - bags) * bag), sent
    assert autopar.verify(planned, state, batch_of(9)).ok
    flags = RANKS - 1  # whether all ids of a message get a gradient
    assert sent["gradients"] == (0 if RANKS == 1 else (len(forms) - own) * bags * bag + flags), sent


@ANY_WORK
def check_states_of_whole_tables() -> None:
    """Made by init, saved, restored whole or spread, given to a step that spreads tables, evaluated."""
    forms = {f"sum {k}": BAGS["sum"] for k in range(5)}
    tx = optax.adagrad(0.3)
    step = step_of(forms, tx)
    planned = autopar.parallelize(step, strategy={"params/tables/*": WHOLE})
    spread = autopar.parallelize(step, strategy={"params/tables/*": SPREAD})
    wanted = jax.jit(step)(start(forms, tx, (8,)), batch_of(0))
    state = autopar.init(lambda: start(forms, tx, (8,)), step=planned, batch=batch_of(0))
    assert RANKS == 1 or None not in _owners(state)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), b), state, start(forms, tx, (8,)))
    state = planned(state, batch_of(0))[0]
    folder = Path(_agreed_folder()) / "1"
    autopar.save(folder, state)
    for by in (planned, spread):
        again = autopar.restore(
            folder, like=jax.eval_shape(lambda: start(forms, tx, (8,))), step=by, batch=batch_of(0)
        ).state
        assert RANKS == 1 or [x is None for x in _owners(again)] == [by is spread] * 5
        jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), again, state)
    theirs, _ = jax.jit(step)(wanted[0], batch_of(1))
    for by in (spread, planned):
        mine = by(autopar.restore(folder, like=state).state, batch_of(1))[0]
        jax.tree.map(lambda a, b: np.testing.assert_allclose(np.asarray(a), b, rtol=1e-4, atol=1e-5), mine, theirs)
    looked_up = autopar.parallelize(lambda s, ids: s["params"]["tables"]["sum 3"][ids].sum(0))
    ids = np.arange(24, dtype=np.int32)
    total = np.asarray(theirs["params"]["tables"]["sum 3"])[ids].sum(0)
    np.testing.assert_allclose(looked_up(mine, ids), total, rtol=1e-4, atol=1e-4)


def _agreed_folder() -> str:
    names = exchange().gather(np.frombuffer(tempfile.mkdtemp().encode().ljust(200), np.uint8))
    return names[0].tobytes().decode().strip()
