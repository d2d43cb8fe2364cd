"""Tables of which each server keeps some columns: the numbers are those of whole tables, bit for bit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar.backends.served import ServedPrograms
from autopar.compile import Compiled
from autopar.ir.served import CUTTING, Cutting
from autopar.planning.local_clients import ChooseMessage, LocalJob
from autopar.planning.notes import server_notes
from autopar.servers.messages import Message
from tests.support.pairs import diagonal
from tests.support.served import compiled

WORKERS, ROWS, WIDTH, EXAMPLES = 3, 3000, 8, 8
CLIPPED = optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.1))


def by_row() -> optax.GradientTransformation:
    """Adagrad with one number for each row, the mean of its squares: no server can update some columns alone."""

    def update(gradients: Any, slots: Any, params: Any = None) -> Any:
        means = jax.tree.map(lambda g: jnp.mean(g**2, axis=tuple(range(1, g.ndim))), gradients)
        slots = jax.tree.map(jnp.add, slots, means)
        scales = jax.tree.map(lambda s: jax.lax.rsqrt(s + 1e-6), slots)
        return jax.tree.map(lambda g, s: -0.1 * g * s.reshape(-1, *[1] * (g.ndim - 1)), gradients, scales), slots

    return optax.GradientTransformation(lambda params: jax.tree.map(lambda p: jnp.zeros(p.shape[:1]), params), update)


def beside_means() -> optax.GradientTransformation:
    """Goes by gradients, and by what they differ from their mean: who has the ones can compute the others."""

    def update(gradients: Any, slots: Any, params: Any) -> Any:
        means = jax.tree.map(lambda g: g.mean(-1, keepdims=True), gradients)
        return jax.tree.map(lambda g, m, p: -0.1 * (g - m) * p * g, gradients, means, params), slots

    return optax.GradientTransformation(lambda params: (), update)


@dataclasses.dataclass(frozen=True)
class Case:
    """A step that looks up rows.

    Attributes:
      tx: Its optimizer.
      shape: The table's.
      lookup: Table, ids -> rows, examples first.
      dtype: The table's.
      dense: The width of a layer beside the table; 0: there is none.
      rtol: How far numbers may differ, where XLA sums in another order; newer ones round columns otherwise than tables.
    """

    tx: optax.GradientTransformation = dataclasses.field(default_factory=lambda: optax.sgd(0.1))
    shape: tuple[int, ...] = (ROWS, WIDTH)
    lookup: Callable[[Any, Any], Any] = lambda table, ids: table[ids]
    dtype: Any = jnp.float32
    dense: int = 3
    rtol: float = 0.0 if jax.__version_info__ < (0, 11) else 5e-7

    def start(self) -> Any:
        """Parameters and slots."""
        random = np.random.default_rng(0)
        params = {"table": jnp.asarray(random.normal(size=self.shape), self.dtype)}
        if self.dense:
            params["w"] = jnp.asarray(random.normal(size=(self._width, self.dense)), jnp.float32)
        return params, self.tx.init(params)

    @property
    def _width(self) -> int:
        return int(np.prod(self.shape)) // ROWS

    def step(self, state: Any, ids: Any) -> Any:
        """Moves the rows of a minibatch."""
        params, slots = state

        def loss(params: Any) -> Any:
            rows = self.lookup(params["table"], ids).astype(jnp.float32).reshape(*ids.shape, -1)
            hidden = jnp.tanh(rows.sum(1))
            return jnp.mean(jnp.sum(hidden @ params["w"] if self.dense else hidden, -1) ** 2)

        value, gradients = jax.value_and_grad(loss)(params)
        updates, slots = self.tx.update(gradients, slots, params)
        return (optax.apply_updates(params, updates), slots), value


def ids_of(worker: int, number: int) -> Any:
    """Ids of a minibatch, some of them twice, and one beyond the last row."""
    ids = np.random.default_rng((worker, number)).integers(0, ROWS // 10, (EXAMPLES, 3)).astype(np.int32)
    ids[0, 0] = ROWS + 5
    return jnp.asarray(ids)


CASES = {
    "sgd": Case(),
    "adagrad": Case(optax.adagrad(0.1)),
    "a clip": Case(CLIPPED),
    "a table alone": Case(optax.adagrad(0.1), dense=0),
    "bfloat16": Case(optax.adagrad(0.1), dtype=jnp.bfloat16),
    "columns of two axes": Case(optax.adagrad(0.1), shape=(ROWS, 2, 6)),
    "rows behind columns": Case(optax.adagrad(0.1), (WIDTH, ROWS), lambda t, ids: jnp.moveaxis(t[:, ids], 0, -1)),
    "fewer columns than servers": Case(shape=(ROWS, 2)),
    "two lookups": Case(lookup=lambda t, ids: t[ids] * t[(ids * 7) % ROWS]),
    "means of gradients": Case(beside_means(), rtol=1e-5),
    #: A norm that isn't a number makes all rows none.
    "not a number": Case(CLIPPED, lookup=lambda t, ids: t[ids] * jnp.where(ids < 9, jnp.nan, 1)[..., None]),
}


def known(case: Case, servers: int, least_bytes: int = CUTTING.least_bytes) -> Compiled:
    """Compiles the step of a case."""
    return compiled(case.step, servers, case.start(), ids_of(0, 0), cutting=Cutting(least_bytes))


def trained(case: Case, of: Compiled, servers: int) -> Any:
    """The state and all losses, of messages that come to all servers in one order, drawn at random."""
    job = LocalJob(
        ServedPrograms(of.program, of.analysed), jax.tree.leaves((case.start(), ids_of(0, 0))), WORKERS, None
    )
    assert len(job.servers) == servers
    losses = job.run([4] * WORKERS, lambda w, k: jax.tree.leaves((case.start(), ids_of(w, k))), in_turns(servers))
    return job.state(), losses


def in_turns(servers: int) -> ChooseMessage:
    """Has a worker's next message come to each server before any other message does."""
    random, turn = np.random.default_rng(1), list[tuple[int, int]]()

    def choose(messages: Sequence[tuple[int, Message]]) -> int:
        if not turn:
            worker = int(random.choice(sorted({message.worker for _, message in messages})))
            turn.extend((worker, n) for n in range(servers))
        worker, server = turn.pop(0)
        return next(k for k, (n, message) in enumerate(messages) if (message.worker, n) == (worker, server))

    return choose


@pytest.mark.parametrize(("name", "servers"), diagonal(list(CASES), [2, 3]))
def test_columns_have_the_bits_of_whole_tables(name: str, servers: int) -> None:
    case = CASES[name]
    cut = known(case, servers, 1024)
    served, plan = cut.program.served, cut.plan.served
    assert plan is not None and "table" in plan.by_rows[0]
    columns = [server.part_of(plan.by_rows[0]) for server in plan.servers]
    assert sum(columns) == pytest.approx(1) and max(columns) < 1
    kept = [server.leaf_bytes for server in plan.servers]
    count = max(n for n in case.shape if n != ROWS)  # of columns
    most = math.ceil(count / len(plan.servers)) / count
    assert max(kept) <= max(most, 1.1 / len(kept)) * sum(kept), kept
    assert all(piece.axis != case.shape.index(ROWS) for piece in served.pieces.values())
    state, losses = trained(case, cut, len(plan.servers))
    whole = known(case, servers, 1 << 40)
    assert not whole.program.served.pieces
    theirs, their_losses = trained(case, whole, len(whole.plan.served.servers))
    for k in theirs:
        mine, others = (np.asarray(some[k], np.float32) for some in (state, theirs))
        np.testing.assert_allclose(mine, others, case.rtol, case.rtol, err_msg=str(k))
    assert name != "not a number" or np.isnan(np.asarray(state[0])[ROWS // 2]).all()
    mine, others = ([[*x.values()] for each in some for x in each] for some in (losses, their_losses))
    np.testing.assert_allclose(mine, others, case.rtol)


@pytest.mark.parametrize("servers", [2, 3])
def test_a_row_that_is_updated_as_one_stays_whole(servers: int) -> None:
    """And `explain` says where."""
    of_rows = known(Case(by_row(), (ROWS, 64)), servers)
    plan = of_rows.plan.served
    assert plan is not None and not of_rows.program.served.pieces and plan.by_rows == ("0/table",)
    (home,) = [n for n, server in enumerate(plan.servers) if server.part_of("0/table")]
    assert plan.servers[home].leaf_bytes >= ROWS * 65 * 4
    text = " ".join(server_notes(of_rows.plan))
    assert f"0/table is on server {home}, whole" in text and "ranks" not in text


def test_what_is_said_of_columns() -> None:
    cut = known(Case(optax.adagrad(0.1), (ROWS, 64)), 2)
    assert cut.plan.served is not None
    on_ranks = dataclasses.replace(cut.plan, served=dataclasses.replace(cut.plan.served, ranks=(4, 5)))
    text = " ".join(server_notes(on_ranks))
    assert "0/table is on all servers, each of which keeps some of its columns" in text
    assert "they are ranks 4, 5, which only serve" in text
    leaves = [leaf for server in cut.plan.served.servers for leaf in server.leaves]
    assert {"0/table[:, 0:32]", "0/table[:, 32:64]"} < {*leaves}


def test_a_small_table_stays_whole() -> None:
    assert not known(Case(shape=(ROWS, 4)), 2).program.served.pieces


def test_a_worker_pushes_no_more_than_rows_and_ids() -> None:
    """To each server the gradients of its columns, whatever is computed of these there, and all ids."""
    cut = known(Case(optax.adagrad(0.1), (ROWS, 64), dense=0), 4)
    rows, ids = EXAMPLES * 3 + 1, EXAMPLES * 3
    assert cut.plan.served is not None
    for server in cut.plan.served.servers:
        assert server.pull_bytes == server.push_bytes == 4 * (16 * rows + ids)
