"""The rates of a cluster that isn't here: what `measure.calibrate` would find, from its figures."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from autopar.cost.collectives import all_gather_s, all_reduce_s, all_to_all_s, host_all_reduce_s
from autopar.cost.rates import FREE, Curve, HostRates, Rates, RowRate, StageRates
from autopar.ir.cluster import ClusterSpec

_LARGE = float(1 << 30)
#: Sizes of what is quickest in one way or another.
_SIZES = tuple(1 << k for k in range(0, 31, 2))
#: Passes over its ids that a device makes to sort and find them: a radix sort's, assumed.
_SORT_PASSES = 16
#: Of a device's flop rate that a model's products reach, assumed: half (training of large models reaches 0.3 to 0.6).
_EFFICIENCY = 0.5
#: Bytes that a gather or scatter of a row moves beyond the row itself: parts of cache lines, and the row's number.
_ROW_OVERHEAD = 64


def planned_rates(cluster: ClusterSpec) -> Rates:
    """Rates of the devices, by the bytes of the result on one of them, as `Rates` has them."""
    n = cluster.count
    return Rates(
        all_to_all=_line(lambda size: all_to_all_s(cluster, size / n)),
        all_gather=_line(lambda size: all_gather_s(cluster, size / n)),
        all_reduce=_line(lambda size: all_reduce_s(cluster, size)),
        flop_s=1 / (_EFFICIENCY * cluster.device.flops_s),
        **_in_memory(cluster.device.memory_bytes_s),
    )


def planned_stage_rates(cluster: ClusterSpec) -> StageRates:
    """Rates of the programs of stages, or of divided products; sends are between machines, if there are several."""
    link = cluster.between if cluster.machines > 1 else cluster.inside
    return StageRates(
        flop_s=1 / (_EFFICIENCY * cluster.device.flops_s),
        byte_s=1 / cluster.device.memory_bytes_s,
        call_s=link.latency_s,
        send_byte_s=1 / link.bytes_s,
    )


def planned_host_rates(cluster: ClusterSpec) -> HostRates:
    """Rates of the ranks' hosts, a rank for each device: the ranks of a machine share its memory.

    What they send each other inside of a machine goes through it, written and read once.
    """
    n, each = cluster.count, cluster.host_bytes_s / cluster.devices
    link = cluster.inside
    ranks = replace(cluster, inside=replace(link, bytes_s=min(link.bytes_s, each / 2)))
    host = Rates(
        all_to_all=_line(lambda size: all_to_all_s(ranks, size / n, "mpi_all_to_all")),
        all_gather=FREE,  # nothing of a table on hosts is gathered
        all_reduce=Curve(tuple((float(size), host_all_reduce_s(ranks, size)) for size in _SIZES)),
        **_in_memory(each),
    )
    return HostRates(host, _line(cluster.to_host))


def _line(seconds: Callable[[float], float]) -> Curve:
    """Of what takes a latency and a time for each byte."""
    return Curve(((1.0, seconds(1.0)), (_LARGE, seconds(_LARGE))))


def _in_memory(bytes_s: float) -> Any:
    """The rates that follow from a memory's bandwidth."""
    return {
        "route": _line(lambda ids: _SORT_PASSES * 2 * 4 * ids / bytes_s),
        "walk": _line(lambda size: size / bytes_s),
        "gather": RowRate(2 * _ROW_OVERHEAD / bytes_s, 2 / bytes_s),
        "scatter": RowRate(3 * _ROW_OVERHEAD / bytes_s, 3 / bytes_s),
        "fixed": {},
    }
