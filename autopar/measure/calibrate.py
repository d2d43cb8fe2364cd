"""Measures how long exchanges take on some devices, for a few seconds at first need, and keeps the figures in a file.

Figures for which there was no time are assumed as of similar devices, and measured by the next process, or by
`calibrate`.
"""

from __future__ import annotations

import functools
import json
import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np

from autopar.analysis.work import count_work
from autopar.backends.devices import Devices
from autopar.backends.gloo import uses_gloo
from autopar.backends.indices import find, sorted_unique
from autopar.cost.rates import Rates, planned_rates
from autopar.jax_types import Array, Leaf, Pytree
from autopar.measure import loops
from autopar.measure.cluster import are_alike
from autopar.measure.figures import (
    BASE,
    DENSE,
    ROWS,
    SIDE,
    Advance,
    Figures,
    cache_file,
    measuring,
    rates_of_figures,
    write_cache,
)
from autopar.measure.loops import AT_FIRST_S, Budget, agreed_turns, loop_seconds
from autopar.mpi.limits import machine_name

#: The purpose of figures: "methods" are compared, or whole "steps" predicted as well.
Purpose = Literal["methods", "steps"]
_WHY: dict[Purpose, str] = {"methods": "to choose each table's method", "steps": "to predict whole steps"}

#: Bytes of a collective's result on one device.
_LITTLE, _BETWEEN, _MUCH = 1 << 10, 1 << 17, 1 << 22
#: Bytes of a dense gradient, which no cache holds.
_GRADIENT = 1 << 24
_FEW_IDS, _IDS = 1 << 8, 1 << 13
#: Bytes of a pass over memory, measured first, and later.
_WALKED, _ALSO_WALKED = 1 << 23, (1 << 15, 1 << 19, 1 << 25)
#: Bytes of rows.
_NARROW, _WIDE = 64, 1024

#: This process's figures, which all of its plans use. Unavoidably global, as the devices are.
_known: dict[tuple[Devices, Purpose], Figures] = {}


@dataclass(frozen=True, slots=True)
class Probe:
    """A measurement of a point of a figure."""

    figure: str
    at: int | str  #: The point: bytes, ids, a method.
    weight: float  #: Its duration, in measurements of small arrays.
    run: Callable[[], float]  #: Returns seconds.


def rates_of(
    devices: Devices, plan: StepPlanner, *, steps: bool = False, budget: Budget | None = None, again: bool = False
) -> Rates:
    """Returns the rates of these devices: kept in this process or in a file of the user's cache, or measured now.

    Processes of the devices measure together, and take the first one's figures. Collective at the first call for each
    purpose.

    Args:
      plan: Returns the planned form of a step by a method.
      steps: Whole steps are to be predicted, rather than only methods compared.
      budget: Time for measurements, also if this process has measured before; by default `AT_FIRST_S` for each purpose.
      again: Known figures are measured again.
    """
    purposes: tuple[Purpose, ...] = ("methods", "steps") if steps else ("methods",)
    for purpose in purposes:
        if budget is not None or (devices, purpose) not in _known:
            _known[devices, purpose] = _figures_for(purpose, devices, plan, budget, again=again)
    figures: Figures = {}
    for purpose in reversed(purposes):  # figures by which methods were compared before prevail
        figures |= _known[devices, purpose]
    return replace(rates_of_figures(figures, _assumed(devices)), joins_sums=uses_gloo(devices.mesh))


def _assumed(devices: Devices) -> Rates:
    first, machines = devices.mesh.devices.flat[0], 1
    if devices.processes.several:
        machines = len({d.process_index for d in devices.mesh.devices.flat})
    like = are_alike(first.platform, first.device_kind)
    return planned_rates(like.of(machines, max(1, devices.count // machines)))


def _figures_for(
    purpose: Purpose, devices: Devices, plan: StepPlanner, budget: Budget | None, *, again: bool
) -> Figures:
    """Returns the first process's figures; measures those that a purpose lacks as far as there is time."""
    processes = devices.processes
    machines = len(set(processes.values(machine_name(), "machines of the devices")))
    file = cache_file(devices, f"rates-{machines}-{{}}.json")
    kept: Figures = processes.first(read_figures(file), "figures of the devices")
    probes = [p for p in probes_for(purpose, devices, plan) if again or str(p.at) not in kept.get(p.figure, {})]
    if not probes:
        return kept
    # A quick one first, even if it is known: it shows how busy the machine is.
    probes.insert(0, Probe("product", SIDE, 2, lambda: loops.product_seconds(devices, SIDE)))
    what = f"what exchanges cost on {devices.count} devices"
    # In a thread of its own: the step may be called while JAX traces another one, and would become part of it.
    with (
        measuring(what, _WHY[purpose], len(probes), file, shown=processes.rank == 0) as advance,
        ThreadPoolExecutor(1) as thread,
    ):
        budget = budget or Budget(AT_FIRST_S, processes)
        measured = thread.submit(measure_probes, probes, budget, advance).result()
    figures = {**kept, **{name: {**kept.get(name, {}), **points} for name, points in measured.items()}}
    figures = processes.first(figures, "figures of the devices")
    if processes.rank == 0:
        write_cache(file, json.dumps(figures))
    return figures


def read_figures(file: Path) -> Figures:
    """Returns the figures that an earlier process has kept; none if the file is missing or damaged."""
    try:
        read = json.loads(file.read_text())
        return {name: {str(at): float(s) for at, s in points.items()} for name, points in read.items()}
    except (OSError, ValueError, AttributeError, TypeError):
        return {}


def measure_probes(probes: Sequence[Probe], budget: Budget, advance: Advance = lambda part: None) -> Figures:
    """Runs probes as long as there is time. `advance` is told the name of each."""
    figures: Figures = {}
    for probe in probes:
        advance(probe.figure.replace("_", " "))
        seconds = budget.run(probe.weight, probe.run)
        if seconds is not None:
            figures.setdefault(probe.figure, {})[str(probe.at)] = seconds
    return figures


def probes_for(purpose: Purpose, devices: Devices, plan: StepPlanner) -> list[Probe]:
    """Returns the probes of a purpose, the most informative ones first."""
    whole = WholeSteps(plan, devices)
    if purpose == "steps":

        def moved_byte_s() -> float:
            return whole.moved_byte_s(loops.product_seconds(devices, SIDE) / (2 * SIDE**3))

        steps = [Probe("dense", size, 4, functools.partial(whole.dense_s, size)) for size in DENSE]
        return [*steps, Probe("moved_byte", "batch", 6, moved_byte_s)]

    def collective(name: str, size: int, weight: float = 1) -> Probe:
        return Probe(name, size, weight, lambda: loops.collective_points(devices, name, (size,), in_steps=True)[0][1])

    def walk(size: int) -> Probe:
        return Probe("walk", 2 * size, 1 + size / (1 << 24), lambda: loops.walk_seconds(devices, size))

    def update(size: int) -> Probe:
        # A gradient is read, and was written, beside a parameter and its slot: half as much again.
        return Probe("update", 3 * size, 1 + size / (1 << 23), lambda: loops.update_seconds(devices, size))

    def method(name: str, weight: float) -> Probe:
        return Probe("more", name, weight, lambda: whole.method_s(name))

    collectives = ("all_to_all", "all_gather", "all_reduce")
    rows = RowLoops(devices)
    return [
        *(collective(name, _MUCH, 2) for name in collectives),
        *(collective(name, _LITTLE) for name in collectives),
        Probe("gather", _WIDE, 2, lambda: rows.gather_s(_WIDE)),
        Probe("scatter", _WIDE, 2, lambda: rows.scatter_s(_WIDE)),
        Probe("route", _IDS, 2, lambda: rows.route_s(_IDS)),
        walk(_WALKED),
        update(_WALKED),
        Probe("call", BASE, 3, whole.call_s),
        method("ps", 9),
        method("allgather", 6),
        method("allreduce_rows", 5),
        Probe("gather", _NARROW, 2, lambda: rows.gather_s(_NARROW)),
        Probe("scatter", _NARROW, 2, lambda: rows.scatter_s(_NARROW)),
        Probe("route", _FEW_IDS, 2, lambda: rows.route_s(_FEW_IDS)),
        collective("all_reduce", _GRADIENT, 3),
        *(probe(size) for size in _ALSO_WALKED for probe in (walk, update)),
        *(collective(name, _BETWEEN) for name in collectives),
    ]


# --- whole steps ---
#
# Times the methods against each other on a table so small that only their fixed cost is left, and what dense
# parameters and a model's values add to such a step. Two at a time, so that each pair can be timed by itself. A loop
# of one operation would say little: in a whole step nothing waits in a cache, and threads wait for each other.

Step = Callable[[Any, Any], tuple[Any, Array]]
#: Returns the planned form of a step by a method.
StepPlanner = Callable[[Step, str], Any]
#: A planned step, a function that makes its state, and its batch.
Timed = tuple[Any, Callable[[], Any], Any]

#: Rows and width of the table, ids of a device.
_ROWS, _WIDTH, _PROBED_IDS = 1024, 8, 4
#: Rounds; most turns in each, and about how many seconds they may take.
_ROUNDS, _TURN, _TURN_S = 12, 16, 0.02
#: Number of dense parameters that are added to a step.
_COUNT = 2
#: Few and many examples of a device; width and hidden units of a perceptron.
_EXAMPLES, _IN, _HIDDEN = (32, 512), 64, 512


class WholeSteps:
    """Times steps, compiled at first use, in turns with the base, the plain step by AllReduce. `plan`: returns the
    planned form of a step by a method."""

    def __init__(self, plan: StepPlanner, devices: Devices) -> None:
        self._plan, self._devices = plan, devices
        self._ids = jnp.arange(devices.count * _PROBED_IDS, dtype=jnp.int32) * 7 % _ROWS

    @functools.cached_property
    def _base(self) -> Timed:
        return self._plan(_step, BASE), _table, self._ids

    def call_s(self) -> float:
        """Measures the seconds of the base method."""
        return _times({BASE: self._base}, self._devices)[BASE]

    def method_s(self, method: str) -> float:
        """Measures how many seconds longer the step takes by a method than by the base's."""
        return self._more((self._plan(_step, method), _table, self._ids))

    def dense_s(self, size: int) -> float:
        """Measures the seconds that one more dense parameter of `size` bytes adds to a step."""
        side = math.isqrt(size // 4)
        state = functools.partial(_with_dense, [(side, side)] * _COUNT)
        return max(0.0, self._more((self._plan(_dense_step, BASE), state, self._ids)) / _COUNT)

    def moved_byte_s(self, flop_s: float) -> float:
        """Measures the seconds of a byte of the batch's values that a model reads or writes.

        More examples add these to a perceptron's step, beside products, of which an operation takes `flop_s` seconds.
        """
        n = self._devices.count
        state = functools.partial(_with_dense, [(_IN, _HIDDEN), (_HIDDEN, _IN)])
        batches = [{"ids": self._ids, "x": jnp.full((n * count, _IN), 1e-3, jnp.float32)} for count in _EXAMPLES]
        few, many = ((self._plan(_perceptron, BASE), state, batch) for batch in batches)
        seconds = _times({"few": few, "many": many}, self._devices)
        work = [count_work(step.planned_for(state(), batch).compiled.analysed) for step, _, batch in (few, many)]
        products = (work[1].on(n) - work[0].on(n)) * flop_s
        moved = (work[1].moved_bytes - work[0].moved_bytes) / n
        return max(0.0, seconds["many"] - seconds["few"] - products) / moved

    def _more(self, timed: Timed) -> float:
        seconds = _times({"base": self._base, "step": timed}, self._devices)
        return seconds["step"] - seconds["base"]


def _dense_step(state: Pytree, ids: Array) -> tuple[Pytree, Array]:
    """Trains a chain of square matrices, beside the table."""

    def loss_fn(dense: Leaf) -> Array:
        x = ids[:, None].astype(jnp.float32) * 1e-6 * jnp.ones((1, dense[0].shape[0]))
        for w in dense:
            x = jnp.tanh(x @ w + x)
        return jnp.sum(x)

    return _trained(state, ids, jax.grad(loss_fn)(state["dense"]))


def _perceptron(state: Pytree, batch: Pytree) -> tuple[Pytree, Array]:

    def loss_fn(dense: Leaf) -> Array:
        y = jax.nn.relu(batch["x"] @ dense[0]) @ dense[1]
        return jnp.mean((y - batch["x"]) ** 2)

    return _trained(state, batch["ids"], jax.grad(loss_fn)(state["dense"]))


def _trained(state: Pytree, ids: Array, grads: Pytree) -> tuple[Pytree, Array]:
    """Updates the table by `_step`, and dense parameters by Adagrad on gradients clipped by their norm."""
    new_state, loss = _step({k: state[k] for k in ("table", "slot")}, ids)
    scale = jnp.minimum(1.0, jax.lax.rsqrt(sum(jnp.sum(g * g) for g in grads)))
    grads = [g * scale for g in grads]
    slots = [s + g * g for s, g in zip(state["slots"], grads, strict=True)]
    dense = [w - 0.01 * g * jax.lax.rsqrt(s) for w, g, s in zip(state["dense"], grads, slots, strict=True)]
    return {**new_state, "dense": dense, "slots": slots}, loss


def _with_dense(shapes: list[tuple[int, int]]) -> Pytree:
    dense, slots = ([jnp.full(shape, x, jnp.float32) for shape in shapes] for x in (1e-3, 1.0))
    return {**_table(), "dense": dense, "slots": slots}


def _times(steps: Mapping[str, Timed], devices: Devices) -> dict[str, float]:
    # In turns, so that other load on the machine meets all steps alike.
    states = {name: make() for name, (_, make, _) in steps.items()}
    timed: dict[str, list[float]] = {name: [] for name in steps}

    def turn(name: str) -> float:
        step, _, batch = steps[name]
        start = time.perf_counter()
        states[name], loss = step(states[name], batch)
        jax.block_until_ready((states[name], loss))
        return time.perf_counter() - start

    turns = {}
    for name in steps:
        first = min(turn(name) for _ in range(3))
        turns[name] = agreed_turns(devices, np.clip(_TURN_S / first, 2, _TURN))
    for round in range(_ROUNDS):
        for name, count in turns.items():
            if count == _TURN or round % 4 == 0:
                timed[name].append(statistics.median([turn(name) for _ in range(count)][count // 2 :]))
    # The best round of each, since other load slows down most the steps that wait for others.
    return {name: min(seconds) for name, seconds in timed.items()}


def _table() -> Pytree:
    return {"table": jnp.ones((_ROWS, _WIDTH)), "slot": jnp.ones((_ROWS, _WIDTH))}


def _step(state: Pytree, ids: Array) -> tuple[Pytree, Array]:
    """Updates by Adagrad on the sum of squares of some rows, clipped by its norm."""
    loss, g = jax.value_and_grad(lambda table: jnp.sum(table[ids] ** 2))(state["table"])
    g = g * jnp.minimum(1.0, 1.0 / jnp.sqrt(jnp.sum(g * g)))
    slot = state["slot"] + g * g
    return {"table": state["table"] - 0.01 * g * jax.lax.rsqrt(slot), "slot": slot}, loss


# --- rows of tables: routing ids, looking rows up, adding to them ---

#: Bytes on one device of the table that is gathered from, more than a cache holds.
_TABLE = 1 << 24


@dataclass(frozen=True, slots=True)
class RowLoops:
    """Timed loops over rows on these devices."""

    devices: Devices

    def route_s(self, ids: int) -> float:
        """Measures the seconds to make `ids` ids of a device unique, and to find each among the unique ones."""
        return loop_seconds(self.devices, _route, self._ids(ids, 1 << 20))

    def gather_s(self, width: int) -> float:
        """Measures the seconds to look up `ROWS` rows of `width` bytes on a device."""
        rows = _TABLE // width
        table = jnp.ones((self.devices.count * rows, width // 4), jnp.float32)
        return loop_seconds(self.devices, _gather, self._ids(ROWS, rows), table)

    def scatter_s(self, width: int) -> float:
        """Measures the seconds to add to `ROWS` rows of `width` bytes on a device."""
        values = jnp.ones((self.devices.count * ROWS, width // 4), jnp.float32)
        return loop_seconds(self.devices, _scatter, values, self._ids(ROWS, ROWS))

    def _ids(self, each: int, extent: int) -> Array:
        return jnp.asarray(np.random.default_rng(0).integers(0, extent, self.devices.count * each), jnp.int32)


def _route(ids: Array) -> Array:
    mixed = (ids * 1103515245 + 12345) & 0xFFFFF
    rows = sorted_unique(mixed, mixed.shape[0], 1 << 30)
    return find(rows, mixed, 1 << 30) * 31 + mixed


def _gather(index: Array, table: Array) -> Array:
    rows = table.at[index].get(mode="clip")
    return (index + rows.sum(1).astype(jnp.int32)) % table.shape[0]


def _scatter(values: Array, index: Array) -> Array:
    return jnp.zeros_like(values).at[index].add(values) * 0.5
