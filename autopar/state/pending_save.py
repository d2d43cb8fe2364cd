"""`PendingSave`: a save from its beginning to its commit, of which the files are written in between, by any thread."""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from autopar.errors import CheckpointError
from autopar.ir.typed_json import from_json, to_json
from autopar.launch.group import Group
from autopar.state.files.dense import require_orbax, write_dense
from autopar.state.files.folder import Folder, await_visible
from autopar.state.files.manifest import FileRecord, Manifest
from autopar.state.files.places import Place, mapped, require_tensorstore
from autopar.state.files.rows import write_rows
from autopar.state.files.structure import Node, describe_tree
from autopar.state.saving import SavedLeaf, check_same_state, leaves_beside, on_one_process, saved_leaves


@dataclass(frozen=True)
class Written:
    """The files that one process wrote. `rows`: (leaf, shard, files)."""

    rows: tuple[tuple[int, int, tuple[FileRecord, ...]], ...]
    dense: tuple[FileRecord, ...]

    @staticmethod
    def of(fields: Any) -> Written:
        """Reads what another process sent."""
        return from_json(Written, fields, "files")


@dataclass(frozen=True)
class PendingSave:
    """A save that has begun. Nobody sees it before it is committed.

    Attributes:
      folder, version: Where it is written.
      structure: Of the state.
      leaves: Those of the state, `count` of them, and what its replicas share.
      position: Where the training is in its data.
      group: All processes.
    """

    folder: Folder
    version: Place
    structure: Node
    leaves: Sequence[SavedLeaf]
    count: int
    position: dict[str, Any] | None
    group: Group

    @staticmethod
    def begin(
        folder: Folder,
        state: Any,
        position: Mapping[str, Any] | None,
        group: Group,
        *,
        copied: bool = False,
        step: int | None = None,
    ) -> PendingSave:
        """Begin to save a state. Collective.

        Args:
          folder: Its place.
          state, position: As of `save`.
          group: All processes.
          step: The number of the training's step, the same on all processes, if it is known.
          copied: Whether steps may go on meanwhile: what this process will write is copied to its memory.
        """
        known: list[SavedLeaf] = []
        state = on_one_process(state)

        def look() -> str:
            known.extend(saved_leaves(state))
            known.extend(leaves_beside(state))
            if any(leaf.record.kind == "rows" for leaf in known):
                require_tensorstore()
            if any(leaf.record.kind == "dense" for leaf in known) and isinstance(folder.path, Path):
                require_orbax()
            lines = [f"step {step}", f"position {json.dumps(_plain(position), sort_keys=True)}"]
            lines += [leaf.record.told for leaf in known]
            if copied:
                known[:] = [leaf.copied(writes_dense=group.rank == 0) for leaf in known]
            return "\n".join(lines)

        check_same_state(group, group.together(CheckpointError, look, "what is saved"))
        version = group.led(CheckpointError, lambda: folder.begin().name, "a new version", folder.version)
        count = len(jax.tree.leaves(state))
        return PendingSave(folder, version, describe_tree(state), known, count, _plain(position), group)

    def write(self) -> Written:
        """Write this process's files, down to the disk. Exchanges nothing."""
        version = self.version
        await_visible(version)
        in_rows = [k for k, leaf in enumerate(self.leaves) if leaf.record.kind == "rows"]
        dense = [k for k, leaf in enumerate(self.leaves) if leaf.record.kind == "dense" and self.group.rank == 0]
        if not isinstance(version, Path):  # to a store Orbax writes with more packages only
            in_rows, dense = in_rows + dense, []

        def rows_of(k: int) -> list[tuple[int, int, tuple[FileRecord, ...]]]:
            return [(k, shard, write_rows(version, name, rows)) for name, shard, rows in self.leaves[k].parts()]

        rows = mapped(version, rows_of, in_rows, "saving a checkpoint")
        arrays = {self.leaves[k].record.name: self.leaves[k].array() for k in dense}
        return Written(tuple(row for own in rows for row in own), write_dense(version, arrays))

    def commit(self, written: Callable[[], Written]) -> None:
        """Make it the checkpoint, or remove it if a process couldn't write its files. Collective.

        Args:
          written: Gives what `write` returned, or raises what it raised.
        """
        try:
            files = self.group.together(CheckpointError, lambda: to_json(written()), "files", Written.of)
            manifest = self._manifest(files)
            put = lambda: self.folder.commit(self.version, manifest.write(self.version))  # noqa: E731
            self.group.led(CheckpointError, put, "the checkpoint")
        finally:  # of what was there before, or of what was written in vain
            if self.group.rank == 0:
                with contextlib.suppress(CheckpointError, OSError):  # the next save does it
                    self.folder.clean()

    def _manifest(self, written: Sequence[Written]) -> Manifest:
        files: dict[int, dict[int, Sequence[FileRecord]]] = {}
        for number, shard, own in (row for each in written for row in each.rows):
            files.setdefault(number, {})[shard] = own
        records = []
        for number, leaf in enumerate(self.leaves):
            parts, layout = files.get(number, {}), leaf.record.layout
            complete = layout is None or sorted(parts) == list(range(layout.devices))
            assert complete, f"shards of {leaf.record.path}: {parts}"
            records.append(
                dataclasses.replace(leaf.record, files=tuple(file for shard in sorted(parts) for file in parts[shard]))
            )
        return Manifest(
            self.structure,
            tuple(records[: self.count]),
            self.position,
            self.group.size,
            written[0].dense,
            importlib.metadata.version("autopar"),
            tuple(records[self.count :]),
        )


def _plain(position: Mapping[str, Any] | None) -> dict[str, Any] | None:
    """Returns a position as JSON has it."""
    if position is None:
        return None
    try:
        return json.loads(json.dumps(dict(position), default=lambda value: value.item()))
    except (TypeError, ValueError, AttributeError) as error:
        raise CheckpointError(
            f"position={position!r} can't be saved: give what autopar.shard(...).state() returns, or another dict of "
            "numbers and texts"
        ) from error
