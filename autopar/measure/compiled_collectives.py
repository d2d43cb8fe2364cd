"""Reads the collectives of a compiled program as XLA prints it (`compiled.as_text()`): kinds, sizes, repetitions."""

from __future__ import annotations

import collections
import math
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from autopar.backends.gloo import NAMED
from autopar.ir.figures import wire_bytes

_BITS = {"pred": 8, "s4": 4, "u4": 4, "bf16": 16}
_OPS = "all-reduce|all-gather|all-to-all|reduce-scatter|collective-permute"
_COMPUTATION = re.compile(r"^(?P<entry>ENTRY )?%?(?P<name>[\w.\-]+) \(.*\{\s*$")
_COLLECTIVE = re.compile(rf"= (?P<arrays>\(.*?\)|\S+) (?P<op>{_OPS})(?P<start>-start)?\(")
_LISTED = re.compile(r"(?:replica_groups|source_target_pairs)=\{(?P<groups>\{.*?\})\}")
_ARRANGED = re.compile(r"replica_groups=\[(?P<shape>[\d,]+)\]<=\[(?P<of>[\d,]+)\](?:T\((?P<order>[\d,]+)\))?")
_NAMED = re.compile(r"replica_groups=mesh\[(?P<sizes>[^\]]*)\] \{(?P<along>[^}]*)\}")
_ARRAY = re.compile(r"(?P<dtype>[a-z]+\d*\w*)\[(?P<shape>[\d,]*)\]")
_CALLED = re.compile(r"(?:to_apply|calls|condition|true_computation|false_computation)=%?(?P<name>[\w.\-]+)")
_BRANCHES = re.compile(r"branch_computations=\{(?P<names>[^}]*)\}")
_LOOP = re.compile(r" while\(.*body=%?(?P<name>[\w.\-]+)")
_TURNS = re.compile(r'known_trip_count"?:\{"n":"(?P<count>\d+)"')


@dataclass(frozen=True, slots=True)
class Collective:
    """A collective of a compiled program."""

    op: str  #: "all-reduce", "all-gather", "all-to-all", "reduce-scatter" or "collective-permute".
    arrays: tuple[tuple[str, tuple[int, ...]], ...]  #: (dtype, shape) of its results on one device.
    #: Runs in a step. Loops whose number of iterations isn't known at compile time count as none: a planned step has
    #: one for batches that exceed a capacity, and one for scalars that are not finite.
    times: int
    #: Devices that take part together, by their number in the mesh; empty: all.
    groups: tuple[tuple[int, ...], ...] = ()
    is_whole: bool = False  #: Each device sends its part of a sum to all others, uncut (`backends.gloo`).

    @property
    def sizes(self) -> tuple[int, ...]:
        """Bytes of each of its results on one device."""
        return tuple(math.prod(shape) * _bits(dtype) // 8 for dtype, shape in self.arrays)

    @property
    def nbytes(self) -> int:
        return sum(self.sizes)

    def sent(self, devices: int) -> int:
        """Returns the bytes that one of the devices sends each time (rings, and direct messages)."""
        return (devices - 1) * self.nbytes if self.is_whole else int(wire_bytes(self.op, devices, self.nbytes))


def _bits(dtype: str) -> int:
    digits = re.search(r"\d+", dtype)
    return _BITS.get(dtype) or (int(digits[0]) if digits else 8)


def read_collectives(text: str) -> list[Collective]:
    """Lists the collectives of a compiled program."""
    collectives: dict[str, list[Collective]] = collections.defaultdict(list)
    called: dict[str, list[tuple[str, int]]] = collections.defaultdict(list)
    entry = name = ""
    for line in text.splitlines():
        head = _COMPUTATION.match(line)
        if head:
            name = head["name"]
            entry = name if head["entry"] or not entry else entry
            continue
        match = _COLLECTIVE.search(line)
        if match:
            message = NAMED.search(line) if match["op"] == "all-to-all" else None  # stands for another collective
            of = message or match
            arrays = tuple(
                (a["dtype"], tuple(int(n) for n in a["shape"].split(",") if n)) for a in _ARRAY.finditer(of["arrays"])
            )
            if match["start"] and match["op"] in ("all-gather", "collective-permute"):
                arrays = arrays[len(arrays) // 2 :]  # the operands come first
            if arrays:  # not the second message of a sum
                is_whole = message is not None and bool(message["whole"])
                collectives[name].append(Collective(of["op"], arrays, 1, _groups(line), is_whole))
        loop, turns = _LOOP.search(line), _TURNS.search(line)
        if loop:
            called[name].append((loop["name"], int(turns["count"]) if turns else 0))
        called[name] += [(c["name"], 1) for c in _CALLED.finditer(line)]
        for branches in _BRANCHES.finditer(line):
            called[name] += [(b.strip().lstrip("%"), 1) for b in branches["names"].split(",")]
    return _collect(entry, collectives, called, 1)


def _groups(line: str) -> tuple[tuple[int, ...], ...]:
    """Reads the devices of each group, as a list, a transposed array of all devices, or along named axes of a mesh."""
    listed, array, mesh = _LISTED.search(line), _ARRANGED.search(line), _NAMED.search(line)
    if listed:
        return tuple(tuple(map(int, each.split(","))) for each in re.findall(r"\d[\d,]*", listed["groups"]))
    if mesh:
        sizes = {name: int(size) for name, size in re.findall(r"'(\w+)'=(\d+)", mesh["sizes"])}
        along = [k for k, name in enumerate(sizes) if f"'{name}'" in mesh["along"]]
        numbers = np.moveaxis(
            np.arange(math.prod(sizes.values())).reshape(tuple(sizes.values())), along, range(-len(along), 0)
        )
        members = math.prod(numbers.shape[-len(along) :]) if along else 1
        return tuple(map(tuple, numbers.reshape(-1, members).tolist()))
    if not array:
        return ()
    shape, of, order = (
        tuple(map(int, array[name].split(","))) if array[name] else () for name in ("shape", "of", "order")
    )
    numbers = np.arange(math.prod(of)).reshape(of)
    return tuple(map(tuple, (numbers.transpose(order) if order else numbers).reshape(shape).tolist()))


def _collect(
    name: str, collectives: Mapping[str, list[Collective]], called: Mapping[str, list[tuple[str, int]]], times: int
) -> list[Collective]:
    mine = [replace(c, times=times) for c in collectives.get(name, ())]
    for other, turns in called.get(name, ()):
        mine += _collect(other, collectives, called, times * turns)
    return mine


def sent_by_device(text: str, devices: int) -> int:
    """Returns the bytes that one of the devices sends in a run of a compiled program."""
    return sum(c.times * c.sent(devices) for c in read_collectives(text))
