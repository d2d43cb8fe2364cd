"""Rewrites what a step says itself of where its values are; what that computes is kept.

A `shard_map` becomes a program of whole arrays, each of its devices an element of an axis. What it means doesn't depend
on where it runs: a device sees its shard of each operand and meets others in collectives by the names of the mesh's
axes. `jax.vmap` over these axes computes the same from whole arrays, [devices, shard] each, and a collective is a
reduction, a permutation or a copy along an axis. So lookups in it are followed, and the devices divide it among
themselves as they do any other part of a step, whatever mesh it was written for.

A sharding constraint computes nothing: it is left out.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from autopar import jax_compat
from autopar.ir.program import Block
from autopar.ir.trace import block_of

#: Mesh axes along each dimension of an array.
_Dims = Sequence[tuple[str, ...]]


def of_whole_arrays(
    params: Mapping[str, Any], run: Callable[[Block, Sequence[jax.Array]], Sequence[jax.Array]], operands: Sequence[Any]
) -> list[jax.Array]:
    """Returns the results of a `shard_map` equation, whole.

    Args:
      params: The equation's.
      run: Evaluates a block of arrays.
      operands: The equation's, whole.
    """
    body = block_of(params["jaxpr"])
    sizes = {name: n for name, n in params["mesh"].shape.items() if name in params["newly_manual_axes"]}
    before = [_dims(spec, x, sizes) for spec, x in zip(params["in_specs"], operands, strict=True)]
    after = [_dims(spec, x, sizes) for spec, x in zip(params["out_specs"], body.outputs, strict=True)]
    used = [{name for names in dims for name in names} for dims in before]
    shards = [_split(x, dims, sizes) for x, dims in zip(operands, before, strict=True)]
    results, along = _over(lambda *own: run(body, own), list(sizes.items()), used)(*shards)
    return [_join(x, dims, sizes, there) for x, dims, there in zip(results, after, along, strict=True)]


def _dims(spec: Any, value: Any, sizes: Mapping[str, int]) -> _Dims:
    """Returns the mesh's axes along each dimension, of those that are the program's own."""
    entries = [() if e is None else (e,) if isinstance(e, str) else tuple(e) for e in spec]
    entries += [()] * (len(value.shape) - len(entries))
    return [tuple(name for name in entry if name in sizes) for entry in entries]


def _split(x: jax.Array, dims: _Dims, sizes: Mapping[str, int]) -> jax.Array:
    """Returns an array with the mesh's axes that it is spread over in front, in their order, and its shards behind."""
    shape, names = [], []
    for size, along in zip(x.shape, dims, strict=True):
        shape += [*(sizes[name] for name in along), size // math.prod(sizes[name] for name in along)]
        names += [*along, None]
    order = [names.index(name) for name in sizes if name in names]
    return jnp.transpose(x.reshape(shape), (*order, *(k for k, name in enumerate(names) if name is None)))


def _join(x: jax.Array, dims: _Dims, sizes: Mapping[str, int], there: Sequence[str]) -> jax.Array:
    """Returns the whole array of shards that have these axes of the mesh in front; of what all devices have, one's."""
    used = {name for along in dims for name in along}
    x = x[tuple(slice(None) if name in used else 0 for name in there)]
    missing = [name for name in sizes if name in used and name not in there]
    x = jnp.broadcast_to(x, (*(sizes[name] for name in missing), *x.shape))
    front = [*missing, *(name for name in there if name in used)]
    order, shape = [], []
    for k, along in enumerate(dims):
        order += [*(front.index(name) for name in along), len(front) + k]
        shape.append(x.shape[len(front) + k] * math.prod(sizes[name] for name in along))
    return jnp.transpose(x, order).reshape(shape)


def _over(
    run: Callable[..., Sequence[Any]], axes: Sequence[tuple[str, int]], used: Sequence[set[str]]
) -> Callable[..., tuple[Sequence[jax.Array], Sequence[Sequence[str]]]]:
    """Returns the function over axes of a mesh, the first one outermost; its results, and along which axes each is."""
    if not axes:
        return lambda *shards: (results := run(*shards), [()] * len(results))
    (name, size), *rest = axes
    inner: list[Sequence[str]] = []

    def of_one(*shards: jax.Array) -> Sequence[jax.Array]:
        results, inner[:] = _over(run, rest, used)(*shards)
        return results

    def of_all(*shards: jax.Array) -> tuple[Sequence[jax.Array], Sequence[Sequence[str]]]:
        axes = [0 if name in own else None for own in used]
        results, along = jax_compat.vmap_inferred(of_one, axes, name, size)(*shards)
        results = [x if axis is None else jnp.moveaxis(x, axis, 0) for x, axis in zip(results, along, strict=True)]
        return results, [[name, *i] if axis is not None else i for i, axis in zip(inner, along, strict=True)]

    return of_all


def _names(names: Any) -> tuple[str, ...]:
    return tuple(names) if isinstance(names, (tuple, list)) else (names,)


def _scatter(params: Mapping[str, Any], x: jax.Array) -> list[jax.Array]:
    axis, tiled, groups = params["scatter_dimension"], params["tiled"], params["axis_index_groups"]
    for name in _names(params["axis_name"]):
        x = jax.lax.psum_scatter(x, name, scatter_dimension=axis, axis_index_groups=groups, tiled=tiled)
    return [x]


def _gather(params: Mapping[str, Any], x: jax.Array) -> list[jax.Array]:
    axis, tiled, groups = params["all_gather_dimension"], params["tiled"], params.get("axis_index_groups")
    for name in reversed(_names(params["axis_name"])):
        x, tiled = jax.lax.all_gather(x, name, axis=axis, axis_index_groups=groups, tiled=tiled), True
    return [x]


#: What is written in place of a constraint, and of collectives in a `shard_map`'s body: of those that it makes where it
#: checks what all devices have alike, and of those over several axes, of which `jax.vmap` knows only one at a time.
REWRITTEN: Mapping[str, Callable[[Mapping[str, Any], jax.Array], list[jax.Array]]] = {
    "psum_invariant": lambda p, x: [jax.lax.psum(x, p["axes"])],
    "all_gather": _gather,
    "all_gather_invariant": _gather,
    "reduce_scatter": _scatter,
    **dict.fromkeys(("pvary", "sharding_constraint"), lambda p, x: [x]),
}
