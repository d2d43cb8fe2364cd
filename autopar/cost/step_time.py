"""How long a whole step takes, by part: the model's products, its tables, its dense parameters, the call itself.

See docs/design.md. Every function is pure; seconds come from `Rates`, which are measured (`measure.calibrate`) or
follow from a cluster's figures (`cost.planned_rates`).
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
      leaves: Bytes of each parameter and slot: read and written once by the optimizer, with gradients beside them.
      by_mpi: Whether gradients are summed by MPI, in the memory of the hosts.
    """

    flops: float
    sums: tuple[tuple[int, int], ...]
    leaves: tuple[int, ...]
    moved_bytes: float = 0.0
    by_mpi: bool = False

    @property
    def state_bytes(self) -> int:
        """Of all parameters and slots."""
        return sum(self.leaves)

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
    """Part -> its terms, in the order of a step on so many devices. `tables`: method (or `HOSTED`) and sizes of each
    family."""
    fixed = max((rates.fixed.get(method, 0.0) for method, _ in tables), default=0.0)
    updates = rates.update_s(3 * dense.state_bytes)
    if rates.dense is not None:  # of a parameter and its slot, the sum of its gradient included
        updates = sum(max(0.0, rates.dense(size) - rates.all_reduce(size)) / 2 for size in dense.leaves)
    return {
        "call": (Term("call", rates.call_s + fixed),),
        "model": (
            Term("products", dense.flops * rates.flop_s),
            Term("values of the batch", rates.moved_s(dense.moved_bytes)),
        ),
        "lookups": tuple(term for _, sizes in tables for term in lookup_terms(rates, sizes)),
        "tables": tuple(term for table in tables for term in _table_terms(rates, hosts, *table) if not term.fixed),
        "dense gradients": _reduced(rates, dense, devices, hosts),
        "dense updates": (Term("update dense parameters", updates),),
    }


def _reduced(rates: Rates, dense: DenseLoad, devices: int, hosts: HostRates) -> tuple[Term, ...]:
    """Sums over examples, together; where times are measured in whole steps, one by one, as XLA has them there."""
    size = dense.gradient_bytes
    sent = 2 * (devices - 1) * size // devices
    if not size:
        return ()
    if dense.by_mpi and devices > 1:
        copied = Term("copy dense gradients to the host and back", 2 * hosts.copy(size))
        return copied, Term("reduce dense gradients", hosts.host.all_reduce(size), sent)
    seconds = rates.all_reduce(size)
    if rates.dense is not None:
        seconds = sum(count * rates.all_reduce(each) for each, count in dense.sums)
    return (Term("reduce dense gradients", seconds, sent),)


def _table_terms(rates: Rates, hosts: HostRates, method: str, sizes: Sizes) -> tuple[Term, ...]:
    return host_terms(sizes, hosts) if method == HOSTED else step_terms(rates, sizes)[method]


def lookup_terms(rates: Rates, sizes: Sizes) -> tuple[Term, ...]:
    """What all methods have in common: a device reads its ids' rows, and adds up their gradients."""
    return (
        Term("look up rows", rates.gather(sizes.ids, sizes.row_bytes)),
        Term("add up own gradients", rates.scatter(sizes.ids, sizes.sent_gradient)),
    )


def total(parts: Mapping[str, Sequence[Term]]) -> float:
    """Seconds of all parts, one after the other."""
    return sum(term.seconds for terms in parts.values() for term in terms)
