"""Paths of leaves in a pytree, as `params/emb/embedding`, and patterns over them."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence

import jax


def path_name(path: Sequence[object]) -> str:
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*)", pattern.strip("/"))
    text = "".join({"**": ".*", "*": "[^/]*"}.get(p, re.escape(p)) for p in parts)
    text = text.replace("/.*/", "/(?:.*/)?")
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
