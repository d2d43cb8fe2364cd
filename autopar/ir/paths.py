"""Paths of leaves in a pytree, as `params/emb/embedding`, and patterns over them."""

from __future__ import annotations

import functools
import re
from collections.abc import Sequence
from typing import Any

import jax


def path_name(path: Sequence[Any]) -> str:
    """A pytree path as text."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    parts = re.split(r"(\*\*|\*)", pattern.strip("/"))
    text = "".join({"**": ".*", "*": "[^/]*"}.get(p, re.escape(p)) for p in parts)
    text = text.replace("/.*/", "/(?:.*/)?")
    return re.compile(f"{text}(?:/.*)?")


def matches(pattern: str, path: str) -> bool:
    """Whether a pattern covers a path: `matches("params/item*", "params/item_emb/embedding")`."""
    return _compiled(pattern).fullmatch(path) is not None
