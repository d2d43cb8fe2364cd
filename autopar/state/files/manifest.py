"""`Manifest`: the contents of a checkpoint, as JSON. docs/checkpoints.md describes the format.

The structure of a state has dicts, lists, tuples and None as such, and other nodes (named tuples of optimizers, Flax's
classes) by their names. The latter aren't made from a file, which could then run any code that it names: their state is
restored into a template.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Literal

import jax
import numpy as np

from autopar.errors import CheckpointError, DamagedCheckpointError
from autopar.ir.layout import RowLayout
from autopar.ir.typed_json import from_json
from autopar.jax_types import Json, Leaf, Pytree
from autopar.launch.group import go_on
from autopar.state.files.locations import OLDER, POINTER, Location, blocks, flush, last_bytes, mapped, named, write_file

Node = dict[str, Json]


def describe_tree(tree: Pytree, numbers: Iterator[int] | None = None) -> Node:
    """Returns the structure of a tree, with leaves numbered as by `jax.tree.leaves`; `numbers`: those of a subtree."""
    numbers = itertools.count() if numbers is None else numbers
    children = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    if tree is None:
        return {"none": True}
    if len(children) == 1 and not children[0][0]:
        return {"leaf": next(numbers)}
    nodes = [describe_tree(child, numbers) for _, child in children]
    kind = type(tree)
    if kind in (list, tuple):
        return {kind.__name__: nodes}
    if kind is dict:
        keys = [path[0].key for path, _ in children]
        if all(type(key) in (str, int) for key in keys):
            return {"dict": [[key, node] for key, node in zip(keys, nodes, strict=True)]}
    return {"other": f"{kind.__module__}.{kind.__qualname__}", "children": nodes}


def leaf_numbers(node: Node) -> Iterator[int]:
    """Yields the leaves of a structure in order; raises ValueError if it is no structure."""
    match node:
        case {"leaf": int(number)}:
            yield number
        case {"none": True}:
            return
        case {"list": list(nodes)} | {"tuple": list(nodes)} | {"other": str(), "children": list(nodes)}:
            for child in nodes:
                yield from leaf_numbers(child)
        case {"dict": list(pairs)}:
            for pair in pairs:
                match pair:
                    case [str() | int(), child]:
                        yield from leaf_numbers(child)
                    case _:
                        raise ValueError(f"{str(pair)[:80]} is no entry of a dict")
        case _:
            raise ValueError(f"{str(node)[:80]} is no structure")


def rebuild(node: Node, leaves: Sequence[Leaf]) -> Pytree:
    """Rebuilds a tree from its structure; raises CheckpointError if it has other nodes than dicts, lists, tuples and
    None."""
    if "leaf" in node:
        return leaves[node["leaf"]]
    if "none" in node:
        return None
    if "list" in node:
        return [rebuild(child, leaves) for child in node["list"]]
    if "tuple" in node:
        return tuple(rebuild(child, leaves) for child in node["tuple"])
    if "dict" in node:
        return {key: rebuild(child, leaves) for key, child in node["dict"]}
    raise CheckpointError(
        f"the checkpoint holds a {node['other']}, which can't be made from a file. Give a state of the same structure, "
        "of arrays or of shapes: restore(path, like=jax.eval_shape(make_state, key))"
    )


#: The format that is written and read.
FORMAT = 4
NAME = "manifest.json"
#: The name of `RowLayout.cyclic` in files of format 4.
_CYCLIC = "dealt"

#: Where a leaf is: in `dense/` by Orbax, in files of rows, in the manifest itself, or nowhere if it has no elements.
LeafKind = Literal["dense", "rows", "value", "empty"]
#: Types of Python numbers that a state may hold.
NUMBERS: Mapping[str, type] = {"bool": bool, "int": int, "float": float, "complex": complex}
#: What a leaf was: a jax.Array (or a table), a NumPy array, or a Python number.
LeafType = Literal["jax", "numpy", "bool", "int", "float", "complex"]


@dataclass(frozen=True)
class FileRecord:
    """A file in the checkpoint's directory. `crc32c` is the checksum at the end of a chunk of rows, `crc32` that of any
    other file; one of them is None."""

    name: str
    nbytes: int
    crc32: int | None = None
    crc32c: int | None = None


@dataclass(frozen=True)
class LeafRecord:
    """A leaf of the state."""

    #: Its path in the state (`params/emb`), and the name of its files, or among the arrays of `dense/`.
    path: str
    name: str
    kind: LeafKind
    type: LeafType
    #: Those of the leaf; for PRNG keys `dtype` is that of their data.
    shape: tuple[int, ...]
    dtype: str
    weak: bool = False  #: Whether its type is weak.
    key: str | None = None  #: The implementation of PRNG keys; None for other leaves.
    #: The row axis, and which row is in which file, for a leaf saved by rows.
    axis: int = 0
    layout: RowLayout | None = None
    value: str = ""  #: A Python number as text.
    replicas: int = 0  #: C, if each client has its own; `layout` is then that of C rows, the clients' replicas.
    files: tuple[FileRecord, ...] = ()  #: Files of rows, shard by shard; in object stores also those of dense leaves.

    @property
    def described(self) -> str:
        what = f"{self.type} {self.value}" if self.kind == "value" else f"{self.dtype}{list(self.shape)} ({self.type})"
        return f"{self.path}: {what}"

    @property
    def numpy_dtype(self) -> np.dtype:
        """The dtype; bfloat16 and the like included."""
        return np.dtype(self.dtype)


@dataclass(frozen=True)
class Manifest:
    """The contents of a checkpoint."""

    #: The state's structure (`describe_tree`), and its leaves in order.
    structure: Node
    leaves: tuple[LeafRecord, ...]
    position: Mapping[str, Json] | None  #: The user's position in the data.
    ranks: int  #: Number of ranks that wrote it.
    dense: tuple[FileRecord, ...]  #: The files of ordinary arrays.
    autopar: str
    beside: tuple[LeafRecord, ...] = ()  #: What the replicas of clients share.
    #: Version of the format, and of the autopar that wrote it.
    format: int = FORMAT

    @property
    def files(self) -> tuple[FileRecord, ...]:
        """All files but the manifest itself."""
        return (*(file for leaf in (*self.leaves, *self.beside) for file in leaf.files), *self.dense)

    def write(self, version: Location) -> int:
        """Writes it to a version's directory and flushes it; returns its checksum."""
        fields = asdict(self)
        for leaf in (*fields["leaves"], *fields["beside"]):
            if leaf["layout"] is not None:
                leaf["layout"][_CYCLIC] = leaf["layout"].pop("cyclic")
                if leaf["layout"]["owner"] is None:  # as in files of versions that know no owner
                    del leaf["layout"]["owner"]
        data = (json.dumps(fields, indent=1) + "\n").encode()
        write_file(version / NAME, data)
        return zlib.crc32(data)

    @staticmethod
    def parse(data: bytes, version: Location, crc32: int) -> Manifest:
        """Returns the manifest of a version, from its bytes and their checksum; raises CheckpointError if it is
        damaged, or of another format."""
        if zlib.crc32(data) != crc32:
            raise DamagedCheckpointError(
                f"{version / NAME} isn't what was written (its checksum differs from the one in "
                f"{version.parent / POINTER}): it is damaged. Take a copy of the checkpoint, or another checkpoint"
            )
        try:
            read = json.loads(data.decode())
            if read["format"] != FORMAT:
                is_newer = read["format"] > FORMAT
                remedy = "which is newer: pip install --upgrade autopar" if is_newer else f"which is older. {OLDER}"
                raise CheckpointError(
                    f"{version} was saved by autopar {read['autopar']} in format {read['format']}; this autopar reads "
                    f"format {FORMAT}, {remedy}"
                )
            for leaf in (*read["leaves"], *read["beside"]):
                if leaf["layout"] is not None:
                    leaf["layout"]["cyclic"] = leaf["layout"].pop(_CYCLIC)
            manifest = from_json(Manifest, read, "manifest")
            _check(manifest)
            return manifest
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            raise DamagedCheckpointError(f"{version / NAME} is damaged: {type(error).__name__}: {error}") from error


def _check(manifest: Manifest) -> None:
    """Checks a manifest's entries; raises ValueError, TypeError if one is impossible."""
    if list(leaf_numbers(manifest.structure)) != list(range(len(manifest.leaves))):
        raise ValueError("the structure isn't one of its leaves")
    for file in manifest.files:
        path = PurePosixPath(file.name)
        if path.is_absolute() or ".." in path.parts or not path.parts or file.nbytes < 0:
            raise ValueError(f"there is no file {file.name!r} of {file.nbytes} bytes in a checkpoint")
        if (file.crc32 is None) == (file.crc32c is None):
            raise ValueError(f"{file.name} has no checksum, or two")
    for leaf in (*manifest.leaves, *manifest.beside):
        try:
            wrong = _impossible(leaf)
        except (ValueError, TypeError, KeyError) as error:  # of a dtype, or of a number
            raise ValueError(f"{leaf.path}: {error}") from error
        if wrong:
            raise ValueError(f"{leaf.path}: {wrong}")


def _impossible(leaf: LeafRecord) -> str | None:
    """Returns what is wrong with a leaf, if anything."""
    layout = leaf.layout
    if not leaf.name or "/" in leaf.name or leaf.name in (".", ".."):
        return f"{leaf.name!r} is no name of an array"
    if leaf.kind == "value":
        known = ("True", "False") if leaf.type == "bool" else (repr(NUMBERS[leaf.type](leaf.value)),)
        return None if leaf.value in known else f"{leaf.value!r} is no Python {leaf.type}"
    if leaf.type in NUMBERS or min(leaf.shape, default=0) < 0 or leaf.replicas < 0:
        return f"there is no {leaf.type} of {leaf.dtype}{list(leaf.shape)} with {leaf.replicas} replicas"
    _ = leaf.numpy_dtype  # a TypeError if there is no such dtype
    if leaf.kind == "empty":
        return None
    if leaf.kind == "dense":
        return "it has a layout of rows" if layout is not None or leaf.replicas else None
    if layout is None or layout.devices < 1:
        return "it has no layout of rows"
    rows = leaf.replicas or (leaf.shape[leaf.axis] if 0 <= leaf.axis < len(leaf.shape) else -1)
    return None if layout.extent == rows else f"its layout has {layout.extent} rows"


# --- checksums: CURRENT holds the manifest's, the manifest those of all other files: no byte is read unchecked ---
#
# Written files are read again for a CRC-32 (zlib's). Chunks of rows aren't: TensorStore writes a CRC-32C at their end,
# and checks it when it reads them.


def flushed(version: Path, path: Path) -> FileRecord:
    """Flushes a file that somebody wrote under a version's directory; returns its record."""
    with named(path, "written"):
        flush(path)
        return FileRecord(path.relative_to(version).as_posix(), *_length_and_crc32(path, "saving"))


def check_files(version: Location, files: Iterable[FileRecord]) -> None:
    """Checks that files hold what was written (chunks of rows, which are checked when they are read: that they belong
    to this checkpoint); raises DamagedCheckpointError, with the file's name."""

    def check(record: FileRecord) -> None:
        path = version / record.name
        with named(path, "read"):
            try:
                nbytes, differs = _compared(path, record)
            except FileNotFoundError:
                raise DamagedCheckpointError(f"{path} is missing: the checkpoint isn't whole. {_REMEDY}") from None
            if nbytes != record.nbytes:
                raise DamagedCheckpointError(
                    f"{path} has {nbytes} bytes instead of {record.nbytes}: it was cut short, or written to. {_REMEDY}"
                )
            if differs:
                raise DamagedCheckpointError(
                    f"{path} isn't what was written (its checksum differs): it is damaged. {_REMEDY}"
                )

    mapped(version, check, files, "restoring a checkpoint")


#: Advice about a damaged checkpoint.
_REMEDY = "The checkpoint can't be restored: take a copy of it, or another checkpoint"


def _compared(path: Location, record: FileRecord) -> tuple[int, bool]:
    if record.crc32c is None:
        nbytes, crc32 = _length_and_crc32(path, "restoring")
        return nbytes, crc32 != record.crc32
    # In a store only a chunk's end is read: a chunk of another length has another end.
    nbytes = path.stat().st_size if isinstance(path, Path) else record.nbytes
    return nbytes, nbytes == record.nbytes and int.from_bytes(last_bytes(path, 4), "little") != record.crc32c


def _length_and_crc32(path: Location, doing: str) -> tuple[int, int]:
    nbytes = crc = 0
    for block in blocks(path):
        nbytes, crc = nbytes + len(block), zlib.crc32(block, crc)
        go_on(f"{doing} a checkpoint")
    return nbytes, crc
