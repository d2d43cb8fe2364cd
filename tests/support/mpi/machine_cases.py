"""What every rank runs in `test_worlds.py` where ranks pretend to be on several machines, two on each."""

from __future__ import annotations

from unittest import mock

import autopar  # first: it makes the ranks JAX's processes

# isort: split
import jax
import numpy as np

from autopar.backends.host.ranks import Ranks
from autopar.ir.strategy import OPTIMIZATIONS
from autopar.mpi import machines
from autopar.mpi.exchange import Exchange
from autopar.mpi.machines import LeaderExchange, exchange
from tests.support.mpi import ahead_cases, host_cases
from tests.support.mpi.host_cases import (
    HOSTS,
    RANK,
    RANKS,
    check_growth,
    check_init_of_several_tables,
    check_results,
    make,
)

__all__ = ["check_growth", "check_init_of_several_tables", "check_leaders", "check_results", "check_without_leaders"]

machines.machine_name = lambda: f"machine {RANK // 2}"  # asked for when the first step makes its exchange


def check_leaders() -> None:
    """Steps of all four ranks against one device; what the ranks of a machine want alike crosses machines once."""
    case = make("averaged", "adagrad")
    step = autopar.parallelize(case.step, strategy=HOSTS, donate=False)
    state, wanted = case.state, case.state
    for i in range(4):
        state, (loss, norm) = step(state, case.batches(i))
        wanted, (their_loss, their_norm) = jax.jit(case.step)(wanted, case.batches(i))
        np.testing.assert_allclose([loss, norm], [their_loss, their_norm], rtol=1e-5)
    ours = exchange()
    assert isinstance(ours, LeaderExchange) and ours.machines == tuple((r, r + 1) for r in range(0, RANKS, 2))
    before, near = dict(ours.sent_bytes), dict(ours.near_bytes)
    step(state, case.batches(9))
    sent = [ours.sent_bytes[k] - before[k] for k in ("rows", "gradients")]
    within = [ours.near_bytes[k] - near[k] for k in ("rows", "gradients")]
    sums = ours.gather(np.array([[*sent, *within]]))
    # Row r is on rank r mod N; a rank's part of a batch is what comes in its turn.
    parts = np.array_split(case.batches(9)["ids"], RANKS)
    for first in range(0, RANKS, 2):
        ids = np.unique(np.concatenate([part.ravel() for part in parts[first : first + 2]])) % RANKS
        crossing = np.sum((ids != first) & (ids != first + 1))
        assert sum(sums[r][0, 1] for r in (first, first + 1)) == crossing * 4 * 4
        apart = sum((np.unique(part) % RANKS // 2 != first // 2).sum() for part in parts[first : first + 2])
        assert crossing < apart and all(sums[r][0, 2:].min() > 0 for r in (first, first + 1))
    mine, theirs = (np.asarray(s.params["emb"]["embedding"]) for s in (state, wanted))
    np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-6)


def check_without_leaders() -> None:
    """`optimize=` without "local": each rank exchanges by itself, and sums are those of all."""
    case, on = make("averaged", "adagrad"), [name for name in OPTIMIZATIONS if name != "local"]
    naive = autopar.parallelize(case.step, strategy=HOSTS, donate=False, optimize=on)
    usual = autopar.parallelize(case.step, strategy=HOSTS, donate=False)
    state = wanted = case.state
    for i in range(3):
        (state, _), (wanted, _) = naive(state, case.batches(i)), usual(wanted, case.batches(i))
    mine, theirs = (np.asarray(s.params["emb"]["embedding"]) for s in (state, wanted))
    np.testing.assert_allclose(mine, theirs, rtol=1e-5, atol=1e-6)
    alone = exchange(by_leaders=False)
    assert type(alone) is Exchange and alone is exchange(by_leaders=False) is not exchange()
    assert (alone.near.size, alone.near_ranks) == (2, exchange().near_ranks) and Ranks.hides_exchanges(alone) is None
    before = alone.sent_bytes["gradients"], dict(exchange().sent_bytes)
    naive(state, case.batches(9))
    part = np.unique(np.array_split(case.batches(9)["ids"], RANKS)[RANK])
    assert alone.sent_bytes["gradients"] - before[0] == np.sum(part % RANKS != RANK) * 4 * 4
    assert exchange().sent_bytes == before[1]
    text = " ".join(str(autopar.explain(naive)).split())
    assert "optimize= leaves out 'local': with it rows that ranks of a machine want alike cross machines once" in text


def check_nothing_is_asked_for_ahead() -> None:
    """By way of node leaders no rows could be fetched."""
    with mock.patch.object(Ranks, "ask", autospec=True, side_effect=Ranks.ask) as ask:
        _, fetches = ahead_cases.run_both(lambda: ahead_cases.batches(6))
    assert (fetches.whole, fetches.late, ask.call_count) == (6, 0, 6 + 6)
    step, state = ahead_cases.make()
    text = str(autopar.explain(step, state, next(ahead_cases.batches(1))))
    assert "nothing is fetched ahead, as node leaders fetch for several ranks" in " ".join(text.split())


def check_contract() -> None:
    """Every third row: without node leaders the ranks run all of them."""
    host_cases.check_contract(every=3)
