"""`verify`: does the planned step return what the plain step returns, on the user's own data?

It compares the *change* of each state leaf over the steps with that of a float64 oracle. The planned step may err by
1e-5 of the largest change, or by 4 times the error of plain float32, whichever is more. (A tolerance on values would
pass a gradient that is wrong by 1%.) Integers must be equal. Other outputs (metrics) are compared by value in the same
measure. See docs/accuracy.md.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from autopar import explicit_meshes, jax_compat
from autopar.backends.emit import emit, while_loop
from autopar.backends.global_arrays import local
from autopar.errors import ArgumentsError, StepError, VerificationError
from autopar.ir.printer import block_text
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal
from autopar.ir.trace import block_of
from autopar.jax_types import Device, Dtype, Leaf, Params, Pytree
from autopar.launch.notices import noticing
from autopar.measure.alpha import id_program
from autopar.run.arguments import read_call
from autopar.run.buffers import naming_donated
from autopar.run.object_step import AnyStep, unwrapped
from autopar.run.planned_step import PlannedStep
from autopar.run.step import ParallelStep
from autopar.tables.kinds import is_table, materialize

#: Allowed error as a share of the largest change in a leaf.
RELATIVE = 1e-5
#: Allowed error as a multiple of plain float32's.
TIMES_PLAIN = 4.0
#: Allowed error as a share of a leaf's largest value, compared with a replay on a backend that isn't deterministic.
REPLAYED = 1e-4


@dataclass(frozen=True, slots=True)
class LeafCheck:
    """One output leaf: its largest change (of a state) or value, and both runs' errors against the oracle."""

    path: str
    size: float
    planned_error: float
    plain_error: float
    ok: bool

    def __str__(self) -> str:
        mark = "ok    " if self.ok else "WRONG "
        return (
            f"{mark}{self.path}: changed by {self.size:.3g}, planned errs by {self.planned_error:.3g}, "
            f"plain by {self.plain_error:.3g}"
        )


@dataclass(frozen=True, slots=True)
class Verification:
    """The result of `verify`, leaf by leaf; `str()` shows all."""

    leaves: tuple[LeafCheck, ...]
    steps: int
    against: str = "the plain one"

    @property
    def ok(self) -> bool:
        return all(leaf.ok for leaf in self.leaves)

    def __str__(self) -> str:
        worst = [leaf for leaf in self.leaves if not leaf.ok]
        other = "" if self.against == "the plain one" else f" with {self.against}"
        head = f"{len(self.leaves)} leaves compared over {self.steps} steps{other}: "
        return head + (f"{len(worst)} differ" if worst else "all agree") + "\n" + "\n".join(map(str, self.leaves))

    __repr__ = __str__


@explicit_meshes.outside_mesh
def verify(step: AnyStep, *args: Pytree, steps: int = 1, **kwargs: Pytree) -> Verification:
    """Runs the plain and the planned step on copies of the arguments and compares them.

    Some planned steps compute another function than the plain step by design. They are compared with a replay in one
    process instead, bit for bit, and the result says so: a pipeline without a flush with its own tasks in order;
    replicas of clients (`sync=`) with all clients' steps and means; a state that servers keep with what these did. Each
    client then gives its own minibatch.

    Several processes verify together; each runs the whole plain step by itself.

    Args:
      step: The step that `parallelize` returned.
      *args, **kwargs: Concrete arguments of a call. Nothing is donated.
      steps: Number of steps to run on the same batch, each on the state that the one before returned.

    Returns:
      The comparison, if all leaves agree.

    Raises:
      VerificationError: names every leaf that differs.
      DonatedStateError: the state was given to a step before.
      StepError: two traces of the step differ: it isn't a function of its arguments.
    """
    if not isinstance(steps, int) or steps < 1:
        raise ArgumentsError(f"verify: steps={steps!r}; the step is run once at least")
    pure, arrays, named = unwrapped(step, args, kwargs, "verify")
    if any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in pure.leaves(arrays, named)):
        raise ArgumentsError("verify runs the step: give it arrays, not shapes (jax.ShapeDtypeStruct)")
    with naming_donated(step.name, args, kwargs):
        planned = pure.planned_for(*arrays, **named)
        _check_pure(pure, planned, arrays, named)
        with noticing(step.name, "verifying, by the plain step and one in float64"):
            leaves = pure.leaves(arrays, named)
            compared = planned.way.replayed(planned, leaves, steps)
            if compared is None:
                compared = compare_runs(planned, [leaves] * steps, lazy=pure.options.sparse == "lazy")
    if not compared.ok:
        wrong = "\n".join(str(leaf) for leaf in compared.leaves if not leaf.ok)
        raise VerificationError(f"{step.name}: the planned step differs from {compared.against}\n{wrong}")
    return compared


def _check_pure(step: ParallelStep, planned: PlannedStep, args: Sequence[Pytree], kwargs: Mapping[str, Pytree]) -> None:
    call = read_call(step.fun, args, kwargs, step.static)
    shapes, named = call.shapes
    again = jax_compat.trace(_fresh(planned.fun), shapes, named, **step.static.static_options)
    old, new = (block_text(block_of(j)) for j in (planned.jaxpr, again.jaxpr))
    for line, (a, b) in enumerate(itertools.zip_longest(old, new)):
        if a != b:
            equations = list(block_of(planned.jaxpr).walk())
            where = equations[line - 1].where if 0 < line <= len(equations) else "an unknown line"
            raise StepError(
                f"{step.name} isn't a function of its arguments: traced twice it gave two programs, which differ at "
                f"{where}. Pass what varies (time, random numbers, a counter) as an argument"
            )


def _fresh(fun: Callable[..., Pytree]) -> Callable[..., Pytree]:
    return lambda *args, **kwargs: fun(*args, **kwargs)


def compare_runs(
    planned: PlannedStep,
    batches: Sequence[Sequence[Pytree]],
    *,
    lazy: bool = False,
    run: Callable[..., Sequence[Leaf]] | None = None,
) -> Verification:
    """Compares plain step, planned step and oracle over several steps.

    `batches`: flat arguments of each step; states are taken from the first one. `lazy`: compares with the lazy oracle,
    in which rows that a step doesn't look up stay as they are. `run`: the compiled planned step on flat arrays; by
    default its own.
    """
    program = planned.compiled.analysed
    states = {o.state: k for k, o in enumerate(program.outputs) if o.state is not None}
    device_sets = {frozenset(x.sharding.device_set) for x in map(_here, batches[0]) if x.committed}
    device = jax.local_devices()[0] if len(device_sets) > 1 else None  # leaves of several stages, say
    first = [_here(x, device) for x in batches[0]]
    run_plain = jax.jit(lambda *xs: planned.plain(*xs))
    plan = planned.compiled.plan
    as_called = planned.devices is not None or plan.pipeline is not None or plan.on_hosts or plan.defers
    run_planned = run or (planned.run_called if as_called else jax.jit(lambda *xs: planned.run(*xs)))
    keep = jax.jit(_lazy(planned)) if lazy else None
    block = block_of(planned.jaxpr)
    with jax_compat.enable_x64():
        run_oracle = jax.jit(oracle(block))
    plain, mine = list(first), list(first)
    truth32, truth64 = list(first), [_wide(x) for x in first]
    outs: tuple[Sequence[Leaf], ...] = ((), (), ())
    for batch in batches:
        for k, x in enumerate(batch):
            if k not in states:
                plain[k] = mine[k] = truth32[k] = _here(x, device)
                truth64[k] = _wide(plain[k])
        with jax_compat.enable_x64():
            low, high = run_oracle(truth32, truth64)
        outs = (list(run_plain(*plain)), list(run_planned(*mine)), list(high))
        if keep is not None:
            outs[0][:], outs[2][:] = keep(plain, outs[0]), _keep_wide(keep, plain, truth64, outs[2])
            low = keep(truth32, low)
        for old, new in states.items():
            plain[old], mine[old], truth32[old], truth64[old] = outs[0][new], outs[1][new], low[new], outs[2][new]
    checks = []
    for k, output in enumerate(program.outputs):
        start = first[output.state] if output.state is not None else None
        path = program.inputs[output.state].path if output.state is not None else output.path
        checks.append(_check(path, start, *(local(materialize(o[k], copy=False)) for o in outs)))
    return Verification(tuple(checks), len(batches))


def _here(x: Leaf, device: Device | None = None) -> Leaf:
    array = jnp.asarray(local(x.materialize() if is_table(x) else x))
    return array if device is None else jax.device_put(array, device)


def _wide(x: Leaf) -> Leaf:
    with jax_compat.enable_x64():
        return promote(x)


def _lazy(planned: PlannedStep) -> Callable[..., list[Leaf]]:
    """Returns a function that restores rows of lazy tables that were not looked up."""
    program = planned.compiled.analysed

    def keep(inputs: Sequence[Leaf], outputs: Sequence[Pytree]) -> list[Leaf]:
        kept = list(outputs)
        for space in program.facts.spaces:
            if planned.compiled.bound.family(space.family) is None or planned.compiled.plan.sparse != "lazy":
                continue
            flat = emit(id_program(program, program.ids[space.family])[0])(*inputs)
            touched = jnp.zeros((space.extent,), bool)
            for some in flat:
                touched = touched.at[some].set(True, mode="drop")
            for leaf, axis in zip(space.leaves, space.axes, strict=True):
                if leaf in program.new_states:
                    k = program.new_states[leaf]
                    shape = [1] * kept[k].ndim
                    shape[axis] = space.extent
                    kept[k] = jnp.where(touched.reshape(shape), kept[k], inputs[leaf].astype(kept[k].dtype))
        return kept

    return keep


def _keep_wide(
    keep: Callable[..., Leaf], inputs: Sequence[Leaf], wide: Sequence[Leaf], outputs: Sequence[Pytree]
) -> Leaf:
    with jax_compat.enable_x64():
        pairs = zip(inputs, wide, strict=True)
        mixed = [w if jnp.issubdtype(x.dtype, jnp.inexact) else x for x, w in pairs]
        return keep(mixed, outputs)


def _check(path: str, start: Leaf, plain: Leaf, mine: Leaf, truth: Leaf) -> LeafCheck:
    if jax_compat.is_key(plain.dtype):
        plain, mine, truth = (jax.random.key_data(x) for x in (plain, mine, plain))
    if plain.dtype != mine.dtype or plain.shape != mine.shape:
        return LeafCheck(path, 0.0, np.inf, 0.0, False)
    if not jnp.issubdtype(plain.dtype, jnp.inexact):
        differ = float(np.sum(np.asarray(plain) != np.asarray(mine)))
        return LeafCheck(path, float(plain.size), differ, 0.0, differ == 0)
    a, b, t = map(as_floats, (plain, mine, truth))
    base = np.zeros_like(t) if start is None else as_floats(start)
    if not np.array_equal(_kind(a), _kind(b)):
        return LeafCheck(path, 0.0, np.inf, 0.0, False)
    finite = np.isfinite(a) & np.isfinite(t)
    with np.errstate(invalid="ignore"):  # the difference of two infinities, which `finite` leaves out
        size = float(np.max(np.abs(t - base), where=finite, initial=0.0))
        plain_error = float(np.max(np.abs(a - t), where=finite, initial=0.0))
        planned_error = float(np.max(np.abs(b - t), where=finite, initial=0.0))
    allowed = max(RELATIVE * size, TIMES_PLAIN * plain_error)
    return LeafCheck(path, size, planned_error, plain_error, planned_error <= allowed)


def _kind(x: np.ndarray) -> np.ndarray:
    """Classifies numbers as 0 finite, 1 NaN, 2 and 3 the infinities: non-finite values must be the same."""
    return np.where(np.isnan(x), 1, np.where(np.isposinf(x), 2, np.where(np.isneginf(x), 3, 0)))


def as_floats(value: Leaf) -> np.ndarray:
    """Returns float64[...]; for complex numbers [2, ...], their real and imaginary parts."""
    array = np.asarray(value)
    return (np.stack([np.real(array), np.imag(array)]) if np.iscomplexobj(array) else array).astype(np.float64)


def replayed(path: str, size: float, error: float) -> LeafCheck:
    """Compares a leaf with its replay, by its largest value and difference: equal to the bit where this backend is
    deterministic."""
    allowed = 0.0 if jax_compat.repeats_bits() else REPLAYED * size
    return LeafCheck(path, size, error, 0.0, error <= allowed)


def compared_values(expected: Leaf, found: Leaf) -> tuple[float, float]:
    """Returns the largest value, and the largest difference."""
    pair = (jax.random.key_data(x) if jax_compat.is_key(getattr(x, "dtype", None)) else x for x in (expected, found))
    a, b = map(as_floats, pair)
    both = np.isnan(a) & np.isnan(b)
    error = np.where(both | (a == b), 0.0, np.abs(a - b))
    return float(np.max(np.abs(a), initial=0.0)), float(np.max(error, initial=0.0))


# --- the oracle: the step's float32 program evaluated in float64 ---
#
# Every equation is evaluated twice: as it is, and with floats and complex numbers promoted. Other values (ids, random
# bits, predicates, counters) are taken from the first evaluation, so that both make the same choices. Both states are
# carried from step to step, so errors accumulate as in training.

Array = Any
#: A value and its float64 counterpart (the same object where it is no float).
Pair = tuple[Array, Array]

#: Parameters that name a dtype.
_DTYPES = ("new_dtype", "dtype", "preferred_element_type")


def oracle(block: Block) -> Callable[[Sequence[Array], Sequence[Array]], tuple[list[Array], list[Array]]]:
    """Returns a function of (inputs, promoted inputs) that returns (outputs, float64 outputs), to run under
    `enable_x64`."""

    def run(inputs: Sequence[Array], promoted: Sequence[Array]) -> tuple[list[Array], list[Array]]:
        pairs = _block(block, list(zip(inputs, promoted, strict=True)))
        return [a for a, _ in pairs], [b for _, b in pairs]

    return run


def promote(value: Array) -> Array:
    """Promotes floats to float64 and complex numbers to complex128."""
    return value.astype(_wide_dtype(value.dtype)) if jnp.issubdtype(value.dtype, jnp.inexact) else value


def _wide_dtype(dtype: Dtype) -> Any:
    if jax_compat.is_float(dtype):
        return np.dtype(np.float64)
    return np.dtype(np.complex128) if jnp.issubdtype(dtype, jnp.inexact) else dtype


def _promoted(type_: Leaf) -> bool:
    return isinstance(type_, ArrayType) and bool(jnp.issubdtype(type_.dtype, jnp.inexact))


def _block(block: Block, inputs: Sequence[Pair]) -> list[Pair]:
    env: dict[Atom, Pair] = dict(zip(block.inputs, inputs, strict=True))

    def read(atom: Atom) -> Pair:
        if isinstance(atom, Literal):
            value = atom.value if isinstance(atom.value, jax.Array) else jnp.asarray(atom.value, atom.type.dtype)
            return value, promote(value)
        return env[atom]

    for equation in block.equations:
        results = _equation(equation, [read(a) for a in equation.inputs])
        env.update(zip(equation.outputs, results, strict=True))
    return [read(a) for a in block.outputs]


def _equation(equation: Equation, operands: list[Pair]) -> list[Pair]:
    control = _CONTROL.get(equation.op)
    if control is not None:
        return control(equation, operands)
    params = equation.original if equation.original is not None else equation.params
    first = jax_compat.bind(equation.primitive, [a for a, _ in operands], params)
    if not any(_promoted(v.type) for v in equation.outputs) or not _follows(equation):
        return [(x, promote(x) if hasattr(x, "dtype") else x) for x in first]
    wide = [b for _, b in operands]
    if equation.op in _SCATTERS:
        second = [_scatter(equation, *wide)]
    else:
        second = jax_compat.bind(equation.primitive, wide, _promote_params(params))
    pairs = zip(first, second, equation.outputs, strict=True)
    return [(a, b if _promoted(v.type) else a) for a, b, v in pairs]


def _follows(equation: Equation) -> bool:
    """Says whether an equation can be run on float64 operands. One with a body (a kernel, a call into another library,
    a general reduction) can't be; one that reads bits as floats mustn't be."""
    if equation.op in ("bitcast_convert_type", "ffi_call") or equation.effects:
        return False
    return equation.op in _SCATTERS or not any(jax_compat.is_jaxpr(v) for v in equation.params.values())


def _promote_params(params: Params) -> dict[str, Any]:
    changed = dict(params)
    for name in _DTYPES:
        if changed.get(name) is not None:
            changed[name] = _wide_dtype(changed[name])
    return changed


_SCATTERS: Mapping[str, Callable[..., Array]] = {
    "scatter": jax.lax.scatter,
    "scatter-add": jax.lax.scatter_add,
    "scatter-mul": jax.lax.scatter_mul,
    "scatter-min": jax.lax.scatter_min,
    "scatter-max": jax.lax.scatter_max,
    "scatter-sub": jax.lax.scatter_sub,
}


def _scatter(equation: Equation, operand: Array, index: Array, updates: Array) -> Array:
    """Makes a scatter anew, as its reduction is a program with a dtype of its own."""
    names = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    options = {name: equation.params[name] for name in names}
    return _SCATTERS[equation.op](operand, index, updates, **options)


def _scan(equation: Equation, operands: list[Pair]) -> list[Pair]:
    p, body = equation.params, equation.bodies[0]
    consts, carry = p["num_consts"], p["num_carry"]

    def step(state: Sequence[Pair], xs: Sequence[Pair]) -> tuple[tuple[Pair, ...], tuple[Pair, ...]]:
        results = _block(body, [*operands[:consts], *state, *xs])
        return _cast(results[:carry], body.outputs), tuple(results[carry:])

    start = _cast(operands[consts : consts + carry], body.outputs)
    state, stacked = jax.lax.scan(
        step, start, tuple(operands[consts + carry :]), length=p["length"], reverse=p["reverse"]
    )
    return [*state, *stacked]


def _cast(pairs: Sequence[Pair], like: Sequence[Atom]) -> tuple[Pair, ...]:
    def strong(value: Array, dtype: Dtype) -> Array:
        return value if jax_compat.is_key(dtype) else jax.lax.convert_element_type(value, dtype)

    kinds = zip(pairs, like, strict=False)
    return tuple((strong(a, t.dtype), strong(b, _wide_dtype(t.dtype))) for (a, b), t in kinds)


def _cond(equation: Equation, operands: list[Pair]) -> list[Pair]:
    def branch(body: Block) -> Callable[..., tuple[Pair, ...]]:
        return lambda *xs: _cast(_block(body, xs), body.outputs)

    index = jnp.asarray(operands[0][0]).astype(jnp.int32)
    return list(jax.lax.switch(index, [branch(b) for b in equation.bodies], *operands[1:]))


def _while(equation: Equation, operands: list[Pair]) -> list[Pair]:
    condition, body = equation.bodies
    n, m = equation.params["cond_nconsts"], equation.params["body_nconsts"]
    outside, inside = operands[:n], operands[n : n + m]
    start = _cast(operands[n + m :], body.outputs)
    return list(
        while_loop(
            lambda state: _block(condition, [*outside, *state])[0][0],
            lambda state: _cast(_block(body, [*inside, *state]), body.outputs),
            start,
        )
    )


_CONTROL: Mapping[str, Callable[[Equation, list[Pair]], list[Pair]]] = {
    "scan": _scan,
    "remat": lambda equation, operands: _block(equation.bodies[0], operands),
    "cond": _cond,
    "while": _while,
}
