"""What XLA's partitioner gets wrong, by primitive: found by brute force (`tests/devices/test_partitioner.py`).

Where operands or results are spread over devices, XLA splits each operation into what each device does. For the
operations named here the result is then another one than on one device, or the process is aborted, on some version of
JAX that autopar supports (0.10.2 and 0.12.0 on CPUs were tried). How a value is spread is XLA's own decision, so each
counts as spread in a step on several devices. `passes.shield` keeps them from the partitioner.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.lax import GatherScatterMode

from autopar import jax_compat
from autopar.ir.program import Equation, Literal

_Params = Mapping[str, Any]
#: Whether an equation with these parameters and operands (of which `shape` and `dtype` are known) is got wrong.
_Test = Callable[[_Params, Sequence[Any]], bool]


def _always(params: _Params, operands: Sequence[Any]) -> bool:
    return True


def _has_groups(params: _Params, operands: Sequence[Any]) -> bool:
    return params["feature_group_count"] > 1 or params["batch_group_count"] > 1


def _has_windows(params: _Params, operands: Sequence[Any]) -> bool:
    return any(size > 1 for size in params["window_dimensions"])


def _cuts_or_fills(params: _Params, operands: Sequence[Any]) -> bool:
    """Whether a pad cuts something off, or has another value than a zero (gradients of slices have that one)."""
    return any(low < 0 or high < 0 for low, high, _ in params["padding_config"]) or not _is_zero(operands[1])


def _is_zero(value: Any) -> bool:
    return isinstance(value, Literal) and not np.asarray(value.value).tobytes().strip(b"\0")  # -0.0 is another one


def _is_integer(params: _Params, operands: Sequence[Any]) -> bool:
    return not jax_compat.is_key(operands[0].dtype) and np.dtype(operands[0].dtype).kind in "iu"


def _is_float(params: _Params, operands: Sequence[Any]) -> bool:
    return jax_compat.is_float(operands[0].dtype)


def _has_short_indices(params: _Params, operands: Sequence[Any]) -> bool:
    """Whether a gather that isn't to fill has indices of less than 32 bits."""
    return params["mode"] != GatherScatterMode.FILL_OR_DROP and np.dtype(operands[1].dtype).itemsize < 4


def _starts_anywhere(skipped: int) -> _Test:
    """Whether a start, after the arrays, is no number that is known to be in range."""

    def test(params: _Params, operands: Sequence[Any]) -> bool:
        sizes = operands[1].shape if skipped == 2 else params["slice_sizes"]
        rooms = [n - size for n, size in zip(operands[0].shape, sizes, strict=True)]
        return any(room and not _in_range(x, room) for x, room in zip(operands[skipped:], rooms, strict=False))

    return test


def _in_range(start: Any, room: int) -> bool:
    return isinstance(start, Literal) and 0 <= int(start.value) <= room


_SPREAD_WINDOWS = "a reduction of windows"
_MAXIMUM = "a maximum or minimum, which may be NaN,"
CUMULATIVE = "a cumulative reduction"
SCATTER = "a scatter of updates that the devices don't divide"
SINGLE = "a scatter of one update into an array that the devices don't divide"
CONVOLUTION = "a convolution along an axis that the devices don't divide"
UNSIGNED = "a scatter by unsigned indices that the devices don't divide"
_SCATTERS = frozenset({"scatter-add", "scatter-sub", "scatter-mul", "scatter-max", "scatter-min"})
#: Got wrong only along an axis that is spread.
ALONG_SPREAD = frozenset({_MAXIMUM, CUMULATIVE})
#: Primitive -> (which equations are got wrong, what they are in words).
MISPARTITIONED: Mapping[str, tuple[_Test, str]] = {
    # Wrong with one input feature a group (gradients by example of a convolution's weights: silently); the process is
    # aborted with others.
    "conv_general_dilated": (_has_groups, "a convolution in groups"),
    # A start out of range isn't moved into it.
    "dynamic_slice": (_starts_anywhere(1), "a slice from a computed place"),
    "dynamic_update_slice": (_starts_anywhere(2), "an update at a computed place"),
    # Wrong where one end is cut and the other one padded; an abort with an interior padding. Of two that pad one array
    # alike, with different values, one is padded with the other's (0.10.2).
    "pad": (_cuts_or_fills, "a pad by less than nothing, or with another value than zero,"),
    # Gradients of a maximum are wrong where windows overlap and reach into the padding; an abort where windows are
    # along a spread axis; an initial value is taken in once by each device.
    **dict.fromkeys(
        ("reduce_window_sum", "reduce_window_max", "reduce_window_min", "reduce_window"),
        (_has_windows, _SPREAD_WINDOWS),
    ),
    **dict.fromkeys(("select_and_gather_add", "select_and_scatter_add"), (_has_windows, "a gradient of windows")),
    # The initial value is taken in once by each device.
    "reduce": (_always, "a reduction by a function"),
    # "Unsupported reduction computation".
    **dict.fromkeys(("reduce_and", "reduce_or"), (_is_integer, "a bitwise reduction")),
    "reduce_xor": (_always, "a bitwise reduction"),
    # An AllReduce of a maximum drops NaN.
    **dict.fromkeys(("reduce_max", "reduce_min", "scatter-max", "scatter-min"), (_is_float, _MAXIMUM)),
    # Of two that read one array, as cumsum and cumprod, one is padded with the other's initial value (0.10.2).
    **dict.fromkeys(("cumsum", "cumprod", "cummax", "cummin", "cumlogsumexp"), (_always, CUMULATIVE)),
    # An abort ("Unsupported indices type").
    "gather": (_has_short_indices, "a lookup by numbers of less than 32 bits"),
    # An abort where the transform's own axis is spread.
    "fft": (_always, "a Fourier transform"),
}
#: Operations that XLA doesn't divide along the examples, and what they are in words: it gathers all operands.
UNDIVIDED: Mapping[str, str] = dict.fromkeys(("top_k", "approx_top_k"), "a top-k, for which XLA gathers all examples,")
#: Equations that say themselves what each device does.
_MANUAL = frozenset({"shard_map", "custom_partitioning", "pallas_call"})


def mispartitioned(equation: Equation) -> str | None:
    """What the equation is, in words, if XLA gets it wrong; None if not. Bodies are not looked into."""
    if equation.bodies or equation.primitive is None:  # or an operation of autopar's own
        return None
    return _found(equation.op, equation.params, equation.inputs)


def uneven(equation: Equation, devices: int) -> str | None:
    """What the equation is, in words, if XLA gets it wrong along an axis that the devices don't divide; None if not.

    XLA gives each device as much of an axis as another one, so that the last ones have more than there is. Where it
    then moves the array from all devices to groups of them (it forms such groups itself), what is beyond the end is a
    neighbour's data, which a scatter adds to a row and a convolution multiplies by its kernel. Unsigned indices of a
    scatter it can't pad: the process is aborted. A scatter of one update becomes an update in place, which is moved
    into the range of each device's part, and spoils a row of those that have none of it.
    """
    if equation.op.startswith("scatter"):
        index = equation.inputs[1]
        if np.dtype(index.dtype).kind == "u" and any(n % devices for n in index.shape[:-1]):
            return UNSIGNED
    if equation.op in _SCATTERS | {"scatter"} and _is_single(equation, devices):
        return SINGLE
    if equation.op in _SCATTERS or (equation.op == "ap.push" and equation.params["op"] in _SCATTERS):
        index = equation.inputs[-2]
        return SCATTER if any(n % devices for n in _entries(equation, index.shape)) else None
    if equation.op == "conv_general_dilated":
        spatial = equation.params["dimension_numbers"].lhs_spec[2:]
        sizes = [equation.inputs[0].shape[axis] for axis in spatial]
        return CONVOLUTION if any(n % devices for n in sizes) else None
    return None


def _is_single(equation: Equation, devices: int) -> bool:
    """Whether a scatter has one update in all, along an axis of the operand that the devices don't divide."""
    operand, index, _ = equation.inputs
    places = equation.params["dimension_numbers"].scatter_dims_to_operand_dims
    return not _entries(equation, index.shape) and any(operand.shape[axis] % devices for axis in places)


def _entries(equation: Equation, shape: tuple[int, ...]) -> list[int]:
    """The sizes along which a scatter has independent updates, of its indices' shape; one alone isn't divided."""
    tied = equation.params["dimension_numbers"].scatter_indices_batching_dims
    return [n for axis, n in enumerate(shape[:-1]) if axis not in tied and n > 1]


def scatter_with_nan(primitive: Any, params: _Params, operand: Any, indices: Any, updates: Any) -> Any:
    """Scatter a maximum or minimum of floats; an element is NaN if one of its updates is, or was.

    Whether there is a NaN is a maximum of integers, which an AllReduce keeps.
    """
    (result,) = jax_compat.bind(primitive, (operand, indices, updates), params)
    same = ("dimension_numbers", "indices_are_sorted", "unique_indices", "mode")
    options = {name: params[name] for name in same}
    old, new = (jax.lax.convert_element_type(jax.lax.ne(x, x), np.int32) for x in (operand, updates))
    is_nan = jax.lax.gt(jax.lax.scatter_max(old, indices, new, **options), np.int32(0))
    return jax.lax.select(is_nan, jax.lax.full_like(result, np.nan), result)


def _found(op: str, params: _Params, operands: Sequence[Any]) -> str | None:
    known = MISPARTITIONED.get(op)
    if known is not None and known[0](params, operands):
        return known[1]
    if op in _MANUAL:
        return None
    equations = (e for jaxpr in _jaxprs(params) for e in jaxpr.eqns)
    inner = (_found(e.primitive.name, e.params, [_operand(v) for v in e.invars]) for e in equations)
    return next((equation for equation in inner if equation is not None), None)


def _operand(var: Any) -> Any:
    return Literal(var.val, var.aval) if isinstance(var, jax_compat.JaxLiteral) else var.aval


def _jaxprs(params: _Params) -> Iterator[Any]:
    """Nested programs of an equation that has no bodies of ours."""
    for value in params.values():
        for one in value if isinstance(value, (tuple, list)) else (value,):
            if jax_compat.is_jaxpr(one):
                yield jax_compat.open_jaxpr(one)[0]
