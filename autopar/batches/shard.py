"""`shard`: global batches from any source, placed over the devices ahead of the step, with their position."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import jax
import numpy as np
from jax.sharding import Mesh

from autopar.backends.clients import Clients
from autopar.backends.devices import Devices
from autopar.batches.iterator import Batches, Options
from autopar.batches.on_demand import BatchesOnDemand
from autopar.batches.sources import Examples, Held, Last, Stream, reader_of
from autopar.errors import ArgumentsError
from autopar.ir.paths import BatchAxis, check_batch_axis
from autopar.jax_types import Pytree


def shard(
    source: Iterable[Pytree] | Pytree,
    *,
    batch_size: int | None = None,
    epochs: int | None = 1,
    shuffle: int | None = None,
    per_process: bool = False,
    last: Last = "error",
    mask: str = "mask",
    ahead: int = 1,
    mesh: Mesh | None = None,
    data_axis: str | None = None,
    batch_axis: BatchAxis = 0,
    step: Step | None = None,
) -> Batches:
    """Makes global batches from a source, each divided over the devices along its examples.

    Args:
      source: An iterable of batches: pytrees of arrays, or of anything that NumPy makes arrays of (torch tensors).
        Every device gets leaves that don't have the batch's size along their batch axis (scalars, shared ids). Or, with
        `batch_size=`, examples that can be indexed: a pytree of arrays, or an object with `len(source)` and an example
        at `source[k]`; each process then reads only what its own devices hold.
      batch_size: Number of examples in a global batch.
      epochs: How often the source is gone through; None: without end.
      shuffle: A seed: the examples come in another order each epoch, the same for the same seed. Needs `batch_size=`.
      per_process: Whether each process's source has another part of the data. A global batch is then the concatenation
        of the processes' batches, in their order, as much of each.
      last: What to do with a batch that is smaller than the first one, and, under `per_process`, with sources that
        don't end together. "error". "drop": such a batch is left out, and the epoch ends with the first source that
        does. "pad": its last example is repeated, and every batch, which must be a dict, gets float32 [batch] weights
        under `mask`, 1 for an example and 0 for padding, for the step's loss to use; the epoch ends with the last
        source that does.
      mask: The name of the weights.
      ahead: Number of batches that are placed before they are asked for.
      mesh, data_axis: As for `parallelize`.
      batch_axis: As for `parallelize`; the paths are those of a step whose argument is called `batch`.
      step: The step that `parallelize` returned and that is given the batches. With tables on the hosts of several
        ranks it fetches rows of the next batch beside the step before (docs/optimisations.md). With `sync=` batches are
        minibatches of its clients, `batch_size` examples each, and go to the devices of each client. Every example of
        an epoch goes to one client. Positions count the minibatches of all clients, so that any number of clients can
        go on from there. Clients take turns; with servers (`sync.Async`, `Elastic`) a free worker takes the next
        minibatch (nothing is placed ahead).

    Returns:
      An iterator over batches of `jax.Array`s. Its `state()` is the position, to be saved in a checkpoint; `restore`
        goes on from there. Every process must ask for each batch.

    Raises:
      ArgumentsError: options that don't fit the source. While iterating: a batch without an array, a smaller batch
        under "error", or one that is no dict under "pad"; sources that differ between processes, or under `per_process`
        that don't fit each other.

    Example:
      >>> import numpy as np, autopar
      >>> data = {"ids": np.arange(1000), "label": np.arange(1000) % 2}
      >>> batches = autopar.shard(data, batch_size=64, epochs=2, shuffle=0, last="drop")
      >>> next(batches)["ids"].shape
      (64,)
      >>> batches.state()
      {'epoch': 0, 'batch': 1, 'seed': 0, 'sources': 1}
    """
    if last not in ("error", "drop", "pad"):
        raise ArgumentsError(f"last={last!r}: there are 'error', 'drop' and 'pad'")
    if shuffle is not None and batch_size is None:
        raise ArgumentsError("shuffle= needs examples that can be indexed: give them, and batch_size=")
    if isinstance(shuffle, int) and shuffle < 0:
        raise ArgumentsError(f"shuffle={shuffle}: a seed is not negative")
    for name, value, least in (("shuffle", shuffle, 0), ("epochs", epochs, 0), ("batch_size", batch_size, 1)):
        if value is not None and (not isinstance(value, (int, np.integer)) or value < least):
            raise ArgumentsError(f"{name}={value!r}: give a whole number, {least} or more, or None")
    if mesh is not None and not isinstance(mesh, jax.sharding.Mesh):
        raise ArgumentsError(f"mesh is a {type(mesh).__name__}; make one with jax.make_mesh")
    if not isinstance(mask, str):
        raise ArgumentsError(f"mask={mask!r}: give the name that the weights have in the batch, a string")
    check_batch_axis(batch_axis)
    devices = Devices.of(mesh, data_axis)
    clients = None if step is None else _clients_of(step, batch_size, per_process, last, mesh)
    announce = None
    if step is not None and clients is None:
        devices.processes.values(True, "shard(step=)")  # steps look ahead on all processes or none
        announce = step.announce
        announce(None, None)
    devices, group = (devices, devices.processes) if clients is None else (clients.devices, clients.processes)
    seed = -1 if shuffle is None else shuffle
    options = Options(devices, batch_axis, last, mask, per_process, epochs, seed, group, clients)
    on_demand = step is not None and clients is not None and not step.takes_turns
    added = [mask] if last == "pad" else []
    if batch_size is None:
        return Batches(Stream(source, batch_axis, added, epochs), options, ahead, announce)
    examples = _examples(source, batch_size, shuffle, options, added, on_demand=on_demand)
    return BatchesOnDemand(examples, options, ahead) if on_demand else Batches(examples, options, ahead, announce)


class Step(Protocol):
    """A step that knows its clients, and makes use of the next batch."""

    @property
    def minibatch_clients(self) -> Clients | None:
        """See `ParallelStep.minibatch_clients`."""
        ...

    @property
    def takes_turns(self) -> bool:
        """See `ParallelStep.takes_turns`."""
        ...

    def announce(self, batch: Pytree, following: Pytree | None) -> None:
        """Takes the batch that the next call is given, and the one after it."""
        ...


def _clients_of(step: Step, batch_size: int | None, per_process: bool, last: Last, mesh: Mesh | None) -> Clients | None:
    if not hasattr(step, "announce"):
        name = getattr(step, "__name__", type(step).__name__)
        raise ArgumentsError(f"shard(step={name}): give the step that autopar.parallelize returned, or leave it out")
    clients = step.minibatch_clients
    if clients is None:
        return None
    if batch_size is None or per_process or mesh is not None or last == "pad":
        raise ArgumentsError(
            "shard(step=...) gives each client minibatches of examples that can be indexed: give batch_size=, the same "
            "source on all processes, last='error' or 'drop', and no mesh="
        )
    return clients


def _examples(
    source: Pytree, batch_size: int, shuffle: int | None, options: Options, added: list[str], *, on_demand: bool
) -> Examples:
    size, rest = divmod(batch_size, options.sources)
    if rest:
        raise ArgumentsError(
            f"batch_size={batch_size} is that of the global batch, of which each of {options.sources} processes gives "
            "the same part: give a multiple of their number"
        )
    reader = reader_of(source, options.batch_axis, added)
    processes = options.group
    all_ = processes.values([reader.count, batch_size, shuffle, options.last, options.epochs], "shard")
    for k, other in enumerate(all_):
        if other[1:] != all_[0][1:] or (not options.per_process and other != all_[0]):
            raise ArgumentsError(
                f"shard: [examples, batch_size, shuffle, last, epochs] are {other} on {processes.name(k)} and "
                f"{all_[0]} on {processes.name(0)}. If each process has a part of the data, say "
                "shard(source, per_process=True)"
            )
    first = options.member * size
    counts = [n for n, *_ in all_] if options.per_process else [reader.count]
    held = Held(((0, size),)) if options.per_process else Held.by(options.devices, batch_size)
    turns = (1, 0) if options.clients is None or on_demand else (options.clients.count, options.clients.own)
    return Examples(reader, size, counts, shuffle, options.member, options.last, held, first, *turns)
