"""Batches of streams that differ by process: before each one the processes tell each other how much they have of it.

All see the same answers, so all end, leave a batch out, or raise at the same one, and none waits for batches that don't
come. The exchange is on the host (`launch.group`) and doesn't wait for steps in flight.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np

from autopar.batches.parts import Held, Part, filled
from autopar.batches.sources import Last, Stream
from autopar.errors import ArgumentsError
from autopar.ir.paths import path_name
from autopar.launch.group import StoreGroup


def agreed(source: Stream, processes: StoreGroup, last: Last, epoch: int, start: int) -> Iterator[Part]:
    """Batches of an epoch, from number `start` on, made of what all processes have; `source` is this one's.

    `last`: what is done where they don't give as much: "error"; "drop": such a batch is left out, and the epoch ends
    with the first source that does; "pad": what lacks is filled up with the source's last example, until all end.
    """
    parts = source.read(epoch, start)
    for number in itertools.count(start):
        part = next(parts, None)
        mine = {"size": 0 if part is None else part.size, "full": source.full, "leaves": _leaves(part or source.latest)}
        about = f"batch {number} of shard's source"
        answers = processes.values(mine, about)
        sizes = tuple(answer["size"] for answer in answers)
        if not any(sizes) or (last == "drop" and not all(sizes)):
            return
        full = max(answer["full"] or 0 for answer in answers)
        k = next((k for k, answer in enumerate(answers) if last == "drop" and answer["full"] != full), None)
        if k is not None:
            raise ArgumentsError(
                f"shard: batches of {processes.name(k)} have {answers[k]['full']} examples, those of others {full}: "
                "last='drop' would leave all of them out. Give all processes batches of one size"
            )
        _check_sizes(sizes, full, number, last, processes)
        _check_leaves([answer["leaves"] for answer in answers], number, processes)
        if last == "drop" and min(sizes) < full:
            continue
        part = part or source.latest
        assert part is not None, "a source without any batch was found above"
        rank, count = processes.rank, len(sizes)
        held = Held(((rank * full, (rank + 1) * full),))
        yield dataclasses.replace(filled(part, full), number=number, total=count * full, reals=sizes, held=held)


def _check_sizes(sizes: Sequence[int], full: int, number: int, last: Last, processes: StoreGroup) -> None:
    k = next((k for k, n in enumerate(sizes) if n > full or (n != full and last == "error")), None)
    if k is None:
        return
    what = f"has {sizes[k]} examples in batch {number}, its full size is {full}"
    if not sizes[k]:
        what = f"has {number} batches, other processes have more"
    raise ArgumentsError(
        f"shard: {processes.name(k)} {what}. shard(source, per_process=True, last='drop') leaves out what not all "
        "have, last='pad' fills it up"
    )


def _leaves(part: Part | None) -> list[list[Any]] | None:
    """What must be the same on all processes: paths, dtypes, shapes but for the examples, and what isn't by example."""
    if part is None:
        return None
    descriptions = []
    leaves = jax.tree_util.tree_leaves_with_path({"batch": part.batch})
    for (path, leaf), axis in zip(leaves, part.axes, strict=True):
        shape: list[Any] = list(leaf.shape)
        contents = None
        if axis is not None and shape[axis] == part.size:
            shape[axis] = "examples"
        else:
            contents = hashlib.blake2b(np.ascontiguousarray(leaf).tobytes(), digest_size=8).hexdigest()
        descriptions.append([path_name(path), str(leaf.dtype), shape, contents])
    return descriptions


def _check_leaves(descriptions: Sequence[list[list[Any]] | None], number: int, processes: StoreGroup) -> None:
    for k, theirs in enumerate(descriptions):
        if theirs is None:
            raise ArgumentsError(f"shard: the source of {processes.name(k)} gives no batch at all")
        if theirs != descriptions[0]:
            assert descriptions[0] is not None, "looked at first"
            pairs = itertools.zip_longest(descriptions[0], theirs, fillvalue=["no such leaf", "", [], None])
            a, b = next((a, b) for a, b in pairs if a != b)
            what = "is another one" if a[:3] == b[:3] else f"is {b[1]}{b[2]} there and {a[1]}{a[2]} here"
            raise ArgumentsError(
                f"shard: batch {number} of {processes.name(k)} doesn't fit that of "
                f"{processes.name(0)}: {b[0]} {what}. Only the examples may differ: what isn't by example "
                "(batch_axis=) is shared by all devices, and so the same on all processes"
            )
