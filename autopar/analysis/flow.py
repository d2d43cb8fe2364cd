"""Follows dependences: which inputs reach an output through elementwise equations, sums or writes of rows, and which
part of a step with tables on hosts follows from its batch and the tables alone.

The former tells a new state (`new = old + update`) from a value that merely looks like it, such as a gradient of the
same structure, or a batch that is masked and returned.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from autopar.analysis.interpreter import Interpreter, union
from autopar.analysis.primitives import IDENTITIES
from autopar.ir import program
from autopar.ir.local import ExchangeSegment, ProgramSegment
from autopar.ir.program import ArrayType, Atom, Block, Equation, Program, RouteType, Var, family_of

_SUMS = frozenset({"add", "add_any", "sub", "dynamic_update_slice"})
_KEEP = IDENTITIES | frozenset(
    "select_n convert_element_type max min clamp optimization_barrier reshape transpose".split()
)
_SCALE = frozenset({"mul", "div", "neg"})


#: Allowed scaling of a carried value: none, by a constant that leaves more than half of it, or any.
Scaled = Literal["never", "little", "ever"]


def dependent(
    equations: Iterable[Equation], starts: Iterable[Var], begins: Callable[[Equation], bool] = lambda equation: False
) -> set[Var]:
    """Returns values that depend on any of `starts`, these included, or on an equation for which `begins` holds."""
    reached = set(starts)
    for equation in equations:
        if begins(equation) or not reached.isdisjoint(equation.inputs):
            reached.update(equation.outputs)
    return reached


def carried(block: Block, *, scaled: Scaled) -> list[int]:
    """Returns for each output the set of inputs that it carries on, as the bits of an integer.

    `scaled`: whether `decay * old + update` carries `old` on, which is less certain: so does a gradient with weight
    decay, though not with a constant that leaves more than half of it.
    """
    walk = _Carried(scaled)
    walk.values.update((var, (1 << k, 0)) for k, var in enumerate(block.inputs))
    walk.run(block.equations)
    return [walk.value(a)[1] for a in block.outputs]


def updated(block: Block) -> int:
    """Returns, as bits, the inputs of which the block makes a new value of their type, returned or not.

    A new value carries the input on in a sum, scaled little.
    """
    walk = _Carried("little")
    walk.values.update((var, (1 << k, 0)) for k, var in enumerate(block.inputs))
    walk.run(block.equations)
    made = {(v.shape, v.dtype): 0 for v in block.inputs}
    for var, (_, added) in walk.values.items():
        if added and (key := (var.shape, var.dtype)) in made:
            made[key] |= added
    return union(made[v.shape, v.dtype] & 1 << k for k, v in enumerate(block.inputs))


class _Carried(Interpreter[tuple[int, int]]):
    """Values are (inputs that reach them elementwise, those of them that were added to), as bits."""

    def __init__(self, scaled: Scaled) -> None:
        super().__init__()
        self.scaled: Scaled = scaled

    def unknown(self, atom: Atom) -> tuple[int, int]:
        return (0, 0)

    def equation(self, equation: Equation, operands: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        for reach, _ in operands:
            if reach:
                return super().equation(equation, operands)
        return [(0, 0)] * len(equation.outputs)

    def join(self, values: Sequence[tuple[int, int]], atoms: Sequence[Atom]) -> tuple[int, int]:
        return union(r for r, _ in values), union(a for _, a in values)

    def end(self, carry: tuple[int, int], result: tuple[int, int]) -> tuple[int, int]:
        return result

    def while_loop(self, equation: Equation, operands: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        reach, _ = self.join(operands, ())  # it may add, it may not
        return [(reach, reach)] * len(equation.outputs)

    def plain(self, equation: Equation, operands: Sequence[tuple[int, int]]) -> Sequence[tuple[int, int]]:
        reach, added = self.join(operands, ())
        if equation.op in _SUMS or equation.op.startswith("scatter"):
            return [(reach, reach)] * len(equation.outputs)
        kept = equation.op in _KEEP or _is_scaled(equation, self.scaled)
        return [(reach, added) if kept else (0, 0)] * len(equation.outputs)


def _is_scaled(equation: Equation, scaled: Scaled) -> bool:
    if scaled != "little":
        return scaled == "ever" and equation.op in _SCALE
    constants = [a.value for a in equation.inputs if isinstance(a, program.Literal) and a.shape == ()]
    return equation.op == "mul" and any(abs(value - 0.75) < 0.25 for value in constants)


@dataclass(frozen=True, slots=True, eq=False)
class Prefix:
    """The part of a step that can run ahead."""

    inputs: tuple[Var, ...]  #: Leaves of the batch that it reads.
    ids: tuple[int, ...]  #: Indices of the segments that compute ids.
    routes: tuple[Equation, ...]
    pulls: tuple[Equation, ...]
    owners: tuple[int, ...]  #: Indices of owners' programs between pulls and fetches.
    fetches: tuple[Equation, ...]
    values: frozenset[Atom]  #: What ids and routes are.
    #: Index of the first device program that follows all routes and fetches: beside it the next step's prefix runs.
    start: int
    written: frozenset[int]  #: Families of which the step writes rows.


def prefix_of(
    program: Program, items: Sequence[ProgramSegment | ExchangeSegment], hosted: Collection[int]
) -> Prefix | None:
    """Returns the prefix of a step; None if no rows are asked for by ids of the batch, or no program follows.

    Args:
      program: The program of one rank.
      items: Its segments.
      hosted: Families on hosts.
    """
    named = list(zip(program.block.inputs, program.inputs, strict=False))  # update logs' entries have no names
    batch = [v for v, input_ in named if input_.role == "batch" and isinstance(v.type, ArrayType)]
    pulled = {e.inputs[0] for e in program.block.equations if e.op == "ap.pull" and family_of(e) in hosted}
    tables = pulled & {v for v, input_ in named if input_.role != "batch"}
    about = [
        k for k, item in enumerate(items) if isinstance(item, ExchangeSegment) and item.op in ("ap.route", "ap.fetch")
    ]
    start = next((k for k, i in enumerate(items) if k > max(about, default=0) and _is_of_devices(i)), None)
    last_route = max((k for k in about if _equations(items[k])[0].op == "ap.route"), default=-1)
    found: set[Atom] = set(batch)
    ids, owners = list[int](), list[int]()
    made: dict[str, list[Equation]] = {"ap.route": [], "ap.pull": [], "ap.fetch": []}
    for k, item in enumerate(items[:start]):
        if isinstance(item, ProgramSegment):
            block = item.block
            is_wanted = k < last_route or item.side == "owner"
            if is_wanted and found.issuperset(block.inputs) and not any(e.effects for e in block.walk()):
                found.update(block.outputs)
                (ids if item.side == "device" else owners).append(k)
            continue
        for equation in item.equations if item.op in made else ():
            if item.op == "ap.pull" and equation.inputs[0] not in tables:
                continue  # an array of the batch with the table's rows
            read = [a for a in equation.inputs if isinstance(a, Var) and (item.op != "ap.pull" or a not in tables)]
            if read and found.issuperset(read):
                made[item.op].append(equation)
                found.update(equation.outputs)
    if start is None or not made["ap.route"]:
        return None
    # Of rows only those that are fetched: slots are pulled for the update alone.
    needed: set[Atom] = {e.inputs[0] for e in made["ap.fetch"]}
    kept = list[int]()
    for k in reversed(owners):
        block = _block(items[k])
        if not needed.isdisjoint(block.outputs):
            kept.append(k)
            needed.update(block.inputs)
    pulls = tuple(e for e in made["ap.pull"] if e.outputs[0] in needed)
    read_by = {a for of in (*made["ap.route"], *(_block(items[k]) for k in (*ids, *kept))) for a in of.inputs}
    commits = (e for item in items for e in _equations(item) if e.op in ("ap.commit", "ap.densify"))
    return Prefix(
        tuple(v for v in batch if v in read_by),
        tuple(ids),
        tuple(made["ap.route"]),
        pulls,
        tuple(kept[::-1]),
        tuple(made["ap.fetch"]),
        frozenset(v for of in (*made["ap.route"], *(_block(items[k]) for k in ids)) for v in of.outputs),
        start,
        frozenset(a.type.family for e in commits for a in e.inputs if isinstance(a.type, RouteType)),
    )


def _is_of_devices(item: ProgramSegment | ExchangeSegment) -> bool:
    return isinstance(item, ProgramSegment) and item.side == "device"


def _equations(item: ProgramSegment | ExchangeSegment) -> Sequence[Equation]:
    return item.equations if isinstance(item, ExchangeSegment) else ()


def _block(item: ProgramSegment | ExchangeSegment) -> Block:
    assert isinstance(item, ProgramSegment), "exchanges are no programs"
    return item.block
