"""Reads the collectives of a compiled program, as XLA prints it."""

from __future__ import annotations

import re
from collections import Counter

_BYTES = {"pred": 1, "s8": 1, "u8": 1, "bf16": 2, "f16": 2, "s32": 4, "u32": 4, "f32": 4, "s64": 8, "u64": 8, "f64": 8}
_OPS = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
_LINE = re.compile(rf"= (?P<type>\(.*?\)|\S+) (?P<op>{_OPS})(?:-start)?\(")
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*)\[(?P<shape>[\d,]*)\]")


def read_collectives(text: str) -> list[tuple[str, list[tuple[str, tuple[int, ...]]]]]:
    """(op, arrays of its result as (dtype, shape)) of each collective; results may be tuples of any length."""
    found = []
    for line in text.splitlines():
        match = _LINE.search(line)
        if match:
            arrays = [
                (a["dtype"], tuple(int(n) for n in a["shape"].split(",") if n)) for a in _ARRAY.finditer(match["type"])
            ]
            found.append((match["op"], arrays))
    return found


def result_bytes(text: str, larger_than: int = 0) -> Counter[str]:
    """Op -> bytes of its results on one device, of arrays larger than so many bytes."""
    total: Counter[str] = Counter()
    for op, arrays in read_collectives(text):
        sizes = [_BYTES[dtype] * _size(shape) for dtype, shape in arrays]
        total[op] += sum(n for n in sizes if n > larger_than)
    return total


def _size(shape: tuple[int, ...]) -> int:
    size = 1
    for n in shape:
        size *= n
    return size
