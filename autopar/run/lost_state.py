"""What is said of a step that failed after it had begun to update its state in place."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

from autopar import jax_compat
from autopar.errors import AutoparError
from autopar.ir.paths import path_name
from autopar.tables.kinds import is_table


def first_deleted(arguments: tuple[Any, Any]) -> str | None:
    """The place of a leaf in (args, kwargs) whose rows or buffers were given to a step; None if there is none."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(arguments):
        if is_table(leaf) or (isinstance(leaf, jax.Array) and not jax_compat.is_tracer(leaf)):
            if leaf.is_deleted():
                place = path_name(path[2:])
                return f"argument {path_name(path[1:2])}" + (f", {place}" if place else "")
    return None


def noting_lost_state(call: Callable[..., Any]) -> Callable[..., Any]:
    """A step's `__call__` whose errors say so if the state is gone.

    An error stays what it is: who catches JAX's own errors still does.
    Autopar's own errors, and warnings that are errors, are raised before a step begins.
    """

    @functools.wraps(call)
    def noting(step: Any, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(step, *args, **kwargs)
        except (AutoparError, Warning):
            raise
        except BaseException as error:
            place = first_deleted((args, kwargs))
            if place is not None:
                error.add_note(
                    f"autopar: {step.name} updates its state in place, and had begun to: {place} is gone, and the new "
                    "state isn't complete. Go on from a checkpoint (autopar.restore), or keep old states with "
                    "parallelize(step, donate=False)"
                )
            raise

    return noting
