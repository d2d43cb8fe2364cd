"""`parallelize`: the options, and the callable made of them."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import numpy as np

from autopar import jax_compat
from autopar.backends.clients import clients_of, server_ranks_of, servers_of
from autopar.backends.devices import Devices
from autopar.backends.stage_device import StageDevice
from autopar.errors import ArgumentsError
from autopar.ir.examples import BatchAxis, check_batch_axis
from autopar.ir.options import Options
from autopar.ir.pipeline import AUTO, Pipeline
from autopar.ir.plan import Plan
from autopar.ir.strategy import TENSOR, Results, Sparse, Strategy, asks_for_hosts, check_choices, split_method
from autopar.launch.group import everyone
from autopar.measure.calibrate import rates_of
from autopar.measure.machine import Machine, memory_of
from autopar.measure.stage_rates import stage_rates_of
from autopar.run.drift import AlphaWatch
from autopar.run.per_device import PerDevice
from autopar.run.planner import Planner
from autopar.run.positions import donated_arguments, positions_of, static_arguments
from autopar.run.step import LazyStep, ParallelStep
from autopar.run.worker_batches import GlobalBatchStep, WarmupStep
from autopar.sync import Async, Sync
from autopar.ways.table import way_of


class _Given(TypedDict, total=False):
    """The options of `parallelize`."""

    mesh: Any
    data_axis: str | None
    tensor_axis: str | None
    axis_name: str | None
    batch_axis: BatchAxis
    results: Results | None
    strategy: Strategy | None
    sparse: Sparse | None
    plan: Plan | str | Path | None
    donate: bool
    donate_argnums: int | Sequence[int] | None
    donate_argnames: str | Sequence[str] | None
    state_argnums: int | Sequence[int] | None
    batch_argnums: int | Sequence[int] | None
    static_argnums: int | Sequence[int] | None
    static_argnames: str | Sequence[str] | None
    replan: Literal["warn", "off"]
    microbatches: int
    pipeline: Pipeline | None
    sync: Sync | None


@overload
def parallelize(step: Callable[..., Any], /, **options: Unpack[_Given]) -> ParallelStep: ...
@overload
def parallelize(step: None = None, /, **options: Unpack[_Given]) -> Callable[[Callable[..., Any]], ParallelStep]: ...


def parallelize(
    step: Callable[..., Any] | None = None,
    /,
    *,
    mesh: Any = None,
    data_axis: str | None = None,
    tensor_axis: str | None = None,
    axis_name: str | None = None,
    batch_axis: BatchAxis = 0,
    results: Results | None = None,
    strategy: Strategy | None = None,
    sparse: Sparse | None = None,
    plan: Plan | str | Path | None = None,
    donate: bool = True,
    donate_argnums: int | Sequence[int] | None = None,
    donate_argnames: str | Sequence[str] | None = None,
    state_argnums: int | Sequence[int] | None = None,
    batch_argnums: int | Sequence[int] | None = None,
    static_argnums: int | Sequence[int] | None = None,
    static_argnames: str | Sequence[str] | None = None,
    replan: Literal["warn", "off"] = "warn",
    microbatches: int = 1,
    pipeline: Pipeline | None = None,
    sync: Sync | None = None,
) -> Any:
    """Runs a single-device train step by a plan that autopar makes of it.

    The returned callable computes the same function as `step`, up to the order of floating-point sums. Tables that
    are looked up by ids (embeddings) are updated on the rows that a batch touches only.

    **The state is updated in place**: after `new = step(state, batch)` the old `state` can't be used any more.

    Args:
      step: A function of arrays, such as `(state, batch) -> (state, metrics)` or
        `(params, opt_state, batch) -> (params, opt_state, loss)`. State: the arguments that the step returns updated.
      mesh: Devices to run on: all of the process by default.
      data_axis: The mesh's axis over which batches are spread; its first by default.
      tensor_axis: Another axis of the mesh, over whose devices matrix products are divided, as `strategy` says; with
        it "auto" divides those for which that is predicted to pay. By default the mesh's first other axis, where a
        strategy says "tensor", and else none: along other axes devices do the same.
      axis_name: Of a step that is written for one device of several, as for `jax.pmap(step, axis_name=...)`, the name
        by which it reduces over them. What is run is what `pmap` computes over the mesh's devices; the state is given
        once, the batch whole. Results that differ from device to device come stacked, [devices, ...].
      batch_axis: The axis of the batch's leaves that runs over its examples, leaves without it being on every device;
        or a mapping from patterns over the batch's paths to an axis or None (every device has all of it):
        `{"batch/ids": 1, "batch/negatives": None}`; the first match wins, 0 where there is none.
      results: Across processes, where results with a value for each example are: "whole" on every process, where NumPy
        reads them (the default of functions without state), or "spread", each where its example is (that of steps).
      strategy: "auto" (the default), or the method of every sparse parameter ("ps", "allgather", "allreduce_rows": on
        its touched rows, even where that doesn't pay; "allreduce": dense; ("ps", "hosts"): with its rows in host
        memory, owned by the ranks of an MPI job, or by this process), or a mapping from patterns over parameter paths
        to methods: `{"params/item*": "ps", "**": "auto"}`; the first match wins. A dense parameter that a pattern gives
        to "ps" is kept in shards, with its slots, and gathered for use (by ("ps", "hosts") from host memory); of one
        that it gives to "tensor" the products are divided over the devices of `tensor_axis`, and nothing is gathered.
      sparse: "exact" (the default); "lazy": only touched rows move, another function (TensorFlow's LazyAdam); "off".
      plan: Run the step as this plan says, in place of `strategy` and `sparse`: one that `autopar.plan` made,
        or the file that it was saved to. Nothing is measured. A plan that doesn't fit the step is a PlanError when
        the step is planned.
      donate: Whether the state is updated in place.
      donate_argnums, donate_argnames: As for `jax.jit`: arguments that the step may overwrite. If they don't name all
        of the state, none of it is updated in place. Those of a `jax.jit` around the step hold as well.
      state_argnums: Positions of the state, where it can't be found by its coming back.
      batch_argnums: Positions of arguments that are no state, though the step returns something like them.
      static_argnums, static_argnames: As for `jax.jit`: arguments that are no arrays, by position and by name; each
        value of theirs is planned by itself. Those of a `jax.jit` around the step are static here, too.
      replan: What is done where batches come to touch other numbers of rows than the one that the plan was made by:
        "warn" (an `AlphaDriftWarning`, which says what to do) or "off": nobody watches. Across processes nobody does.
      microbatches: M parts into which the batch (on N devices each device's examples) is divided. They run one after
        the other, their gradients are summed, and the update runs once: the same function in a M-th of the memory of
        activations (gradient accumulation). A step whose examples depend on one another, as by batch norm, is a
        StrategyError with its line.
      pipeline: Run the step in stages on devices of their own, through which microbatches follow one another
        (`Pipeline`). Which weights a stage has is found; new states lie where their stages are. All tables are dense.
      sync: Train a replica on each client (a process, or some), `autopar.sync.Average(...)`, or one state that servers
        keep, `autopar.sync.Async(...)`, or another way of `autopar.sync`. Another function by design; docs/replicas.md.

    Returns:
      A `ParallelStep`, which you call like `step`; `.plan`, `.lower(...)` and `.__wrapped__` are there as well.

    Raises:
      ArgumentsError: an option that doesn't exist, or one that the plan decides.
      PlanError: the plan's file can't be read.

    Example:
      >>> import jax, jax.numpy as jnp, autopar
      >>> @autopar.parallelize
      ... def step(table, ids):
      ...     return table - 0.1 * jax.grad(lambda t: (t[ids] ** 2).sum())(table), ids.sum()
      >>> table, _ = step(jnp.ones((100_000, 8)), jnp.array([3, 5]))
      >>> step.plan.parameters[0].lifted
      True
    """
    arguments = {k: v for k, v in locals().items() if k != "step"}
    if step is None:
        return lambda fun: parallelize(fun, **arguments)
    if not callable(step):
        raise ArgumentsError(f"parallelize takes a function, not a {type(step).__name__}")
    if isinstance(sync, Async) and sync.is_joined:
        return _joined(step, sync, arguments).made_by(parallelize, arguments)
    plan, strategy, sparse, pipeline = _decided(plan, strategy, sparse, pipeline)
    check_choices(strategy, sparse, donate, results)
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh):
        raise ArgumentsError(f"mesh is a {type(mesh).__name__}; make one with jax.make_mesh")
    if data_axis is not None and (mesh is None or data_axis not in mesh.axis_names):
        known = "give mesh=, too" if mesh is None else f"there are {', '.join(map(repr, mesh.axis_names))}"
        raise ArgumentsError(f"data_axis={data_axis!r} is no axis of the mesh: {known}")
    if axis_name is not None and not isinstance(axis_name, str):
        raise ArgumentsError(f"axis_name={axis_name!r}: give the name that the step reduces over, a string")
    if replan not in ("warn", "off"):
        raise ArgumentsError(
            f"replan={replan!r}: there are 'warn' and 'off'. To plan by a later batch, parallelize the step once more"
        )
    check_batch_axis(batch_axis)
    static = static_arguments(step, static_argnums, static_argnames)
    donated = donated_arguments(step, donate_argnums, donate_argnames, static, donate)
    if not isinstance(microbatches, int) or isinstance(microbatches, bool) or microbatches < 1:
        raise ArgumentsError(f"microbatches={microbatches!r}: give a whole number, 1 or more")
    if mesh is None and sync is None and not jax_compat.backend_is_up():
        return LazyStep(step, lambda: parallelize(step, **arguments)).made_by(parallelize, arguments)
    devices = Devices.of(mesh, data_axis, _tensor_axis(mesh, data_axis, tensor_axis, strategy))
    clients = clients_of(sync, devices, pipeline, plan, strategy)
    devices = devices if clients is None else clients.devices
    whole = isinstance(sync, Async)  # a worker's program is one of its whole minibatch, which its devices divide
    if pipeline is not None:
        _check_pipeline(pipeline, devices, microbatches, plan, strategy)
    hosts = asks_for_hosts(strategy)
    count = everyone().size if hosts else devices.count
    servers = 1 if clients is None else servers_of(sync, clients.processes.size)
    planner = Planner(
        fun=step,
        options=Options(
            strategy=strategy,
            sparse=sparse,
            devices=1 if whole else count,
            accelerators=devices.mesh.devices.flat[0].platform != "cpu",
            hosts=hosts,
            rank_devices=jax.local_device_count(),
            batch_axis=batch_axis,
            results=results,
            plan=plan,
            microbatches=microbatches,
            tensor=devices.tensor,
            may_leave=sync is None,
            sync=sync,
            clients=1 if clients is None else clients.count,
            worker_devices=devices.count if whole and devices.mesh.size > 1 else 0,
            servers=servers,
            server_ranks=() if clients is None else server_ranks_of(servers),
        ),
        machine=_machine_of(devices, is_measured=plan is None),
        donate=donate,
        state_argnums=positions_of(step, "state_argnums", state_argnums),
        batch_argnums=positions_of(step, "batch_argnums", batch_argnums),
        static=static,
        donated=donated,
        devices=devices if devices.mesh.size > 1 and not whole else None,
        per_device=None if axis_name is None else PerDevice(axis_name, count, batch_axis),
        clients=clients,
        way_of=way_of,
    )
    planner = _in_stages(planner, pipeline, devices) if pipeline is not None else _may_stage(planner, devices)
    unwatched = replan == "off" or devices.processes.several or sync is not None
    return ParallelStep(planner, None if unwatched else AlphaWatch()).made_by(parallelize, arguments)


def _joined(step: Callable[..., Any], sync: Async, options: Mapping[str, Any]) -> ParallelStep:
    """Returns a step that trains by data parallelism, of which each process gives its own minibatch.

    Args:
      step, sync: What the user gave.
      options: All of `parallelize`.
    """
    first: dict[str, Any] = {**options, "sync": None}
    plain = parallelize(step, **first)
    joined = GlobalBatchStep(plain.planner, all_devices=plain.devices)
    if sync.staleness == 0:
        return joined
    then: dict[str, Any] = {**options, "sync": dataclasses.replace(sync, warmup=0)}
    return WarmupStep(parallelize(step, **then).planner, first=joined, warmup=sync.warmup)


def _tensor_axis(mesh: Any, data_axis: str | None, name: str | None, strategy: Strategy) -> str | None:
    """Returns the axis of the mesh over which products are divided; None if none are.

    Raises:
      ArgumentsError: there is no such axis, or options that don't go with it.
    """
    asked = any(
        split_method(m)[0] == TENSOR for m in (strategy.values() if isinstance(strategy, Mapping) else [strategy])
    )
    if name is None and not asked:
        return None
    what = "strategy='tensor'" if name is None else f"tensor_axis={name!r}"
    names: Sequence[str] = [] if mesh is None else list(mesh.axis_names)
    others = [axis for axis in names if axis != (data_axis or names[0])]
    if not others or (name is not None and name not in others):
        shown = f"; there are {', '.join(map(repr, others))}" if others else ""
        raise ArgumentsError(
            f"{what} takes a mesh with an axis beside the data axis{shown}: "
            'mesh=jax.make_mesh((2, 4), ("data", "tensor")), with 1 in place of 2 to divide no batch'
        )
    if asks_for_hosts(strategy):
        raise ArgumentsError(f"{what} doesn't go with tables on hosts, whose ranks run programs of their own")
    return name or others[0]


def _may_stage(planner: Planner, devices: Devices) -> Planner:
    """Lets a planner use stages for a state that fits the devices in no other way, if all is left to autopar."""
    options = planner.options
    asked = (
        options.sync is not None or options.strategy != "auto" or options.plan is not None or options.microbatches > 1
    )
    if asked or planner.per_device is not None or devices.mesh.size == 1:
        return planner
    pipeline = Pipeline(AUTO, AUTO, AUTO, remat=AUTO)
    return dataclasses.replace(planner, in_stages=functools.partial(_in_stages, planner, pipeline, devices))


def _in_stages(planner: Planner, pipeline: Pipeline, devices: Devices) -> Planner:
    """Returns a planner of the same step in the stages of a pipeline."""
    places = _stage_devices(pipeline, devices)
    flat = tuple(device for place in places for device in place.devices)
    all_ = Devices.of(jax.sharding.Mesh(flat, ("stages",)))
    return dataclasses.replace(
        planner,
        options=dataclasses.replace(
            planner.options,
            devices=1,
            hosts=False,
            microbatches=pipeline.microbatch_count,
            pipeline=pipeline,
            stage_devices=len(places),
        ),
        machine=Machine(
            memory=functools.partial(memory_of, all_), stages=functools.partial(stage_rates_of, flat, all_.processes)
        ),
        devices=None,
        stage_devices=places,
        stage_processes=all_.processes,
    )


def _machine_of(devices: Devices, *, is_measured: bool) -> Machine:
    """Returns what can be asked of the devices; nothing is measured for a step that is decided."""
    memory = functools.partial(memory_of, devices)
    if not is_measured:
        return Machine(memory=memory)
    rates = functools.partial(rates_of, devices, functools.partial(planned_by, devices))
    stages = None
    if devices.tensor > 1 and not devices.processes.several:  # over which products are divided
        stages = functools.partial(stage_rates_of, tuple(devices.mesh.devices.flat), devices.processes)
    return Machine(rates, functools.partial(rates, steps=True), memory, stages)


def _stage_devices(pipeline: Pipeline, devices: Devices) -> tuple[StageDevice, ...]:
    """Returns the devices that stages may have: where products are divided, each is all devices of the tensor axis."""
    rows = devices.mesh.devices
    if devices.tensor_axis is not None:
        rows = np.moveaxis(rows, devices.mesh.axis_names.index(devices.tensor_axis), -1)
    places = [StageDevice(tuple(row)) for row in rows.reshape(-1, devices.tensor)]
    return tuple(places[: None if pipeline.stages == AUTO else pipeline.devices])


def _check_pipeline(
    pipeline: Pipeline, devices: Devices, microbatches: int, plan: Plan | None, strategy: Strategy
) -> None:
    if not isinstance(pipeline, Pipeline):
        raise ArgumentsError(f"pipeline={pipeline!r}: give autopar.Pipeline(stages=...)")
    there = devices.mesh.size // devices.tensor
    if pipeline.stages != AUTO and pipeline.devices > there:
        divided = f" times the {devices.tensor} of the tensor axis" * (devices.tensor > 1)
        raise ArgumentsError(
            f"pipeline: {pipeline.count} stages need {pipeline.devices} devices, and there are {there}{divided}"
        )
    others = {"microbatches": microbatches > 1, "plan": plan is not None}
    if asks_for_hosts(strategy):
        raise ArgumentsError("pipeline: tables on hosts have no stage; leave them to the devices")
    named = [f"{name}=" for name, is_given in others.items() if is_given]
    if named:
        raise ArgumentsError(f"{' and '.join(named)} given together with pipeline=, which decides that. Leave it out")
    places = _stage_devices(pipeline, devices)
    for place in places:
        if len({device.process_index for device in place.devices}) > 1:
            raise ArgumentsError(
                f"pipeline: the devices of the tensor axis, {', '.join(map(str, place.devices))}, are of several "
                "processes. Within a stage products are divided over devices of one process; give a mesh of such rows"
            )
    own = {place.process_index for place in places}
    if jax.process_index() not in own:
        raise ArgumentsError(
            f"pipeline: its {pipeline.devices} devices are those of processes {', '.join(map(str, sorted(own)))}, and "
            f"this is process {jax.process_index()} of {jax.process_count()}. Give more stages or replicas, or start "
            "fewer processes"
        )


def _decided(
    plan: Plan | str | Path | None,
    strategy: Strategy | None,
    sparse: Sparse | None,
    pipeline: Pipeline | None,
) -> tuple[Plan | None, Strategy, Sparse, Pipeline | None]:
    """Returns the plan that was given, and the options that follow from it; else the user's, or their defaults."""
    if plan is None:
        strategy = "auto" if strategy is None else strategy
        return None, strategy, "exact" if sparse is None else sparse, pipeline
    arguments = {"strategy": strategy, "sparse": sparse, "pipeline": pipeline}
    named = [f"{name}=" for name, value in arguments.items() if value is not None]
    if named:
        raise ArgumentsError(f"{' and '.join(named)} given together with plan=, which decides that; give one of them")
    if not isinstance(plan, (Plan, str, Path)):
        raise ArgumentsError(f"plan is a {type(plan).__name__}; give what autopar.plan returns, or the file it is in")
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    if plan.pipeline is not None:
        return None, plan.strategy, plan.sparse, plan.pipeline.pipeline
    return plan, plan.strategy, plan.sparse, None


def planned_by(devices: Devices, step: Callable[..., Any], method: str) -> ParallelStep:
    """Plans a step by one method, to be timed."""
    return parallelize(step, strategy=method, mesh=devices.mesh, data_axis=devices.axis, replan="off")
