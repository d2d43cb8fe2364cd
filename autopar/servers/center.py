"""`Center`: keeps a centre of all workers' weights, and pulls both towards each other (`autopar.sync.Elastic`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp
import numpy as np

from autopar.jax_types import Array
from autopar.mpi.service import Handler
from autopar.protocols import Log
from autopar.servers.messages import Exchange, Kept, Pulled, Read, Reply, Spec, Stepped


class Center:
    """Takes one message after the other. An exchange moves one pair of weights and centre, so that the centre gains
    what a worker loses (Zhang et al., "Deep learning with elastic averaging SGD", 2015). `leaves`: this server's part
    of the centre, by any number; copied. `alpha`: the strength of an exchange's pull."""

    def __init__(self, leaves: Mapping[int, Array], alpha: float, workers: int) -> None:
        self._indices, self._leaves = tuple(leaves), [jnp.copy(x) for x in leaves.values()]
        self._alpha, self._log = alpha, Log(workers)

    @property
    def leaves(self) -> dict[int, Array]:
        """The part of the centre that it keeps, by number."""
        return dict(zip(self._indices, self._leaves, strict=True))

    def take(self, message: Exchange | Read) -> list[tuple[int, Reply]]:
        """Returns the answer with its worker; raises AutoparError if an exchange isn't the next one of its worker."""
        worker = message.worker
        if isinstance(message, Read):
            wanted = message.leaves
            leaves = {k: np.array(x) for k, x in self.leaves.items() if wanted is None or k in wanted}
            return [(worker, Kept(leaves, {}, self._log.events))]
        version = self._log.version
        self._log.see(worker)
        self._count(message)
        self._leaves, moves = _exchanged(self._leaves, list(message.values), self._alpha)
        return [(worker, Pulled(version, [np.asarray(x) for x in moves]))]

    def _count(self, message: Exchange | Stepped) -> None:
        self._log.check_next(message.worker, message.step, "sent exchange")
        self._log.change(message.worker, message.step)


@dataclass(frozen=True, slots=True)
class CenterSpec(Spec):
    """Makes a server that keeps a part of a centre (arguments of `Center`)."""

    leaves: Mapping[int, Array]
    alpha: float
    workers: int

    def handler(self) -> Handler:
        return Center(self.leaves, self.alpha, self.workers).take

    def portable(self) -> Spec:
        return replace(self, leaves={k: np.asarray(x) for k, x in self.leaves.items()})


@jax.jit
def _exchanged(center: Sequence[Array], weights: Sequence[Array], alpha: float) -> tuple[list[Array], list[Array]]:
    """Returns the next centre, c + e, and the moves of the weights: e = alpha (x - c)."""
    moves = [(alpha * (x - c)).astype(c.dtype) for x, c in zip(weights, center, strict=True)]
    return [c + e for c, e in zip(center, moves, strict=True)], moves


# --- a passive client's weights in a ring, with which neighbours average theirs (`autopar.sync.ADPSGD`) ---


class Earlier:
    """Keeps rows as they were before their first change. `indices`: of these rows, int64[n], ascending."""

    def __init__(self, like: np.ndarray) -> None:
        self.indices = np.zeros(0, np.int64)
        self._values = like[:0]

    def keep(self, indices: np.ndarray, values: np.ndarray) -> None:
        """Keeps rows that aren't kept yet. `indices`: ascending, distinct."""
        is_new = ~np.isin(indices, self.indices, assume_unique=True)
        indices = np.concatenate([self.indices, indices[is_new]])
        order = np.argsort(indices)
        self.indices = indices[order]
        self._values = np.concatenate([self._values, values[is_new]])[order]

    def of(self, indices: np.ndarray, now: np.ndarray) -> np.ndarray:
        """Returns rows as they were before their first change. `now`: the rows as they are."""
        values = now.copy()
        known = np.isin(indices, self.indices, assume_unique=True)
        values[known] = self._values[np.searchsorted(self.indices, indices[known])]
        return values


class SharedRows:
    """A passive client's table `rows`, and for each neighbour the rows that changed since their last exchange.

    After an exchange both ends have the same rows, up to rounding. Rows that neither has changed since don't move, and
    aren't sent. A row that an exchange has moved counts as changed for the other neighbour: so it goes round until all
    have it to the bit.

    Args:
      rows: [rows, ...], floats; copied.
      neighbors: Numbers of the active clients that exchange; all begin with the same rows.
    """

    def __init__(self, rows: np.ndarray, neighbors: Sequence[int]) -> None:
        self.rows = np.array(rows)
        self._since = {n: Earlier(self.rows) for n in neighbors}
        self._begun = Earlier(self.rows)

    def exchange(self, neighbor: int, indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Moves this table's rows to the mean of both; returns their indices, and the moves to subtract from the
        neighbour's.

        `neighbor`: the active client that asks. `indices`: rows that it has changed since their last exchange,
        ascending, distinct. `values`: [n, ...]: these rows.
        """
        earlier = self._since[neighbor]
        union = np.union1d(indices, earlier.indices)
        now = self.rows[union]
        theirs = earlier.of(union, now)
        theirs[np.searchsorted(union, indices)] = values
        with np.errstate(all="ignore"):  # what overflows is infinite, as in JAX
            moves = (now.dtype.type(0.5) * (theirs - now)).astype(now.dtype)
            differ = np.any(moves != 0, axis=tuple(range(1, moves.ndim)))
            union, now, moves = union[differ], now[differ], moves[differ]
            new = now + moves
        self._since[neighbor] = Earlier(self.rows)
        for other, each in self._since.items():
            if other != neighbor:
                each.keep(union, now)
        self._begun.keep(union, now)
        self.rows[union] = new
        return union, moves

    def step(self, indices: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Adds the changes of the client's own step; returns the numbers and values of rows that differ from the
        step's.

        `indices`: rows that the step looked up, ascending, distinct. `values`: [n, ...]: these rows, as it made them.
        """
        begun, now = self._begun, self.rows[indices]
        moved = np.isin(indices, begun.indices, assume_unique=True)
        new = np.array(values)
        with np.errstate(all="ignore"):
            new[moved] = now[moved] + (values[moved] - begun.of(indices[moved], now[moved]))
        for each in self._since.values():
            each.keep(indices, now)
        self.rows[indices] = new
        self._begun = Earlier(self.rows)
        return begun.indices, self.rows[begun.indices]


class Neighbor(Center):
    """Keeps a passive client's weights, by any number, so that an active one can average with them at any time: both
    become the mean of one pair. Changes by the client's own steps are added in one transaction.

    Messages have the values of all other leaves first, and then the rows' numbers and the rows of each table. `tables`:
    leaves that are exchanged by rows -> row axis. `neighbors`: the active clients that exchange.
    """

    def __init__(
        self,
        leaves: Mapping[int, Array],
        workers: int,
        tables: Mapping[int, int] | None = None,
        neighbors: Sequence[int] = (),
    ) -> None:
        self._axes, self._order = tables or {}, tuple(leaves)
        super().__init__({k: x for k, x in leaves.items() if k not in self._axes}, 0.5, workers)
        self._tables = {
            k: SharedRows(np.moveaxis(np.asarray(leaves[k]), axis, 0), neighbors) for k, axis in self._axes.items()
        }
        self._begun = self._leaves  # the weights at the beginning of its step under way

    @property
    def leaves(self) -> dict[int, Array]:
        rows = {k: np.moveaxis(table.rows, 0, self._axes[k]) for k, table in self._tables.items()}
        whole = {**super().leaves, **rows}
        return {k: whole[k] for k in self._order}

    def take(self, message: Exchange | Stepped | Read) -> list[tuple[int, Reply]]:
        if isinstance(message, Read):
            return super().take(message)
        count = len(self._leaves)
        message, rows = replace(message, values=message.values[:count]), message.values[count:]
        ((worker, reply),) = self._stepped(message) if isinstance(message, Stepped) else super().take(message)
        assert isinstance(reply, Pulled), "nobody reads"
        made = list(reply.values)
        for table, indices, values in zip(self._tables.values(), rows[::2], rows[1::2], strict=True):
            if isinstance(message, Stepped):
                made += table.step(indices, values)
            else:
                made += table.exchange(worker, indices, values)
        return [(worker, replace(reply, values=made))]

    def _stepped(self, message: Stepped) -> list[tuple[int, Reply]]:
        version = self._log.version
        self._count(message)
        new = [jnp.array(x) for x in message.values]
        if self._leaves is not self._begun:
            new = _added(self._leaves, new, self._begun)
        self._leaves = self._begun = new
        self._log.see(message.worker)
        return [(message.worker, Pulled(version, [np.array(x) for x in new]))]


@jax.jit
def _added(now: Sequence[Array], stepped: Sequence[Array], begun: Sequence[Array]) -> list[Array]:
    return [x + (new - old) for x, new, old in zip(now, stepped, begun, strict=True)]


@dataclass(frozen=True, slots=True)
class NeighborSpec(Spec):
    """Makes a `Neighbor`."""

    leaves: Mapping[int, Array]
    workers: int
    tables: Mapping[int, int]
    neighbors: Sequence[int]

    def handler(self) -> Handler:
        return self.made(Neighbor).take

    def made(self, kind: type[Neighbor]) -> Neighbor:
        return kind(self.leaves, self.workers, self.tables, self.neighbors)
