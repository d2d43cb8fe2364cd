"""Paths of leaves in a pytree, as `params/emb/embedding`, and patterns over them."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence

import jax

from autopar.errors import ArgumentsError


def path_name(path: Sequence[object]) -> str:
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*)", pattern.strip("/"))
    text = "".join({"**": ".*", "*": "[^/]*"}.get(p, re.escape(p)) for p in parts)
    text = re.sub(r"(^|/)\.\*/", r"\1(?:.*/)?", text)
    return re.compile(f"{text}(?:/.*)?")


def matches(pattern: str, path: str) -> bool:
    """Returns whether a pattern covers a path: `matches("params/item*", "params/item_emb/embedding")`."""
    return _compiled(pattern).fullmatch(path) is not None


def layers_path(path: str, ends: Sequence[int]) -> list[str]:
    """Returns the paths of a stacked leaf's parts with their layers, as `params/layers/w[0:3]`."""
    return [f"{path}[{start}:{end}]" for start, end in zip((0, *ends), ends, strict=False)]


def split_layers(path: str) -> tuple[str, range | None]:
    """Splits a path or pattern into the part before its layers and the layers; None: all."""
    match = re.fullmatch(r"(.*)\[(\d+):(\d+)\]", path)
    return (match[1], range(int(match[2]), int(match[3]))) if match else (path, None)


def matches_layers(pattern: str, path: str) -> bool:
    """Returns whether a pattern covers all layers of a path."""
    (general, some), (leaf, own) = split_layers(pattern), split_layers(path)
    return matches(general, leaf) and (some is None or (own is not None and set(own) <= set(some)))


# --- the axis of each leaf of a batch that runs over its examples, as the user gives it (`batch_axis=`) ---


#: An axis for all leaves, or path pattern -> axis; None: every device has all of the leaf.
BatchAxis = int | Mapping[str, int | None]


def check_batch_axis(batch_axis: object) -> None:
    """Raises ArgumentsError unless it is an axis or a mapping from patterns to axes."""
    axes = [a for a in batch_axis.values() if a is not None] if isinstance(batch_axis, Mapping) else [batch_axis]
    patterns = list(batch_axis) if isinstance(batch_axis, Mapping) else []
    is_axis = all(isinstance(a, int) and not isinstance(a, bool) for a in axes)
    if not is_axis or not all(isinstance(p, str) for p in patterns):
        raise ArgumentsError(
            f"batch_axis={batch_axis!r}: give an int, or a mapping from patterns over the batch's paths to an int, or "
            "to None for what every device has all of"
        )


def example_axes(batch_axis: BatchAxis, leaves: Sequence[tuple[str, tuple[int, ...]]]) -> list[int | None]:
    """Returns the axis of each leaf (path, shape) that runs over the examples; 0 of leaves that no pattern matches.
    Raises ArgumentsError if a pattern matches no leaf, or a leaf that is named (or every leaf) lacks the axis."""
    if isinstance(batch_axis, int):
        axes = [_axis(batch_axis, shape) for _, shape in leaves]
        if all(a is None for a in axes) and any(shape for _, shape in leaves):
            raise ArgumentsError(
                f"batch_axis={batch_axis}: nothing in the batch has that axis. There are: {_shown(leaves)}"
            )
        return axes
    for pattern in batch_axis:
        if not any(matches(pattern, path) for path, _ in leaves):
            raise ArgumentsError(
                f"batch_axis: {pattern!r} matches nothing in the batch. There are: {_shown(leaves) or 'no leaves'}"
            )
    return [_matched(batch_axis, path, shape) for path, shape in leaves]


def _matched(patterns: Mapping[str, int | None], path: str, shape: tuple[int, ...]) -> int | None:
    pattern = next((p for p in patterns if matches(p, path)), None)
    axis = 0 if pattern is None else patterns[pattern]
    found = None if axis is None else _axis(axis, shape)
    if axis is not None and found is None and pattern not in (None, "*", "**"):
        raise ArgumentsError(
            f"batch_axis: {path} has no axis {axis}, its shape is {list(shape)} ({pattern!r} names it)"
        )
    return found


def _axis(axis: int, shape: tuple[int, ...]) -> int | None:
    return axis % len(shape) if -len(shape) <= axis < len(shape) else None


def _shown(leaves: Sequence[tuple[str, tuple[int, ...]]]) -> str:
    return ", ".join(f"{path} {list(shape)}" for path, shape in leaves)
