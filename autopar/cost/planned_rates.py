"""The rates of a cluster that isn't here: what `measure.calibrate` would find, from its figures."""

from __future__ import annotations

from collections.abc import Callable

from autopar.cost.cluster import Cluster
from autopar.cost.collectives import all_gather_s, all_reduce_s, all_to_all_s
from autopar.cost.rates import Curve, Rates, RowRate

_LARGE = float(1 << 30)
#: Passes over its ids that a device makes to sort and find them: a radix sort's, assumed.
_SORT_PASSES = 16
#: Of a device's flop rate that a model's products reach, assumed: half (training of large models reaches 0.3 to 0.6).
_EFFICIENCY = 0.5
#: Bytes that a gather or scatter of a row moves beyond the row itself: parts of cache lines, and the row's number.
_ROW_OVERHEAD = 64


def planned_rates(cluster: Cluster) -> Rates:
    """Rates by the bytes of the result on one device, as `Rates` has them."""
    n, memory = cluster.count, cluster.device.memory_bytes_s

    def curve(seconds: Callable[[float], float]) -> Curve:
        return Curve(((1.0, seconds(1.0)), (_LARGE, seconds(_LARGE))))

    return Rates(
        all_to_all=curve(lambda size: all_to_all_s(cluster, size / n)),
        all_gather=curve(lambda size: all_gather_s(cluster, size / n)),
        all_reduce=curve(lambda size: all_reduce_s(cluster, size)),
        route=curve(lambda ids: _SORT_PASSES * 2 * 4 * ids / memory),
        walk=curve(lambda size: size / memory),
        gather=RowRate(2 * _ROW_OVERHEAD / memory, 2 / memory),
        scatter=RowRate(3 * _ROW_OVERHEAD / memory, 3 / memory),
        fixed={},
        flop_s=1 / (_EFFICIENCY * cluster.device.flops_s),
    )
