"""Steps of Equinox, as under `eqx.filter_jit`: arguments are pytrees of which only arrays are traced.

    from autopar.integrations import equinox as aeqx

    @aeqx.parallelize
    def train_step(model, opt_state, batch):
        loss, grads = eqx.filter_value_and_grad(loss_fn)(model, batch)
        updates, opt_state = optim.update(grads, opt_state, eqx.filter(model, eqx.is_array))
        return eqx.apply_updates(model, updates), opt_state, loss

    model, opt_state, loss = train_step(model, opt_state, batch)

`autopar.parallelize` takes a model as it is if all of its leaves are arrays. Here other leaves (activation functions,
flags, Python numbers) are static: each set of them has one ordinary step, of the arguments with None instead, as
by `eqx.partition`. Results may hold such leaves, too. Equinox itself is not imported.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import numpy as np

import autopar
from autopar.errors import ArgumentsError
from autopar.interrupts import uninterrupted
from autopar.jax_types import Leaf, Pytree
from autopar.run.object_step import ObjectStep
from autopar.run.step import ParallelStep
from autopar.tables.kinds import is_table


@jax.tree_util.register_static
@dataclass(frozen=True)
class Static:
    """A tree's structure, and its leaves that are no arrays with their indices."""

    tree: Pytree
    leaves: tuple[tuple[int, Leaf], ...]


def parallelize(step: Callable[..., Pytree] | None = None, /, **options: Any) -> Any:
    """Runs a step of Equinox modules by a plan.

    Args:
      step: A function as for `eqx.filter_jit`: of pytrees, that returns new modules.
      **options: As for `autopar.parallelize`, without `static_argnums` and `static_argnames`, which aren't needed.

    Returns:
      A `FilteredStep`, which you call like `step`; `autopar.explain`, `autopar.verify`, `.plan` and `.lower(...)` work.

    Raises:
      ArgumentsError: an option that doesn't exist.

    Example:
      >>> import jax, jax.numpy as jnp
      >>> from autopar.integrations import equinox as aeqx
      >>> @aeqx.parallelize
      ... def train_step(model, ids):
      ...     grads = jax.grad(lambda t: model["activation"](t[ids]).sum())(model["table"])
      ...     return {**model, "table": model["table"] - 0.1 * grads}, ids.sum()
      >>> model, _ = train_step({"table": jnp.ones((100_000, 8)), "activation": jnp.tanh}, jnp.array([3, 5]))
      >>> model["activation"] is jnp.tanh
      True
    """
    if step is None:
        return lambda fun: parallelize(fun, **options)
    for name in {"static_argnums", "static_argnames"}.intersection(options):
        raise ArgumentsError(f"{name}: what is no array is static as it is")
    autopar.parallelize(step, **options)  # raises for wrong options
    return FilteredStep(step, options)


@dataclass(eq=False, repr=False)
class FilteredStep(ObjectStep):
    """A step of pytrees of which only the arrays are traced; made by `parallelize`."""

    @uninterrupted
    def __call__(self, *args: Pytree, **kwargs: Pytree) -> Pytree:
        step, args, kwargs = self.pure(args, kwargs)
        static, *out = step(*args, **kwargs)
        return _combined(static, out)

    def pure(self, args: Pytree, kwargs: Pytree) -> tuple[ParallelStep, Pytree, Pytree]:
        static, (args, kwargs) = _partitioned((tuple(args), dict(kwargs)))
        try:
            hash(static)
        except TypeError as error:
            raise ArgumentsError(
                f"{self.name}: what is no array is static, and must be hashable ({error}). Make it an array, or a "
                "static field of its module"
            ) from error
        change = "a leaf that is no array, or the structure, is another one"
        remedy = "Make what changes from call to call an array"
        make = lambda: autopar.parallelize(_pure(self.fun, static), **self.options)  # noqa: E731
        return self._step_of(static, make, change, remedy), args, kwargs


def _is_array(x: Leaf) -> bool:
    return isinstance(x, (jax.Array, np.ndarray, np.generic, jax.ShapeDtypeStruct)) or is_table(x)


def _partitioned(tree: Pytree) -> tuple[Static, Pytree]:
    leaves, structure = jax.tree.flatten(tree)
    static = tuple((k, x) for k, x in enumerate(leaves) if not _is_array(x))
    return Static(structure, static), structure.unflatten([x if _is_array(x) else None for x in leaves])


def _combined(static: Static, tree: Pytree) -> Pytree:
    known, arrays = dict(static.leaves), iter(jax.tree.leaves(tree))
    return static.tree.unflatten([known[k] if k in known else next(arrays) for k in range(static.tree.num_leaves)])


def _pure(fun: Callable[..., Pytree], static: Static) -> Callable[..., Pytree]:
    """Returns the step as a function of arrays: it returns its result's static leaves, then the result's parts."""

    @functools.wraps(fun)
    def pure(*args: Pytree, **kwargs: Pytree) -> Sequence[Pytree]:
        own_args, own_kwargs = _combined(static, (args, kwargs))
        outputs, out = _partitioned(fun(*own_args, **own_kwargs))
        return outputs, *(out if type(out) is tuple else (out,))

    return pure
