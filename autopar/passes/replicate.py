"""Decides which leaves of their replicas clients average (`autopar.sync`, docs/replicas.md)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence

import jax.numpy as jnp

from autopar import jax_compat
from autopar.analysis.flow import dependent
from autopar.analysis.local import whole_operands_once
from autopar.errors import PlanError, StrategyError
from autopar.ir.paths import BatchAxis
from autopar.ir.plan import Plan, SyncPlan
from autopar.ir.program import Block, Equation, Program, Var
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.rowspace import Row, Same
from autopar.ir.served import balanced, center_shares
from autopar.ir.slicing import behind
from autopar.passes.analyze_batch import analyze_batch
from autopar.sync import Elastic, Replicated


def replicate(
    program: Program,
    bound: ProgramPlan,
    sync: Replicated,
    clients: int,
    batch_axis: BatchAxis,
    earlier: Plan | None = None,
    servers: int = 1,
    server_ranks: Sequence[int] = (),
) -> tuple[ProgramPlan, str]:
    """Puts a `SyncPlan` into the plan `bound` of one client's analysed program.

    `earlier`: a plan by which the step is to be run. `servers`: most servers that may keep a centre. `server_ranks`:
    ranks of servers that are processes of their own. Raises PlanError if the earlier plan has other replicas. Raises
    StrategyError if the step has no weights that examples meet, or fewer than fragments.
    """
    examples = analyze_batch(program, devices=1, batch_axis=batch_axis, always=True)[0].batch
    found = weights(program, examples)
    if not found:
        raise StrategyError(
            f"sync: {program.name} has no weights: no floating-point leaf of its state meets the examples. Say with "
            "batch_axis= which axis of the batch runs over them, and with state_argnums= what the state is"
        )
    lost = next((k for k in found if not goes_on(program, examples, k)), None)
    if lost is not None:
        raise StrategyError(
            f"sync: {program.inputs[lost].path} meets the examples, but its new value doesn't follow from it, as of a "
            "copy of other weights in fewer bits: its mean would be lost in the next step. Make the copy in the step, "
            "and leave it out of the state"
        )
    if len(found) < sync.fragments:
        raise StrategyError(
            f"sync: fragments={sync.fragments}, and {program.name} has {len(found)} weights: a fragment is some of "
            "them. Give fewer fragments"
        )
    block = program.block
    by_servers = isinstance(sync, Elastic)
    sizes = {k: block.inputs[k].type.nbytes for k in found}
    parts = balanced([sizes[k] for k in found], sync.fragments)
    fragments = [[found[n] for n in part] for part in parts]
    shares = center_shares([*sizes.values()], servers) if by_servers else []
    by_rows = clients > 1 and not by_servers
    rows = dict(_touched(program, bound, found, clients * sync.period)) if by_rows else {}
    is_in_every_step = (sync.partners, sync.period, sync.delay, sync.outer) == ("all", 1, 0, None)
    gradients = backward_pass(program) if is_in_every_step else set()
    broken = first_nonlinear(program, gradients, found) if gradients else None
    floating = [k for k in program.new_states if jnp.issubdtype(block.inputs[k].dtype, jnp.floating)]
    batch = [v for v, input_ in program.named_inputs if input_.role == "batch"]
    plan = SyncPlan(
        name=sync.name,
        clients=clients,
        every=sync.period,
        delay=sync.delay,
        outer=sync.outer is not None,
        fragments=tuple(tuple(program.inputs[k].path for k in fragment) for fragment in fragments),
        fragment_bytes=tuple(sum(sizes[k] for k in fragment) for fragment in fragments),
        # Clients differ from a neighbour in more than a step's rows, at most in all.
        mean_bytes=sum(rows[k] if k in rows and sync.partners == "all" else size for k, size in sizes.items()),
        by_rows=tuple(program.inputs[k].path for k in rows),
        own=tuple(program.inputs[k].path for k in floating if k not in sizes),
        servers=len(shares),
        alpha=sync.alpha if by_servers else 0.0,
        slope=sync.slope,
        server_bytes=tuple(sum(span.nbytes for span in share) for share in shares),
        server_ranks=tuple(server_ranks[: len(shares)]),
        way=sync.call,
        nonlinear="" if broken is None else f"{broken.op} ({broken.where})",
        averages_gradients=bool(gradients) and broken is None,
        partners=sync.partners,
        examples=max((v.shape[examples[v]] for v in batch if v in examples), default=0),
    )
    check_replicas(earlier, program.name, earlier and earlier.sync, plan)
    return bound.noting(sync=plan), f"{clients} clients, {len(found)} weights: {sync.name}"


def check_replicas(earlier: Plan | None, name: str, old: object, new: object) -> None:
    """Checks that an earlier plan, by which a step is to be run, has the same replicas or servers.

    `earlier`: the plan, if there is one. `name`: the step's name. `old`, `new`: that plan's replicas, and the ones of
    `sync=`. Raises PlanError if they differ.
    """
    if earlier is not None and str(old) != str(new):
        raise PlanError(
            f"{earlier.name} is of {old or 'no replicas'}, and sync= makes {new} of {name}: give the sync= that it was "
            "made with, on as many processes, or make the plan again"
        )


def _touched(
    program: Program, bound: ProgramPlan, leaves: Sequence[int], minibatches: int
) -> Iterator[tuple[int, int]]:
    """Yields tables whose untouched rows no step moves, with the most bytes of rows that minibatches touch."""
    for k in leaves:
        space = program.facts.space_of(k)
        family = None if space is None else bound.family(space.family)
        if space is None or family is None or family.table.log_steps:
            continue
        new = program.facts.value(program.block.outputs[program.new_states[k]])
        if isinstance(new, Row) and isinstance(new.untouched, Same) and new.untouched.leaf == k:
            count = min(space.extent, minibatches * program.ids[space.family].count)
            yield k, count * (program.block.inputs[k].type.nbytes // space.extent)


# --- the weights of a state: leaves that examples meet. Slots, averages and counts meet sums over examples ---


def weights(program: Program, batch: Mapping[Var, int]) -> list[int]:
    """Returns the inputs that are weights, in order: floating-point leaves of the state that meet examples and change.

    A value that depends on a gradient is no weight any more: a slot that it is added to may meet examples later, in the
    next update of the same step, or in a loss that is logged. (Gradients that JAX didn't make aren't recognized.)
    `batch`: the axis of each variable that runs over the batch.
    """
    block = program.block
    starts: dict[Var, set[int]] = {}
    for k, out in program.new_states.items():
        var = block.inputs[k]
        if jnp.issubdtype(var.dtype, jnp.floating) and var not in batch and block.outputs[out] is not var:
            starts[var] = {k}
    return sorted(_met(block, starts, batch))


def _met(block: Block, starts: Mapping[Var, set[int]], batch: Mapping[Var, int]) -> set[int]:
    """Finds the leaves on which values that meet the batch in a block depend."""
    reached, gradients, found = dict(starts), set[Var](), set[int]()
    for equation in block.equations:
        atoms = [a for a in equation.inputs if isinstance(a, Var)]
        leaves = {k for a in atoms for k in reached.get(a, ())}
        is_updated = not gradients.isdisjoint(atoms)
        if any(a in batch for a in (*atoms, *equation.outputs)):
            inside = equation.op == "scan" and any(v in batch for v in equation.bodies[0].inputs)
            found |= _met_in_scan(equation, reached, batch) if inside else leaves
            if jax_compat.in_backward_pass(equation.info):
                gradients.update(v for v in equation.outputs if v not in batch)
        elif is_updated:
            gradients.update(equation.outputs)
        elif leaves:
            reached.update((v, leaves) for v in equation.outputs)
    return found


def _met_in_scan(equation: Equation, reached: Mapping[Var, set[int]], batch: Mapping[Var, int]) -> set[int]:
    body = equation.bodies[0]
    pairs = zip(body.inputs, equation.inputs, strict=True)
    starts = {inner: reached[a] for inner, a in pairs if isinstance(a, Var) and a in reached}
    return _met(body, starts, batch)


def goes_on(program: Program, batch: Mapping[Var, int], k: int) -> bool:
    """Returns whether leaf `k`'s new value depends on the old one other than by its meeting the examples."""
    plain = (e for e in program.block.equations if e.bodies or not any(a in batch for a in (*e.inputs, *e.outputs)))
    return program.block.outputs[program.new_states[k]] in dependent(plain, [program.block.inputs[k]])


# --- linearity of the update in gradients: only then does averaging weights equal averaging gradients ---


def backward_pass(program: Program) -> set[Equation]:
    """Returns the equations of JAX's backward pass, and those that these depend on; empty if there is no such pass."""
    equations = program.block.equations
    own = {e for e in equations if jax_compat.in_backward_pass(e.info)}
    return own.union(behind(equations, (a for e in own for a in e.inputs)))


def first_nonlinear(program: Program, gradients: Collection[Equation], weights: Sequence[int]) -> Equation | None:
    """Returns the first equation from gradients or slots to new weights that isn't linear in them; None: all are.

    Clients that average their weights after each step have the same weights before it. So weights are constants here,
    as is everything that depends on neither gradients nor slots, which stay each client's own. `gradients`: the
    equations that make gradients; `weights`: inputs, by number.
    """
    block, new = program.block, program.new_states
    slots = (v for k, v in enumerate(block.inputs) if k in new and k not in weights)
    own = {v for v in slots if jnp.issubdtype(v.dtype, jnp.floating)}
    batch = {v for v, input_ in program.named_inputs if input_.role == "batch"}
    varying: set[Var] = own | batch
    broken: dict[Var, Equation] = {}
    for equation in block.equations:
        atoms = [a if isinstance(a, Var) else None for a in equation.inputs]
        partial = [a in varying for a in atoms]
        if not any(partial):
            continue
        varying.update(equation.outputs)
        if equation in gradients:
            continue
        earlier = next((broken[a] for a in atoms if a in broken), None)
        if earlier is None and whole_operands_once(equation, partial) is None:
            earlier = equation
        if earlier is not None:
            broken.update(dict.fromkeys(equation.outputs, earlier))
    results = (block.outputs[new[k]] for k in weights)
    return next((broken[out] for out in results if isinstance(out, Var) and out in broken), None)
