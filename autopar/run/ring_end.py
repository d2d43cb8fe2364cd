"""`TableRingEnd`: what a client of a ring sends its neighbours, of tables by rows those that have changed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from autopar.backends.across import local
from autopar.ir.ring import Ring
from autopar.run.touched_rows import TouchedRows
from autopar.servers.elastic import pulled
from autopar.servers.ring import NeighborSpec

Array = Any


class TableRingEnd:
    """A client's end of its exchanges.

    Of a table by rows an active client sends those that it has changed since its last exchange with the same neighbour:
    that its steps have looked up, and that its exchanges with the other one have moved.

    Args:
      weights: Numbers of the step's inputs that are averaged.
      touched: Which of them are tables by rows.
      clients: C.
      own: The client's number.
      equal: Whether all clients have the same weights.
    """

    def __init__(self, weights: Sequence[int], touched: TouchedRows, clients: int, own: int, *, equal: bool) -> None:
        self._ring, self._own, self._rows = Ring(clients), own, touched
        self._dense = [k for k in weights if k not in touched]
        self._tables = [k for k in weights if k in touched]
        self._partner, self._is_open = own, not equal
        self._touched: Mapping[int, np.ndarray] = {}
        #: By neighbour and table, of an active client.
        self._since: dict[int, dict[int, list[np.ndarray]]] = {
            n: {k: [] for k in self._tables} for n in self._neighbors(own)
        }

    def spec(self, weights: Mapping[int, Array], passive: int) -> NeighborSpec:
        axes = {k: self._rows.axis(k) for k in self._tables}
        return NeighborSpec(weights, self._ring.clients, axes, self._neighbors(passive))

    def before(
        self, turn: int, weights: Mapping[int, Array], touched: Mapping[int, np.ndarray]
    ) -> Sequence[np.ndarray]:
        self._touched = touched
        if not self._ring.is_active(self._own):
            return []
        if self._is_open:  # of a step that was cut short the answer is lost, which rows it moved with it
            everything = {k: [self._rows.everything(k)] for k in self._tables}
            self._since = {n: dict(everything) for n in self._since}
        self._partner, self._is_open = self._ring.neighbor(self._own, turn), True
        since = self._since[self._partner]
        places = {k: np.unique(np.concatenate([np.zeros(0, np.int64), *some])) for k, some in since.items()}
        self._since[self._partner] = {k: [] for k in self._tables}
        for known in self._since.values():
            for k in self._tables:
                known[k] = [*known[k], touched[k]]
        return self._sent(weights, places)

    def behind(self, weights: Mapping[int, Array]) -> Sequence[np.ndarray]:
        return self._sent(weights, self._touched)

    def after(self, weights: Mapping[int, Array], values: Sequence[np.ndarray]) -> dict[int, Array]:
        count = len(self._dense)
        answers, is_active = dict(zip(self._dense, values[:count], strict=True)), self._ring.is_active(self._own)
        made = pulled(weights, answers) if is_active else {k: jnp.asarray(x) for k, x in answers.items()}
        for k, places, rows in zip(self._tables, values[count::2], values[count + 1 :: 2], strict=True):
            if not places.size:
                continue
            array = weights[k]
            if is_active:
                with np.errstate(all="ignore"):
                    rows = self._picked(k, array, places) - rows
                for neighbor, known in self._since.items():
                    if neighbor != self._partner:
                        known[k] = [*known[k], places]
            padded = self._rows.padded(places)
            made[k] = self._rows.put(k, array, padded, np.resize(rows, (padded.size, *rows.shape[1:])), in_place=True)
        self._is_open = False
        return made

    def _sent(self, weights: Mapping[int, Array], places: Mapping[int, np.ndarray]) -> list[np.ndarray]:
        """Copies: a step may update the weights in place."""
        values = [np.array(local(weights[k])) for k in self._dense]
        for k in self._tables:
            values += [places[k], self._picked(k, weights[k], places[k])]
        return values

    def _picked(self, k: int, array: Array, places: np.ndarray) -> np.ndarray:
        """[n, ...]: rows of a table, as few programs as possible."""
        return np.array(local(self._rows.picked(k, array, self._rows.padded(places)))[: places.size])

    def _neighbors(self, client: int) -> list[int]:
        return sorted({self._ring.neighbor(client, turn) for turn in (0, 1)})
