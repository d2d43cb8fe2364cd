"""What every rank does in `test_exchange.py`: each case against NumPy, from seeds that all ranks know.

`python -m tests.support.mpi.exchange_ranks` under mpiexec, or alone.
"""

from __future__ import annotations

import functools
import sys
import traceback
from collections.abc import Mapping

from autopar.mpi.exchange import Exchange
from autopar.mpi.machines import LeaderExchange
from tests.support.mpi import exchange_cases, leader_cases, reduction_cases
from tests.support.mpi.exchange_truth import Case

DIRECT: Mapping[str, Case] = {**exchange_cases.CASES, **reduction_cases.CASES}
REDUCED = {
    name: reduction_cases.CASES[name]
    for name in ("reductions", "not_a_number", "sums_of_integers", "sums_of_several_steps")
}
BY_LEADERS: Mapping[str, Case] = {**exchange_cases.CASES, **leader_cases.CASES}


def main() -> None:
    """Runs all cases, blocking, polling and by way of node leaders; the first that fails ends the job."""
    alone = sys.argv[1:] == ["alone"]
    if alone:
        run({"alone": Exchange(0, 1, None)}, DIRECT)
        assert "mpi4py" not in sys.modules
        return
    from mpi4py import MPI

    comm = MPI.COMM_WORLD
    world = comm if comm.size > 1 else None
    ways = {"blocking": False, "polling": True}
    direct = {way: Exchange(comm.rank, comm.size, world and comm.Dup(), polling=p) for way, p in ways.items()}
    assert [e.polling for e in direct.values()] == [False, comm.size > 1]
    run(direct, DIRECT)
    run({f"rings, {way}": in_rings(exchange) for way, exchange in direct.items()}, REDUCED)
    for exchange in direct.values():
        exchange.reduce = functools.partial(exchange.reduce, beside=True)
    run({f"rings beside programs, {way}": exchange for way, exchange in direct.items()}, REDUCED)
    by_leaders = {
        f"machines {machines}": LeaderExchange(comm.rank, comm.size, comm.Dup(), machines)
        for machines in leader_cases.MACHINES.get(comm.size, ())
    }
    for exchange in by_leaders.values():
        assert exchange.near.polling == (exchange.polling and exchange.near.size > 1)
    run(by_leaders, BY_LEADERS)
    run({f"rings, {way}": in_rings(exchange) for way, exchange in by_leaders.items()}, REDUCED)


def in_rings(exchange: Exchange) -> Exchange:
    exchange.rings_from = 0
    return exchange


def run(exchanges: Mapping[str, Exchange], cases: Mapping[str, Case]) -> None:
    for way, exchange in exchanges.items():
        for name, function in cases.items():
            try:
                function(exchange)
            except BaseException:
                where = f"rank {exchange.rank} of {exchange.size}, {way}, {name}"
                print(f"{where}:\n{traceback.format_exc()}", flush=True)
                raise
        if exchange.rank == 0:
            print(f"{way}: {len(cases)} cases passed", flush=True)


if __name__ == "__main__":
    main()
