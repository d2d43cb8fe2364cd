"""Writes the ids of all accesses of a family as equations at the top of the program.

`collect_ids` computes the ids of all lookups and scatters outside of their loops, each set of ids once: a forward
lookup and its backward scatter share one. Ids are flat int32; those out of range are the number of rows (no row).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar import jax_compat
from autopar.analysis.batch import follow_batch
from autopar.analysis.primitives import ELEMENTWISE, SHAPED
from autopar.analysis.rules import resized
from autopar.analysis.values import Numbering, atom_key
from autopar.ir.program import ArrayType, Atom, Block, Equation, Literal, Var
from autopar.ir.rowspace import Access, Index, KnownIds, RowIds, RowSpace
from autopar.ir.slicing import hoist
from autopar.ir.writer import expand
from autopar.jax_types import Array, Leaf, Params


def index_atoms(access: Access) -> tuple[Atom, ...]:
    """Returns the operands of an access that say which rows it means (none for a static slice or pad)."""
    equation = access.equation
    if access.known is not None:
        return (access.known.atom,)
    if equation.op == "gather" or equation.op.startswith("scatter"):
        return (equation.inputs[1],)
    if equation.op == "dynamic_slice":
        return (equation.inputs[1 + access.axis],)
    if equation.op == "dynamic_update_slice":
        return (equation.inputs[2 + access.axis],)
    return ()


def id_params(access: Access, extent: int) -> Params:
    """Returns the parameters of an access's `row_ids` (dynamic) or `row_range` (static) operation.

    `position`: the component of the index vectors that is the row; `clip`: ids out of range mean the nearest row (else
    none); `count`: adjacent rows from each start.
    """
    equation, axis = access.equation, access.axis
    if equation.op == "gather":
        position = 0 if access.known else equation.params["dimension_numbers"].start_index_map.index(axis)
        return {"extent": extent, "position": position, "clip": "FILL" not in _mode(equation), "count": 1}
    if equation.op.startswith("scatter"):
        mapped = equation.params["dimension_numbers"].scatter_dims_to_operand_dims
        position = 0 if access.known else mapped.index(axis)
        return {"extent": extent, "position": position, "clip": "CLIP" in _mode(equation), "count": 1}
    if equation.op == "dynamic_slice":
        return {"extent": extent, "position": None, "clip": True, "count": equation.params["slice_sizes"][axis]}
    if equation.op == "dynamic_update_slice":
        return {"extent": extent, "position": None, "clip": True, "count": equation.inputs[1].shape[axis]}
    if equation.op == "slice":
        p = equation.params
        stride = 1 if p["strides"] is None else p["strides"][axis]
        return {"extent": extent, "start": p["start_indices"][axis], "stop": p["limit_indices"][axis], "stride": stride}
    assert equation.op == "pad", f"{equation.op} is no access"
    low, _, interior = (int(x) for x in equation.params["padding_config"][axis])
    rows = equation.inputs[0].shape[axis]
    stop = low + (rows - 1) * (interior + 1) + 1 if rows else low
    return {"extent": extent, "start": low, "stop": stop, "stride": interior + 1}


def _mode(equation: Equation) -> str:
    return str(equation.params["mode"])


def ids_equation(params: Params, index: Atom | None) -> Equation:
    """Returns the operation that computes flat ids from an access's index operand."""
    if index is None:
        size = len(range(params["start"], params["stop"], params["stride"]))
        return Equation("ap.row_range", (), (Var(ArrayType((size,), np.dtype(np.int32))),), params)
    shape = index.shape if params["position"] is None else index.shape[:-1]
    shape = resized(shape, params["batch"], shape[params["batch"]] + params["more"]) if "more" in params else shape
    size = math.prod(shape) * params["count"]
    return Equation("ap.row_ids", (index,), (Var(ArrayType((size,), np.dtype(np.int32))),), params)


def collect_ids(
    block: Block, space: RowSpace, batch: Mapping[Var, int] | None = None, devices: int = 1, undivided: int = 0
) -> RowIds:
    """Returns the ids of all accesses of a family, each distinct set once.

    `batch`: the batch axes of variables. `devices`: N, the number of devices over which examples are spread.
    `undivided`: B, if N doesn't divide the examples: each device has the ids of ceil(B / N) of them, padded by those of
    no row (`more` in all).
    """
    axes = dict(batch or {})
    spread: dict[Equation, int | None] = {}
    indices: dict[Equation, Index] = {}
    numbering = Numbering()
    if any(access.path or access.known for access in space.accesses):  # the block may compute their ids, too
        for equation in block.equations:
            numbering.find(equation)
    producers = {v: e for e in block.equations if e.op == "scan" for v in e.outputs}
    wanted: dict[Any, tuple[Mapping[str, Any], Atom | None]] = {}
    equations: list[Equation] = []
    for access in space.accesses:
        params = id_params(access, space.extent)
        index: Atom | None = None
        for atom in index_atoms(access):
            inner, value, varies = hoist(access.path, atom)
            returned, value = _returned_by_scan(value, producers)
            inner = [*(() if access.known is None else access.known.equations), *inner, *returned]
            known = len(equations)
            index = append_new(inner, value, equations, numbering)
            if access.known is None:
                indices[access.equation] = Index(access.path, index, varies)
            follow_batch(equations[known:], axes, devices=devices)
            least = 1 if undivided else devices
            if access.known is None:
                spread[access.equation] = axis = _spread_axis(access, atom, index, axes, least)
            else:
                spread[access.equation], axis = _known_axes(access, index, sum(varies), axes, least)
            params = {**params, "batch": axes.get(index) if axis is not None and isinstance(index, Var) else None}
            if params["batch"] is not None and (more := _padding(index.shape[params["batch"]], devices, undivided)):
                params["more"] = more
        key = (None if index is None else atom_key(index), *(v for k, v in sorted(params.items()) if k != "clip"))
        # Clipped ids include the unclipped ones, so one of the two is enough.
        if key not in wanted or params.get("clip"):
            wanted[key] = (params, index)
    results = []
    for params, index in wanted.values():
        equations.append(ids_equation(params, index))
        results.append(equations[-1].outputs[0])
    batched = tuple(params.get("batch") is not None for params, _ in wanted.values())
    return RowIds(tuple(equations), tuple(results), batched, spread, indices)


def _padding(size: int, devices: int, undivided: int) -> int:
    if undivided and size % undivided == 0:
        return size // undivided * (-undivided % devices)
    return -size % devices


def _spread_axis(access: Access, atom: Atom, index: Atom, axes: Mapping[Var, int], devices: int) -> int | None:
    """Returns the batch axis of an access's index operand, if each device can run the access on its own examples.

    The same axis must be found where the ids are computed, outside of loops: a device requests rows by the one and
    looks them up by the other.
    """
    if not isinstance(atom, Var) or not isinstance(index, Var) or atom not in axes:
        return None
    equation, axis, rank = access.equation, axes[atom], len(atom.shape)
    if not (equation.op == "gather" or equation.op.startswith("scatter")):
        return None
    numbers = equation.params["dimension_numbers"]
    batching = "start_indices_batching_dims" if equation.op == "gather" else "scatter_indices_batching_dims"
    if axis >= rank - 1 or axis in getattr(numbers, batching) or atom.shape[axis] % devices:
        return None
    return axis if axes.get(index) == axis + len(index.shape) - rank else None


def _known_axes(
    access: Access, index: Atom, turns: int, axes: Mapping[Var, int], devices: int
) -> tuple[int | None, int | None]:
    """Returns the batch axes of an access's index operand, and of the known ids that replace it.

    None: every device has all of them. Leading axes of the known ids are the turns of loops.
    """
    own = access.equation.inputs[1]
    axis = _spread_axis(access, own, own, axes, devices)
    if axis is None or not isinstance(index, Var) or index.shape[turns:-1] != own.shape[:-1]:
        return axis, None
    return axis, axis + turns if axes.get(index) == axis + turns else None


def _returned_by_scan(value: Atom, producers: Mapping[Var, Equation]) -> tuple[list[Equation], Atom]:
    scan = producers.get(value) if isinstance(value, Var) else None
    if scan is None or isinstance(value, Literal):
        return [], value
    k = scan.outputs.index(value)
    inner, outside, varies = hoist([scan], scan.bodies[0].outputs[k])
    return (inner, outside) if k >= scan.border.carries and varies == (True,) else ([], value)


def append_new(inner: Sequence[Equation], value: Atom, equations: list[Equation], numbering: Numbering) -> Atom:
    """Appends hoisted equations that are new; returns the value's name among them."""
    env: dict[Atom, Atom] = {}
    for equation in inner:
        equation = replace(equation, inputs=tuple(env.get(a, a) for a in equation.inputs))
        earlier = numbering.find(equation)
        if earlier is None:
            equations.append(equation)
        else:
            env.update(zip(equation.outputs, earlier, strict=True))
    return value if isinstance(value, Literal) else env.get(value, value)


# --- ids that are known before a lookup's own: its rows alone, or candidates that include its rows ---
#
#     q[states, q[states].argmax(-1)]         rows: states; only the column depends on rows
#     t[candidates[top_k(u @ t[candidates])]] rows: some of the candidates
#
# A route needs ids before any row is read, and may have more than are looked up. So ids that depend on rows of their
# own table don't keep it dense if known ones include them.
#: Operations that return all elements, in any shape.
_SPREADS = SHAPED | {"copy"}


def known_ids(access: Access, producers: Mapping[Atom, Equation]) -> Iterator[KnownIds]:
    """Yields ids that include those of an access, the narrower ones first. `access`: a gather or scatter. `producers`:
    the equations that make the values of its block."""
    equation = access.equation
    if not (equation.op == "gather" or equation.op.startswith("scatter")):
        return
    numbers = equation.params["dimension_numbers"]
    mapped = numbers.start_index_map if equation.op == "gather" else numbers.scatter_dims_to_operand_dims
    column = _column(equation.inputs[1], mapped.index(access.axis), producers)
    if column is None:
        return
    if column is not equation.inputs[1]:
        yield KnownIds((), column)
    if access.path:
        return
    candidates = _Candidates(producers)
    compute = candidates.of(column)
    if compute is not None and candidates.source is not None and 0 not in candidates.source.shape:
        atoms = (candidates.source, *candidates.scalars)
        made = expand(lambda *values: compute(values)[:, None], equation, atoms)
        yield KnownIds(tuple(made), made[-1].outputs[0])


def _column(index: Atom, position: int, producers: Mapping[Atom, Equation]) -> Atom | None:
    """Returns one component of index vectors, [..., 1], before they are joined; None if it isn't separate."""
    if index.shape[-1] == 1:
        return index
    joined = producers.get(index)
    if joined is None or joined.op != "concatenate" or joined.params["dimension"] != len(index.shape) - 1:
        return None
    for part in joined.inputs:
        if position == 0 and part.shape[-1] == 1:
            return part
        position -= part.shape[-1]
        if position < 0:
            return None
    return None


@dataclass(eq=False)
class _Candidates:
    """Finds an array whose elements give ids by an elementwise function."""

    producers: Mapping[Atom, Equation]
    source: Atom | None = None  #: The array, once it is found.
    scalars: list[Atom] = field(default_factory=list)  #: Further arguments of the function.
    _picked: Equation | None = None

    def of(self, atom: Atom) -> Callable[..., Array] | None:
        """Returns the function of (source, *scalars) that gives all possible ids, flat."""
        equation = self.producers.get(atom)
        while equation is not None and equation.op in _SPREADS and equation.inputs[0].shape != ():
            atom = equation.inputs[0]
            equation = self.producers.get(atom)
        return self._elements(atom)

    def _elements(self, atom: Atom) -> Callable[..., Leaf] | None:
        """Returns the function for a value in the shape in which it was picked; None for floats.

        Recomputed floats could round otherwise.
        """
        if jax_compat.is_key(atom.dtype) or np.dtype(atom.dtype).kind not in "iub":
            return None
        if atom.shape == ():
            return self._scalar(atom)
        equation = self.producers.get(atom)
        if equation is None:
            return None
        if equation.op == "gather":
            return self._pick(equation)
        if equation.op == "broadcast_in_dim" and equation.inputs[0].shape == ():
            return self._scalar(equation.inputs[0])
        if equation.op not in ELEMENTWISE or any(a.shape not in ((), atom.shape) for a in equation.inputs):
            return None
        parts = [self._elements(a) for a in equation.inputs]
        if any(part is None for part in parts):
            return None
        params = {**equation.params, "sharding": None} if "sharding" in equation.params else equation.params

        def compute(values: Leaf) -> Leaf:
            operands = [part(values) for part in parts if part is not None]
            shape = max((np.shape(x) for x in operands), key=len)
            if equation.op == "select_n":  # it takes no scalars among arrays
                operands = [jnp.broadcast_to(x, shape) for x in operands]
            return jax_compat.bind(equation.primitive, operands, params)[0]

        return compute

    def _scalar(self, atom: Atom) -> Callable[..., Leaf]:
        if isinstance(atom, Literal):
            return lambda values: np.asarray(atom.value, atom.dtype)
        if atom not in self.scalars:
            self.scalars.append(atom)
        index = 1 + self.scalars.index(atom)
        return lambda values: values[index]

    def _pick(self, equation: Equation) -> Callable[..., Leaf] | None:
        """Returns the function for elements picked from the source, all by one gather so that they belong together."""
        if self._picked not in (None, equation) or np.dtype(equation.outputs[0].dtype).kind not in "iu":
            return None
        self._picked, self.source = equation, equation.inputs[0]
        fill = fill_of(equation)

        def compute(values: Leaf) -> Leaf:
            flat = values[0].reshape(-1)
            return flat if fill is None else jnp.append(flat, fill)

        return compute


def fill_of(lookup: Equation) -> np.ndarray | None:
    """Returns what a lookup of no row gives, if not the nearest one."""
    if "FILL" not in _mode(lookup):
        return None
    value, dtype = lookup.params.get("fill_value"), lookup.inputs[0].dtype
    if value is not None:
        return np.asarray(value, dtype)
    if jnp.issubdtype(dtype, jnp.inexact):
        return np.asarray(np.nan, dtype)
    if np.issubdtype(dtype, np.bool_):
        return np.asarray(True)
    info = jnp.iinfo(dtype)
    return np.asarray(info.min if info.min < 0 else info.max, dtype)
