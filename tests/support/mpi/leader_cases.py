"""What goes by way of node leaders in `test_exchange.py`: ranks that pretend to be on several machines."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from autopar.mpi.exchange import Exchange
from autopar.mpi.machines import LeaderExchange, connect
from autopar.mpi.world import World
from tests.support.mpi.exchange_truth import Case, wanted

CASES: dict[str, Case] = {}

#: By number of ranks: the machine of each.
MACHINES: Mapping[int, Sequence[Sequence[int]]] = {
    3: ([0, 0, 1], [0, 1, 0]),
    4: ([0, 0, 1, 1], [0, 0, 0, 1], [0, 1, 0, 1], [0, 0, 1, 2]),
}


def case(function: Case) -> Case:
    CASES[function.__name__] = function
    return function


@case
def bytes_that_cross_machines(exchange: Exchange) -> None:
    """Exactly: what a machine's ranks want of an owner on another one, together; each owner has one node leader."""
    assert isinstance(exchange, LeaderExchange)
    share, size, rank = 300, exchange.size, exchange.rank
    numbers = [wanted(5, r, share * size, 400) for r in range(size)]
    indices = [np.sort(n % size * share + n // size) for n in numbers]  # each owner has frequent ones
    before, near = dict(exchange.sent_bytes), dict(exchange.near_bytes)
    requested = exchange.ask(indices[rank], share)
    exchange.fetch(requested, np.ones((requested.rows.size, 6), np.float32))
    exchange.deliver(requested, np.ones((indices[rank].size, 6), np.float32))
    kinds = ("ids", "rows", "gradients")
    mine = [*(exchange.sent_bytes[k] - before[k] for k in kinds), *(exchange.near_bytes[k] - near[k] for k in kinds)]
    ids, rows, gradients, near_ids, near_rows, near_gradients = np.concatenate(exchange.gather(np.array([mine]))).T
    for ranks in exchange.machines:
        here = list(ranks)
        others = [o for o in range(size) if o not in ranks]
        wants = {r: np.unique(np.concatenate([indices[k] for k in r])) // share for r in exchange.machines}
        crossing = np.isin(wants[ranks], others).sum()
        by_ranks = sum(np.isin(indices[r] // share, others).sum() for r in ranks)
        assert crossing == by_ranks if len(ranks) == 1 else crossing < by_ranks
        assert gradients[here].sum() == 24 * crossing
        assert ids[here].sum() == 4 * (len(others) + crossing)
        # Rows go the other way: what all other machines want of this one.
        assert rows[here].sum() == 24 * sum(np.isin(w, here).sum() for theirs, w in wants.items() if theirs != ranks)
        # Within the machine, what goes to another node leader: the same number of rows each way.
        moved = near_gradients[here].sum()
        assert moved == near_rows[here].sum() and (moved > 0) == (len(here) > 1)
        assert near_ids[here].sum() == 4 * (moved // 24 + len(here) * (len(here) - 1))


@case
def leaders_share_the_work(exchange: Exchange) -> None:
    """Where all rows of all are wanted, ranks of a machine send as much as one another, but for an owner's rows."""
    assert isinstance(exchange, LeaderExchange)
    share, size = 40, exchange.size
    before = exchange.sent_bytes["gradients"]
    requested = exchange.ask(np.arange(share * size), share)
    exchange.deliver(requested, np.ones((share * size, 2), np.float32))
    owners = (exchange.sent_bytes["gradients"] - before) // (8 * share)
    [mine] = [ranks for ranks in exchange.machines if exchange.rank in ranks]
    outside = size - len(mine)
    assert outside // len(mine) <= owners <= -(-outside // len(mine))


@case
def machines_that_are_told_apart(exchange: Exchange) -> None:
    """Node leaders only where they save anything."""
    comm, size = exchange._comm, exchange.size
    here = World(exchange.rank, size, comm)
    for machines in ([0] * size, range(size)):
        assert type(connect(here, machines)) is Exchange
    found = connect(here, ["a"] * (size - 1) + ["b"])
    assert isinstance(found, LeaderExchange) and found.machines == (tuple(range(size - 1)), (size - 1,))
    assert type(connect(here)) is Exchange  # in truth it is one machine
