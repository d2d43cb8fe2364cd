"""How long a whole step takes, by part: the model's products, its tables, its dense parameters, the call itself.

DESIGN 6. Every function is pure; seconds come from `Rates`, which are measured (`measure.calibrate`) or follow from a
cluster's figures (`cost.planned_rates`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.exchange import HOSTED, Term, host_terms, step_terms
from autopar.cost.rates import NO_HOST_TIME, HostRates, Rates
from autopar.ir.sizes import Sizes


@dataclass(frozen=True, slots=True)
class DenseLoad:
    """What a step does with all that isn't looked up by rows, on each device.

    Attributes:
      flops: Floating-point operations of its matrix products and convolutions.
      moved_bytes: Bytes of the batch's values that the model reads and writes.
      sums: Of the sums over examples, gradients mostly: bytes, and how many there are of so many.
      state_bytes: Parameters with their slots: read and written once by the optimizer, with gradients beside them.
      by_mpi: Whether gradients are summed by MPI, in the memory of the hosts.
    """

    flops: float
    sums: tuple[tuple[int, int], ...]
    state_bytes: float
    moved_bytes: float = 0.0
    by_mpi: bool = False

    @property
    def gradient_bytes(self) -> int:
        """Of all sums over examples."""
        return sum(size * count for size, count in self.sums)


def step_parts(
    rates: Rates,
    dense: DenseLoad,
    tables: Sequence[tuple[str, Sizes]],
    devices: int,
    hosts: HostRates = NO_HOST_TIME,
) -> Mapping[str, tuple[Term, ...]]:
    """Part -> its terms, in the order of a step.

    Args:
      rates: Of the devices.
      dense: Of each device.
      tables: Method and sizes of each family; `HOSTED` is one.
      devices: N.
      hosts: Of their hosts, for what is done there.
    """
    reduced = 2 * (devices - 1) * dense.gradient_bytes // devices
    fixed = max((rates.fixed.get(method, 0.0) for method, _ in tables), default=0.0)
    found: dict[str, tuple[Term, ...]] = {
        "call": (Term("call", rates.call_s + fixed),),
        "model": (
            Term("products", dense.flops * rates.flop_s),
            Term("values of the batch", rates.moved_s(dense.moved_bytes)),
        ),
        "lookups": tuple(term for _, sizes in tables for term in lookup_terms(rates, sizes)),
    }
    found["tables"] = tuple(term for given in tables for term in _table_terms(rates, hosts, *given) if not term.fixed)
    seconds, there_and_back = rates.all_reduce(dense.gradient_bytes), ()
    updates = rates.update_s(3 * dense.state_bytes)
    if rates.dense is not None:  # of gradients with their updates, in whole steps: of state that has these, too
        measured = sum(count * rates.dense(size) for size, count in dense.sums)
        rest = max(0.0, dense.state_bytes - 2 * dense.gradient_bytes)
        updates = max(0.0, measured - seconds) + (rates.update_s(3 * rest) if rest else 0.0)
    if dense.by_mpi and devices > 1:
        seconds = hosts.host.all_reduce(dense.gradient_bytes)
        there_and_back = (Term("copy dense gradients to the host and back", 2 * hosts.copy(dense.gradient_bytes)),)
    found["dense gradients"] = (*there_and_back, Term("reduce dense gradients", seconds, reduced))
    found["dense updates"] = (Term("update dense parameters", updates),)
    return found


def _table_terms(rates: Rates, hosts: HostRates, method: str, sizes: Sizes) -> tuple[Term, ...]:
    return host_terms(sizes, hosts) if method == HOSTED else step_terms(rates, sizes)[method]


def lookup_terms(rates: Rates, sizes: Sizes) -> tuple[Term, ...]:
    """What all methods have in common: a device reads its ids' rows, and adds up their gradients."""
    return (
        Term("look up rows", rates.gather(sizes.ids, sizes.row_bytes)),
        Term("add up own gradients", rates.scatter(sizes.ids, sizes.row_bytes)),
    )


def total(parts: Mapping[str, Sequence[Term]]) -> float:
    """Seconds of all parts, one after the other."""
    return sum(term.seconds for terms in parts.values() for term in terms)
