"""`parallelize`: the options, and the callable made of them."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from typing import Any, overload

import jax

from autopar.backends.devices import Devices
from autopar.compile import Options
from autopar.errors import ArgumentsError
from autopar.ir.examples import BatchAxis, check_batch_axis
from autopar.ir.plan import METHODS, Emit, Sparse, Strategy, asks_for_hosts
from autopar.measure.calibrate import rates_of
from autopar.measure.memory import device_memory
from autopar.mpi.world import world
from autopar.per_device import PerDevice
from autopar.step import ParallelStep


@overload
def parallelize(
    step: Callable[..., Any],
    /,
    *,
    mesh: Any = ...,
    data_axis: str | None = ...,
    axis_name: str | None = ...,
    batch_axis: BatchAxis = ...,
    emit: Emit = ...,
    strategy: Strategy = ...,
    sparse: Sparse = ...,
    donate: bool = ...,
    state_argnums: int | Sequence[int] | None = ...,
    batch_argnums: int | Sequence[int] | None = ...,
    static_argnums: int | Sequence[int] = ...,
) -> ParallelStep: ...
@overload
def parallelize(
    step: None = None,
    /,
    *,
    mesh: Any = ...,
    data_axis: str | None = ...,
    axis_name: str | None = ...,
    batch_axis: BatchAxis = ...,
    emit: Emit = ...,
    strategy: Strategy = ...,
    sparse: Sparse = ...,
    donate: bool = ...,
    state_argnums: int | Sequence[int] | None = ...,
    batch_argnums: int | Sequence[int] | None = ...,
    static_argnums: int | Sequence[int] = ...,
) -> Callable[[Callable[..., Any]], ParallelStep]: ...


def parallelize(
    step: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Any = None,
    data_axis: str | None = None,
    axis_name: str | None = None,
    batch_axis: BatchAxis = 0,
    emit: Emit = "pjit",
    strategy: Strategy = "auto",
    sparse: Sparse = "exact",
    donate: bool = True,
    state_argnums: int | Sequence[int] | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] = (),
) -> Any:
    """Run a single-device train step by a plan that autopar makes of it.

    The returned callable computes the same function as `step`, up to the order of floating-point sums. Tables that
    are looked up by ids (embeddings) are updated on the rows that a batch touches only.

    **The state is updated in place**: after `new = step(state, batch)` the old `state` can't be used any more.

    Args:
      step: A function of arrays, such as `(state, batch) -> (state, metrics)` or
        `(params, opt_state, batch) -> (params, opt_state, loss)`. Arguments that come back are the state.
      mesh: Devices to run on: all of the process by default.
      data_axis: The mesh's axis over which batches are spread; its first by default.
      axis_name: Of a step that is written for one device of several, as for `jax.pmap(step, axis_name=...)`, the name
        by which it reduces over them. What is run is what `pmap` computes over the mesh's devices; the state is given
        once, the batch whole. Results that differ from device to device come stacked, [devices, ...].
      batch_axis: The axis of the batch's leaves that runs over its examples, leaves without it being on every device;
        or a mapping from patterns over the batch's paths to an axis or None (every device has all of it):
        `{"batch/ids": 1, "batch/negatives": None}`; the first match wins, 0 where there is none.
      emit: "pjit": one global program, which XLA partitions over the devices. "pmap": each device's own program with
        explicit reductions: sums over the examples are reduced once, after the loops that make them. The same numbers,
        up to the order of sums; StrategyError where a step can't be written so.
      strategy: "auto", or the method of every sparse parameter ("ps", "allgather", "allreduce_rows": on its touched
        rows, even where that doesn't pay; "allreduce": dense; ("ps", "hosts"): with its rows in host memory, owned by
        the ranks of an MPI job, or by this process), or a mapping from patterns over parameter paths to
        methods: `{"params/item*": "ps", "**": "auto"}`; the first match wins. A dense parameter that a pattern gives
        to "ps" is kept in shares, with its slots, and gathered for use.
      sparse: "exact"; "lazy": only touched rows move, whatever the optimizer does to the others (another function:
        TensorFlow's LazyAdam); "off".
      donate: Whether the state is updated in place.
      state_argnums: Positions of the state, where it can't be found by its coming back.
      batch_argnums: Positions of arguments that are no state, though something like them comes back.
      static_argnums: Positions of arguments that are no arrays; each value of theirs is planned by itself.

    Returns:
      A `ParallelStep`: call it like `step`; `.plan`, `.lower(...)` and `.__wrapped__` are there as well.

    Raises:
      ArgumentsError: an option that doesn't exist.

    Example:
      >>> import jax, jax.numpy as jnp, autopar
      >>> @autopar.parallelize
      ... def step(table, ids):
      ...     return table - 0.1 * jax.grad(lambda t: (t[ids] ** 2).sum())(table), ids.sum()
      >>> table, _ = step(jnp.ones((100_000, 8)), jnp.array([3, 5]))
      >>> step.plan.parameters[0].lifted
      True
    """
    if step is None:
        given = {k: v for k, v in locals().items() if k != "step"}
        return lambda fun: parallelize(fun, **given)
    if not callable(step):
        raise ArgumentsError(f"parallelize takes a function, not a {type(step).__name__}")
    if sparse not in ("exact", "lazy", "off"):
        raise ArgumentsError(f"sparse={sparse!r}: there are 'exact', 'lazy' and 'off'")
    if not isinstance(strategy, (Mapping, tuple)) and strategy not in METHODS:
        raise ArgumentsError(f"strategy={strategy!r}: there are {', '.join(METHODS)}, or a mapping from patterns")
    if emit not in ("pjit", "pmap"):
        raise ArgumentsError(f"emit={emit!r}: there are 'pjit' and 'pmap'")
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh):
        raise ArgumentsError(f"mesh is a {type(mesh).__name__}; make one with jax.make_mesh")
    if data_axis is not None and (mesh is None or data_axis not in mesh.axis_names):
        raise ArgumentsError(f"data_axis={data_axis!r} is no axis of the mesh")
    if axis_name is not None and not isinstance(axis_name, str):
        raise ArgumentsError(f"axis_name={axis_name!r}: give the name that the step reduces over, a string")
    check_batch_axis(batch_axis)
    devices = Devices.of(mesh, data_axis)
    hosts = asks_for_hosts(strategy)
    count = world().size if hosts else devices.count
    return ParallelStep(
        fun=step,
        options=Options(
            strategy=strategy,
            sparse=sparse,
            devices=count,
            hosts=hosts,
            memory=functools.partial(device_memory, jax.local_devices()),
            batch_axis=batch_axis,
            emit=emit,
            rates=functools.partial(rates_of, devices, functools.partial(_planned_by, devices)),
        ),
        devices=devices if devices.mesh.size > 1 else None,
        per_device=None if axis_name is None else PerDevice(axis_name, count, batch_axis),
        donate=donate,
        state_argnums=_positions(step, state_argnums),
        batch_argnums=_positions(step, batch_argnums),
        static_argnums=_positions(step, static_argnums) or (),
    )


def _planned_by(devices: Devices, step: Callable[..., Any], method: str) -> ParallelStep:
    """A step by a method, to be timed."""
    return parallelize(step, strategy=method, mesh=devices.mesh, data_axis=devices.axis)


def _positions(step: Callable[..., Any], given: int | Sequence[int] | None) -> tuple[int, ...] | None:
    """Positions of arguments; negative ones count from the last parameter."""
    if given is None:
        return None
    numbers = (given,) if isinstance(given, int) else tuple(given)
    if all(k >= 0 for k in numbers):
        return numbers
    count = len(inspect.signature(step).parameters)
    return tuple(k + count if k < 0 else k for k in numbers)
