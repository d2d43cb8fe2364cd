"""Follows the batch through the program: which axis of each value runs over its examples (`analysis.batch`).

Inputs that aren't state are global batches, spread along the user's axis (`ir.paths`) if the devices divide it, or
if each device's part may be padded and masked (`uneven`). Leaves that all examples share (sampled negatives) stay whole
on each device. An evaluation has no state, and takes parameters beside the batch, which stay in place: arguments with
tables, or used like weights, or with leaves of different sizes. A leaf of the state with an axis of the batch's size
may be carried along with the examples (an LSTM's state between pieces of text), or a weight that has this size by
chance. So each is guessed to be carried, and the program decides: a carried leaf meets the batch along its axis only,
and its new value runs over the batch whether or not the old one does.
"""

from __future__ import annotations

import functools
import operator
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from autopar.analysis.batch import BatchAxes, Guesses, follow_batch, uniform_axes
from autopar.analysis.row_ids import collect_ids
from autopar.analysis.work import flops
from autopar.errors import ArgumentsError
from autopar.ir.paths import BatchAxis, example_axes
from autopar.ir.program import ArrayType, Atom, Block, Equation, Program, Var

#: Fewest examples for each device that are worth dividing.
MANY = 16


def analyze_batch(
    program: Program,
    *,
    devices: int,
    microbatches: int = 1,
    batch_axis: BatchAxis = 0,
    always: bool = False,
    uneven: bool = False,
) -> tuple[Program, str]:
    """Fills `program.batch` and `program.ids`, the ids that each device looks up.

    Args:
      devices: N.
      microbatches: M, into which each device's examples are divided.
      batch_axis: The axis of the batch's leaves that runs over its examples. If it is a number, leaves that the
        examples share are left out.
      always: Follow the batch on one device as well; then all leaves are divided.
      uneven: A batch whose size N doesn't divide is spread, with ceil(B / N) examples on each device. B is the size of
        its largest leaf, or else the most frequent one. Other leaves whose size N doesn't divide stay whole.

    Raises:
      ArgumentsError: `batch_axis` doesn't fit the batch, or the microbatches don't divide it.
    """
    named = batch_of(program, batch_axis)
    if devices * microbatches == 1 and not always:
        return _with_ids(program, {}, devices), "one device"
    parts = devices * microbatches
    is_asked = always or not isinstance(batch_axis, int)
    shared = set[Var]() if is_asked else _shared(program.block, named, parts)
    named = {v: axis for v, axis in named.items() if v not in shared}
    sizes = [v.shape[axis] for v, axis in named.items()]
    undivided = next((n for n in (max(sizes, default=0), common_size(sizes, devices)) if n > 1 and n % devices), 0)
    undivided *= uneven and microbatches == 1
    starts = {
        v: axis
        for v, axis in named.items()
        if v.shape[axis] and (v.shape[axis] % parts == 0 or v.shape[axis] == undivided)
    }
    if microbatches > 1:
        paths = {v: x.path for v, x in program.named_inputs}
        _check_divides(paths, named, starts, devices, microbatches)
    axes = _follow(program, starts, parts)
    over = f"{devices} devices" if microbatches == 1 else f"{parts} parts"
    return _with_ids(program, axes, devices, undivided), _note(program, over, named, starts, axes)


def batch_of(program: Program, batch_axis: BatchAxis = 0) -> dict[Var, int]:
    """Returns the leaves of a program's batch that have examples, and their axis. Raises ArgumentsError if `batch_axis`
    doesn't fit the batch."""
    inputs = [(v, input_.path) for v, input_ in program.named_inputs if input_.role == "batch"]
    axes = example_axes(batch_axis, [(path, v.shape) for v, path in inputs])
    named = {v: axis for (v, _), axis in zip(inputs, axes, strict=True) if axis is not None}
    if program.new_states or not isinstance(batch_axis, int):
        return named
    arguments = {v: input_.path.partition("/")[0] for v, input_ in program.named_inputs}
    parameters = _parameters(program, arguments, named)
    return {v: axis for v, axis in named.items() if arguments[v] not in parameters} or named


def parameters_of(program: Program, batch_axis: BatchAxis) -> frozenset[int]:
    """Returns the inputs of an evaluation that are no examples; none of a program with states. Raises ArgumentsError if
    `batch_axis` doesn't fit the batch."""
    if program.new_states:
        return frozenset()
    named = batch_of(program, batch_axis)
    return frozenset(k for k, v in enumerate(program.block.inputs) if v not in named)


def common_size(sizes: Iterable[int], devices: int) -> int:
    """Returns the size that most leaves of a batch have along their axes of examples; 0 if two are as frequent, or
    few."""
    (size, leaves), (_, others) = (*Counter(sizes).most_common(2), (0, 0), (0, 0))[:2]
    return size if leaves > others and size >= MANY * devices else 0


def _shared(block: Block, named: Mapping[Var, int], parts: int) -> set[Var]:
    """Returns leaves that each example meets as a whole, such as sampled negatives.

    They have another size than most, their axis crosses that of the examples (each with each), and no product takes
    values of theirs alone, which the devices had better divide.
    """
    sizes = Counter(v.shape[axis] for v, axis in named.items()).most_common(2)
    if len(sizes) < 2 or sizes[0][1] == sizes[1][1]:
        return set()
    by_size: dict[int, dict[Var, int]] = {}
    for v, axis in named.items():
        by_size.setdefault(v.shape[axis], {})[v] = axis
    examples: BatchAxes = dict(by_size.pop(sizes[0][0]))
    follow_batch(block.equations, examples, devices=parts)
    shared: set[Var] = set()
    for leaves in by_size.values():
        own: BatchAxes = dict(leaves)
        follow_batch(block.equations, own, devices=parts)
        alone = (e for e in block.walk() if own.keys() & set(e.inputs) and not examples.keys() & set(e.inputs))
        if any(examples.get(v, axis) != axis for v, axis in own.items()) and not any(map(flops, alone)):
            shared.update(leaves)
    return shared


def _parameters(program: Program, arguments: Mapping[Var, str], named: Mapping[Var, int]) -> set[str]:
    """Returns the arguments of an evaluation that hold parameters: those with tables, or used like weights.

    If there are none, the only one whose leaves differ in size, if one after it has leaves of a single size.

    `arguments`: input -> its argument. `named`: leaf that may have examples -> their axis.
    """
    tables = {arguments[v] for v, x in program.named_inputs if x.role == "table"}
    tables |= _used_as_parameters(program.block, arguments, named)
    if tables:
        return tables
    sizes: dict[str, set[int]] = {}
    for v, axis in named.items():
        sizes.setdefault(arguments[v], set()).add(v.shape[axis])
    several = [argument for argument, found in sizes.items() if len(found) > 1]
    return set(several) if len(several) == 1 and several[0] != [*sizes][-1] else set()


def _used_as_parameters(block: Block, arguments: Mapping[Var, str], named: Mapping[Var, int]) -> set[str]:
    """Returns the arguments with a leaf that is looked up, or contracted with other arguments, along these axes."""
    follows: dict[Atom, set[str]] = {v: {argument} for v, argument in arguments.items()}
    along: dict[Atom, int] = {**named}
    found: set[str] = set()
    for equation in block.equations:
        sources = [follows.get(a, set()) for a in equation.inputs]
        for k, axes in enumerate(_summed(equation)):
            if along.get(equation.inputs[k]) in axes and sources[k].isdisjoint(sources[1 - k]):
                found |= sources[k]
        if equation.op == "convert_element_type" and equation.inputs[0] in along:
            along[equation.outputs[0]] = along[equation.inputs[0]]
        follows.update(dict.fromkeys(equation.outputs, set[str]().union(*sources)))
    return found


def _summed(equation: Equation) -> Sequence[Sequence[int]]:
    if equation.op == "gather":
        return (equation.params["dimension_numbers"].start_index_map,)
    return equation.params["dimension_numbers"][0] if equation.op == "dot_general" else ()


def _check_divides(
    paths: Mapping[Var, str], named: Mapping[Var, int], starts: Mapping[Var, int], devices: int, microbatches: int
) -> None:
    """Checks that every microbatch of every device has as many examples."""
    wrong = next((v for v in named if v not in starts), None)
    if wrong is not None:
        each = "" if devices == 1 else f" of each of {devices} devices"
        size, axis = wrong.shape[named[wrong]], named[wrong]
        raise ArgumentsError(
            f"microbatches={microbatches} doesn't divide the batch{each}: {paths[wrong]} has {size} examples along "
            f"axis {axis}. Give a divisor, or say with batch_axis= which leaves have no examples"
        )
    if not starts:
        raise ArgumentsError(f"microbatches={microbatches}: nothing in the batch has examples that could be divided")


def _with_ids(program: Program, axes: BatchAxes, devices: int, undivided: int = 0) -> Program:
    spaces = () if program.rows is None else program.facts.spaces
    ids = {space.family: collect_ids(program.block, space, axes, devices, undivided) for space in spaces}
    return replace(program, batch=axes, ids=ids)


def _note(program: Program, over: str, named: Mapping[Var, int], starts: Mapping[Var, int], axes: BatchAxes) -> str:
    if named and not starts:
        sizes = ", ".join(map(str, sorted({v.shape[axis] for v, axis in named.items()})))
        return f"nothing is spread: {over} don't divide the batch ({sizes})"
    carried = [input_.path for v, input_ in program.named_inputs if input_.role == "state" and v in axes]
    count = len(axes) - len(starts) - len(carried)
    note = f"{len(starts)} inputs are spread over {over}, and {count} values that follow from them"
    return f"{note}; carried along with the examples: {', '.join(carried)}" if carried else note


def _follow(program: Program, starts: Mapping[Var, int], devices: int) -> BatchAxes:
    """Returns the batch axes of all variables, those of carried leaves of the state included."""
    waiting = _candidates(program, {v.shape[axis] for v, axis in starts.items()})
    uniform = uniform_axes(program.block) if waiting else {}
    while True:
        leaves = [v for v, options in waiting.items() if options]
        guesses = Guesses(uniform, {v: 1 << n for n, v in enumerate(leaves)})
        axes: BatchAxes = {**starts, **{v: waiting[v][0] for v in leaves}}
        follow_batch(program.block.equations, axes, guesses if leaves else None, devices=devices)
        unconfirmed = _unconfirmed(program, leaves, axes, guesses)
        alone = [some for some in guesses.refuted if some & (some - 1) == 0]
        totals = (functools.reduce(operator.or_, some, 0) for some in (alone, [unconfirmed], guesses.refuted))
        wrong = next(filter(None, totals), 0)
        if not wrong:
            return axes
        for n, v in enumerate(leaves):
            if wrong >> n & 1:
                waiting[v].pop(0)


def _candidates(program: Program, sizes: set[int]) -> dict[Var, list[int]]:
    """Returns leaves of the state that may be carried, with their axes of the batch's size; never rows in row space."""
    taken = {k for space in program.facts.spaces if space.refusal is None for k in space.leaves}
    candidates = {}
    for k in program.new_states:
        var = program.block.inputs[k]
        axes = [d for d, n in enumerate(var.shape) if n in sizes]
        if axes and k not in taken and isinstance(var.type, ArrayType):
            candidates[var] = axes
    return candidates


def _unconfirmed(program: Program, leaves: Sequence[Var], axes: BatchAxes, guesses: Guesses) -> int:
    """Returns guesses, as bits, about leaves whose new value isn't known to lie along the same axis unless other
    guesses hold."""
    new = {program.block.inputs[k]: program.block.outputs[out] for k, out in program.new_states.items()}
    total = 0
    for n, leaf in enumerate(leaves):
        value = new[leaf]
        known = isinstance(value, Var) and axes.get(value) == axes[leaf] and value not in guesses.bases
        total |= 0 if known else 1 << n
    return total
