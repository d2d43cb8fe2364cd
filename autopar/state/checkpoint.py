"""`save` and `restore`: a state on a disk or in an object store, and back onto as many ranks or devices as there are.

Who writes what: ordinary arrays, which are the same on all processes, the first one; rows of tables those who
have them, each process its own files, at the same time. Nobody sees the checkpoint before all is written: see
`files.folder`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax

from autopar.errors import ArgumentsError, CheckpointError, DamagedCheckpointError
from autopar.ir.typed_json import from_json
from autopar.launch.group import Group, everyone
from autopar.launch.progress import PROGRESS
from autopar.run.step import MethodStep, ParallelStep
from autopar.state.files import manifest as manifests
from autopar.state.files.checksums import check_files
from autopar.state.files.folder import Folder
from autopar.state.files.manifest import Manifest, rebuild
from autopar.state.files.places import Place, named
from autopar.state.init import unbound
from autopar.state.resize import home_before
from autopar.state.resize import resize as with_rows_of
from autopar.state.restoring import Keeper, home_as_saved, homes_of_step, matched, read_leaves, shapes_of, warn_of_means
from autopar.state.saving import PendingSave
from autopar.tables.home import Home, NumpyHome


class Restored(NamedTuple):
    """A state that was restored.

    Attributes:
      state: The state.
      position: The position in the data that was saved with it; None if none was.
    """

    state: Any
    position: dict[str, Any] | None


def save(path: str | os.PathLike[str], state: Any, *, position: Mapping[str, Any] | None = None) -> None:
    """Saves a state, in place of what was saved at this path before.

    All or nothing: however the save ends (an error, a kill, a power cut), what can be restored is the checkpoint before
    or this one, whole. Returns when this one is on the disk. Where there are several ranks, or processes of
    `jax.distributed`, all of them call it, and the path is one that all of them see.

    Args:
      path: A directory for this checkpoint alone; it is made. For several checkpoints name several:
        f"checkpoints/{step}". Or the like in an object store: "s3://bucket/run", "gs://bucket/run".
      state: A pytree of arrays (JAX's, PRNG keys, NumPy's), `autopar.Table`s, tables on hosts and numbers. Ordinary
        arrays are the same on all ranks, or one array over all of JAX's processes.
      position: Where the training is in its data: what `autopar.shard(...).state()` gives, or any dict that JSON holds.
        `restore` returns it.

    Raises:
      CheckpointError: on every rank, naming the one where it failed: a leaf that can't be saved, ranks that save
        different states, a full disk, a path with other files, no Orbax.
      DonatedStateError: a state that was given to a step.

    Example:
      >>> import tempfile, jax.numpy as jnp, autopar
      >>> folder = tempfile.mkdtemp() + "/checkpoint"
      >>> autopar.save(folder, {"w": jnp.arange(3.0)}, position={"epoch": 0, "batch": 10})
      >>> state, position = autopar.restore(folder)
      >>> state["w"], position
      (Array([0., 1., 2.], dtype=float32), {'epoch': 0, 'batch': 10})
    """
    group = everyone()
    with PROGRESS.during("saving a checkpoint"):
        saving = PendingSave.begin(Folder.of(path), state, position, group)
        saving.commit(saving.write)


def restore(
    path: str | os.PathLike[str],
    like: Any = None,
    *,
    step: ParallelStep | MethodStep | None = None,
    batch: Any = None,
    call: Callable[[Any], Sequence[Any]] | None = None,
    resize: bool = False,
) -> Restored:
    """Restores what was saved at a path, onto the ranks and devices that there are now.

    How many ranks or devices saved it makes no difference: each rank reads the rows that it is to have. Where there are
    several, or processes of `jax.distributed`, all of them call it.

    Args:
      path: As of `save`.
      like: A state of the same structure, of arrays, tables or shapes (`jax.eval_shape(make_state, key)`): needed for
        states with other nodes than dicts, lists, tuples and None. Without `step` each leaf goes where the one in
        `like` is: an array with its sharding, an `autopar.Table`, a table on hosts, a NumPy array. Nothing is written
        to it. A Python number stands for an array of no axes and its kind as well, and the other way round (a counter
        that begins with 0, and that a step returns as an array): restored is what was saved.
      step: What `parallelize` returned: leaves go where its plan has them, tables share by share.
      batch, call: With `step`, as for `init`.
      resize: Whether tables that have other numbers of rows in `like` are resized to them, as by `autopar.resize`:
        further rows are those of `like`, a state that `autopar.init` made. It is given up then, and says where leaves
        go, so that `step` isn't needed.

    Returns:
      (state, position). Without `like` and `step` ordinary arrays, whole on each rank.

    Raises:
      MissingCheckpointError: there is none. (Also a FileNotFoundError.)
      CheckpointError: on every rank, naming the one where it failed: another structure, shape or dtype than `like`,
        files that are missing or damaged, another format.
      HostMemoryError: a table doesn't fit into a host's memory.

    Example:
      >>> import jax, jax.numpy as jnp, tempfile, autopar
      >>> @autopar.parallelize(strategy=("ps", "hosts"))
      ... def step(table, ids):
      ...     return table - 0.1 * jax.grad(lambda t: (t[ids] ** 2).sum())(table), ids.sum()
      >>> folder, ids = tempfile.mkdtemp() + "/checkpoint", jnp.array([3, 5])
      >>> table, _ = step(jnp.ones((1000, 8)), ids)
      >>> autopar.save(folder, table)
      >>> table, position = autopar.restore(folder, step=step, batch=ids)
      >>> table, _ = step(table, ids)
    """
    if step is None and (batch is not None or call is not None):
        raise ArgumentsError("restore takes batch= and call= together with step=, to know the step's plan")
    if step is not None:
        step, batch, call = unbound("restore", "state", step, batch, call)
    if resize and (like is None or step is not None):
        raise ArgumentsError("restore(resize=True) takes like=, a state of the new size, and no step=")
    group = everyone()
    with PROGRESS.during("restoring a checkpoint"):
        state, position = _restore(Folder.of(path), like, step, batch, call, resize, group)
    return Restored(with_rows_of(state, like) if resize else state, position)


def _restore(
    folder: Folder, like: Any, step: ParallelStep | None, batch: Any, call: Any, resize: bool, group: Group
) -> Restored:
    version, manifest = _manifest_of(folder, group)
    template: Any = like
    numbers = list(range(len(manifest.leaves)))

    def look() -> None:
        nonlocal template, numbers
        if like is None:
            template = rebuild(manifest.structure, shapes_of(manifest))
        else:
            numbers = matched(manifest, like, resize)

    group.together(CheckpointError, look, "what is restored")
    records = [manifest.leaves[k] for k in numbers]
    if like is None:  # ordinary arrays, of the kind that they were
        homes: list[Home] = [home_as_saved(record) for record in records]
    else:
        pairs = zip(jax.tree.leaves(template), records, strict=True)
        homes = [
            home_before(leaf, record.shape) if hasattr(leaf, "shape") else home_as_saved(record)
            for leaf, record in pairs
        ]
    keeper: Keeper | None = None
    if step is not None:
        shapes = shapes_of(manifest)
        saved = jax.tree.unflatten(jax.tree.structure(template), [shapes[k] for k in numbers])
        homes, keeper = homes_of_step(step, saved, homes, batch, call, manifest)
    if keeper is None:
        warn_of_means(manifest)
    # All are checked, each by one process, before any is read by any.
    mine = manifest.files[group.rank :: group.size]
    group.together(CheckpointError, lambda: check_files(version, mine), "checksums")
    leaves: list[Any] = []

    def read() -> None:
        own = None if keeper is None else keeper.client
        beside = [NumpyHome()] * len(manifest.beside)
        leaves.extend(read_leaves(version, [*records, *manifest.beside], [*homes, *beside], own))
        shared = leaves[len(records) :]
        del leaves[len(records) :]
        if keeper is not None:
            leaves[:] = keeper.kept(leaves, dict(zip((r.path for r in manifest.beside), shared, strict=True)))

    group.together(CheckpointError, read, "reading files")
    state = jax.tree.unflatten(jax.tree.structure(template), leaves)
    return Restored(state, None if manifest.position is None else dict(manifest.position))


def _manifest_of(folder: Folder, group: Group) -> tuple[Place, Manifest]:
    """Returns the version that counts, and what is in it."""

    def read() -> tuple[str, int, str]:
        version, crc32 = folder.current()
        path = version / manifests.NAME
        with named(path, "read"):
            try:
                return version.name, crc32, path.read_bytes().decode("latin-1")  # JSON holds any bytes so
            except FileNotFoundError:
                raise DamagedCheckpointError(f"{path} can't be read: it is missing") from None

    def told(found: Any) -> tuple[Place, int, bytes]:
        name, crc32, text = from_json(tuple[str, int, str], list(found), "the manifest")
        return folder.version(name), crc32, text.encode("latin-1")

    version, crc32, data = group.led(CheckpointError, read, "the manifest", told)
    return version, Manifest.parse(data, version, crc32)
