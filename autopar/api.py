"""`parallelize`: the options, and the callable made of them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple, TypedDict, Unpack, overload

import jax

from autopar import jax_compat
from autopar.backends.devices import Devices
from autopar.errors import ArgumentsError, check_whole
from autopar.ir.options import Options
from autopar.ir.paths import BatchAxis, check_batch_axis
from autopar.ir.pipeline import Pipeline
from autopar.ir.plan import Plan
from autopar.ir.strategy import Choose, Optimize, Results, Sparse, Strategy, check_choices, optimize_text
from autopar.jax_types import Pytree
from autopar.measure.calibrate import rates_of
from autopar.measure.figures import NOWHERE, Machine, memory_of
from autopar.measure.stage_rates import stage_rates_of
from autopar.run.arguments import donated_arguments, positions_of, static_arguments
from autopar.run.per_device import PerDevice
from autopar.run.planner import Planner
from autopar.run.request import StepRequest
from autopar.run.step import LazyStep, ParallelStep
from autopar.sync import Sync
from autopar.ways.table import way_for, way_of


class _Given(TypedDict, total=False):
    mesh: Any
    data_axis: str | None
    tensor_axis: str | None
    axis_name: str | None
    batch_axis: BatchAxis
    results: Results | None
    strategy: Strategy | None
    sparse: Sparse | None
    choose: Choose | None
    optimize: Optimize | None
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
def parallelize(step: Callable[..., Pytree], /, **options: Unpack[_Given]) -> ParallelStep: ...
@overload
def parallelize(step: None = None, /, **options: Unpack[_Given]) -> Callable[[Callable[..., Any]], ParallelStep]: ...


def parallelize(
    step: Callable[..., Pytree] | None = None,
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
    choose: Choose | None = None,
    optimize: Optimize | None = None,
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
      axis_name: The name by which the step reduces over devices, if it is written for one of several, as for
        `jax.pmap(step, axis_name=...)`. It computes what `pmap` computes over the mesh's devices, but is given the
        state once and the batch whole. Results that differ from device to device come stacked, [devices, ...].
      batch_axis: The axis of the batch's leaves that runs over its examples, leaves without it being on every device;
        or a mapping from patterns over the batch's paths to an axis or None (every device has all of it):
        `{"batch/ids": 1, "batch/negatives": None}`; the first match wins, 0 where there is none.
      results: Where results with a value for each example are, if there are several processes. "whole": on every
        process, so that NumPy can read them (the default of functions without state). "spread": each value where its
        example is (the default of steps).
      strategy: "auto" (the default), or the method of every sparse parameter ("ps", "allgather", "allreduce_rows": on
        its touched rows, even where that doesn't pay; "allreduce": dense; ("ps", "hosts"): with its rows in host
        memory, owned by the ranks of an MPI job, or by this process; "ps:table", ("ps:table", "hosts"): each table
        whole on one device, in a stack of four or more, or rank), or a mapping from patterns over parameter paths to
        methods: `{"params/item*": "ps", "**": "auto"}`; the first match wins. A dense parameter that a pattern gives
        to "ps" is kept in shards, with its slots, and gathered for use (by ("ps", "hosts") from host memory); of one
        that it gives to "tensor" the products are divided over the devices of `tensor_axis`, and nothing is gathered.
      sparse: "exact" (the default); "lazy": only touched rows move, another function (TensorFlow's LazyAdam); "off".
      choose: What "auto" compares methods by on several devices: "times" (the default), predicted for this machine, or
        "formulas": bytes by the Parallax paper's table 3 alone, of a table's bytes b, N devices and the share alpha of
        rows that one of them touches. Nothing is measured then but alpha.
      optimize: "all" (the default), "none", or names of the optimisations that are on (docs/optimisations.md); the
        others take their naive form. With tables on hosts: "hybrid" (dense gradients are reduced; off: dense parameters
        are on hosts, too), "local" (ranks of a machine ask others together), "owner" (owners work on sums of gradients;
        off: the first rank), "prefetch" (`shard(step=)`), "once" (what depends on a row alone is computed once for each
        distinct row). Everywhere: "border" (what follows a lookup runs at the rows' owners).
      plan: Run the step as this plan says, in place of `strategy` and `sparse`: one that `autopar.plan` made,
        or the file that it was saved to. Nothing is measured. A plan that doesn't fit the step is a PlanError when
        the step is planned.
      donate: Whether the state is updated in place.
      donate_argnums, donate_argnames: As for `jax.jit`: arguments that the step may overwrite. If they don't name all
        of the state, none of it is updated in place. Those of a `jax.jit` around the step hold as well.
      state_argnums: Positions of the state, where it isn't recognised because the step returns it.
      batch_argnums: Positions of arguments that are no state, though the step returns something like them.
      static_argnums, static_argnames: As for `jax.jit`: arguments that are no arrays, by position and by name; each
        value of theirs is planned by itself. Those of a `jax.jit` around the step are static here, too.
      replan: What to do once batches touch more or fewer rows than the plan was made for: "warn" (an
        `AlphaDriftWarning`, which says what to do) or "off". Over several processes rows aren't watched.
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
    given = {"strategy": strategy, "sparse": sparse, "choose": choose, "optimize": optimize, "pipeline": pipeline}
    decided = _decided(plan, given)
    strategy, sparse, pipeline = decided.strategy, decided.sparse, decided.pipeline
    check_choices(strategy, sparse, donate, results, decided.choose)
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
    check_whole("microbatches=%r", microbatches)
    way = way_for(sync, pipeline, strategy)
    if mesh is None and not way.is_made_at_once and not jax_compat.backend_is_up():
        return LazyStep(step, lambda: parallelize(step, **arguments)).made_by(parallelize, arguments)
    planner = Planner(
        fun=step,
        options=Options(
            strategy=strategy,
            sparse=sparse,
            choose=decided.choose,
            optimize=decided.optimize,
            batch_axis=batch_axis,
            results=results,
            plan=decided.plan,
            microbatches=microbatches,
        ),
        machine=NOWHERE,
        donate=donate,
        state_argnums=positions_of(step, "state_argnums", state_argnums),
        batch_argnums=positions_of(step, "batch_argnums", batch_argnums),
        static=static,
        donated=donated,
        per_device=None if axis_name is None else PerDevice(axis_name, 1, batch_axis),
        way_of=way_of,
    )
    request = StepRequest(
        planner=planner,
        mesh=mesh,
        data_axis=data_axis,
        tensor_axis=tensor_axis,
        pipeline=pipeline,
        sync=sync,
        replan=replan,
        machine_of=_measured if decided.plan is None else _known,
        parallelize=lambda **changes: parallelize(step, **{**arguments, **changes}),
        way_for=way_for,
    )
    way.check(request)
    return way.step(request).made_by(parallelize, arguments)


def _known(devices: Devices) -> Machine:
    """Returns a machine for a plan that is decided: only its memory can be asked for."""
    return Machine(memory=functools.partial(memory_of, devices))


def _measured(devices: Devices) -> Machine:
    """Returns a machine that measures its devices when asked."""
    rates = functools.partial(rates_of, devices, functools.partial(planned_by, devices))
    stages = None
    if devices.tensor > 1 and not devices.processes.several:  # over which products are divided
        stages = functools.partial(stage_rates_of, tuple(devices.mesh.devices.flat), devices.processes)
    return Machine(rates, functools.partial(rates, steps=True), functools.partial(memory_of, devices), stages)


class _Decided(NamedTuple):
    """An earlier plan to follow, and what it or the user decides."""

    plan: Plan | None
    strategy: Strategy
    sparse: Sparse
    choose: Choose
    optimize: str
    pipeline: Pipeline | None


def _decided(plan: Plan | str | Path | None, given: Mapping[str, Any]) -> _Decided:
    """Returns the given plan and the options that follow from it, or else the user's options and defaults."""
    if plan is None:
        defaults = {"strategy": "auto", "sparse": "exact", "choose": "times", "optimize": "all", "pipeline": None}
        chosen = {name: default if given[name] is None else given[name] for name, default in defaults.items()}
        return _Decided(plan=None, **{**chosen, "optimize": optimize_text(chosen["optimize"])})
    named = [f"{name}=" for name, value in given.items() if value is not None]
    if named:
        raise ArgumentsError(f"{' and '.join(named)} given together with plan=, which decides that; give one of them")
    if not isinstance(plan, (Plan, str, Path)):
        raise ArgumentsError(f"plan is a {type(plan).__name__}; give what autopar.plan returns, or the file it is in")
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    staged = None if plan.pipeline is None else plan.pipeline.pipeline
    followed = plan if staged is None else None
    return _Decided(followed, plan.strategy, plan.sparse, "times", plan.optimize, staged)


def planned_by(devices: Devices, step: Callable[..., Pytree], method: str) -> ParallelStep:
    """Plans a step by one method, to be timed."""
    return parallelize(step, strategy=method, mesh=devices.mesh, data_axis=devices.axis, replan="off")
