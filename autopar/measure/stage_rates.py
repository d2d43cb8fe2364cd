"""Measures rates of the programs of a pipeline's stages, in about a second, once in a process."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, replace

import jax
import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.work import equation_work
from autopar.backends.devices import Devices
from autopar.backends.emit import emit
from autopar.backends.microbatches import Microbatch
from autopar.cost.rates import StageRates, planned_stage_rates
from autopar.ir.program import Block, Var
from autopar.jax_types import Device, Leaf, Pytree
from autopar.launch.group import StoreGroup
from autopar.launch.notices import LOG
from autopar.measure.cluster import are_alike
from autopar.measure.loops import AT_FIRST_S, Budget, product_seconds, walk_seconds
from autopar.mpi.point_to_point import point_to_point

_SIDE = 512
#: Bytes of a pass over memory, beyond caches, and of a send.
_WALKED, _BYTES = 1 << 26, 1 << 24
_RUNS = 5

_known: dict[tuple[Leaf, ...], StageRates] = {}


def stage_rates_of(devices: Sequence[Device], processes: StoreGroup) -> StageRates:
    """Returns the rates of these devices, each at work by itself; measured at first need in this process.

    Devices of one kind count as equal: the first one is measured, and sends to the second. Collective for devices of
    several processes, which take the first one's figures.
    """
    key = tuple(devices)
    if key not in _known:
        _known[key] = first_rates(processes, _measure(devices, Budget(AT_FIRST_S, processes)))
    return _known[key]


def first_rates(processes: StoreGroup, rates: StageRates) -> StageRates:
    """Returns the first process's rates, so that all processes plan by the same figures."""
    return StageRates(**processes.first(asdict(rates), "rates of stages"))


def profiled_rates(rates: StageRates, block: Block, microbatches: int, devices: Sequence[Device]) -> StageRates:
    """Scales the rates so that they predict the measured time of a microbatch's gradient program.

    `rates`: as measured of large products and passes over memory. `block`: the program, which is timed on the first of
    `devices` that this process has. `microbatches`: M.
    """
    run = jax.jit(lambda number, *inputs: emit(block, {}, None, Microbatch(number, microbatches))(*inputs))
    device = _own(devices)[0]
    inputs = jax.device_put([_example(v) for v in block.inputs], device)
    number = jnp.int32(0)
    seconds = _seconds(lambda: run(number, *inputs))
    work = [equation_work(equation) for equation in block.equations]
    predicted = rates.seconds(sum(flops for flops, _ in work), sum(moved for _, moved in work))
    return rates.scaled(max(seconds - rates.call_s, 0.0) / max(predicted - rates.call_s, 1e-12))


def _example(var: Var) -> Leaf:
    if jax_compat.is_key(var.dtype):
        return jnp.zeros(var.shape, var.dtype)
    return jnp.full(var.shape, 0.01 if jax_compat.is_float(var.dtype) else 0, var.dtype)


def _measure(devices: Sequence[Device], budget: Budget) -> StageRates:
    own = _own(devices)
    one = Devices.of(jax.sharding.Mesh(own[:1], ("data",)))
    small, add = np.ones((8,), np.float32), jax.jit(lambda x: x + 1)
    probes: dict[str, tuple[float, int, Callable[[], float]]] = {  # (weight, amount of work, returns seconds)
        "flop_s": (2, 2 * _SIDE**3, lambda: product_seconds(one, _SIDE)),
        "call_s": (1, 1, lambda: _seconds(lambda: add(jax.device_put(small, own[0])))),
        "byte_s": (3, 2 * _WALKED, lambda: walk_seconds(one, _WALKED)),
        "send_byte_s": (1, _BYTES, lambda: _sent_seconds(devices)),
    }
    measured = {name: budget.run(weight, run) for name, (weight, _, run) in probes.items()}
    found = {name: s / probes[name][1] for name, s in measured.items() if s is not None}
    assumed = planned_stage_rates(are_alike(own[0].platform, own[0].device_kind))
    if len(found) < len(probes) and jax.process_index() == 0:
        missing = ", ".join(name for name in probes if name not in found)
        LOG.info("stages are planned by assumed %s: there was no time to measure them", missing)
    return replace(assumed, **found)


def _sent_seconds(devices: Sequence[Device]) -> float:
    """Measures a send from the first device to the second one, or between the first two processes."""
    ranks = list(dict.fromkeys(device.process_index for device in devices))
    if len(ranks) > 1:
        return _message_seconds(ranks)
    if len(devices) == 1:
        return 0.0
    large = jax.device_put(jnp.ones((_BYTES // 4,), jnp.float32), devices[0])
    return _seconds(lambda: jax.device_put(large, devices[1]))


def _message_seconds(ranks: Sequence[int]) -> float:
    """Measures one way of a message there and back, from and to JAX arrays; ranks beyond two do nothing."""
    messages, other = point_to_point(), {ranks[0]: ranks[1], ranks[1]: ranks[0]}.get(jax.process_index())
    if other is None:
        return 0.0
    array = jnp.ones((_BYTES // 4,), jnp.float32)

    def swap() -> None:
        incoming = messages.receive(array.shape, array.dtype, other)
        messages.send(np.array(array), other)
        jax.block_until_ready(jnp.array(incoming.wait()))
        messages.finish()

    return _seconds(swap)


def _seconds(run: Callable[[], Pytree]) -> float:
    # The median: a step is disturbed by the same things as these runs.
    jax.block_until_ready(run())
    seconds = []
    for _ in range(_RUNS):
        begin = time.perf_counter()
        jax.block_until_ready(run())
        seconds.append(time.perf_counter() - begin)
    return statistics.median(seconds)


def _own(devices: Iterable[Device]) -> list[Leaf]:
    return [device for device in devices if device.process_index == jax.process_index()]
