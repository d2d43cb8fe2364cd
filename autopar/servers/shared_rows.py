"""`SharedRows`: a table of a passive client, averaged with its neighbours' by the rows that either end has changed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


class Earlier:
    """Keeps rows as they were before they were changed first.

    Args:
      like: [rows, ...], of whose rows it keeps some.

    Attributes:
      places: Their numbers, int64[n], ascending.
    """

    def __init__(self, like: np.ndarray) -> None:
        self.places = np.zeros(0, np.int64)
        self._values = like[:0]

    def keep(self, places: np.ndarray, values: np.ndarray) -> None:
        """Keep some rows, those that aren't there already. `places`: ascending, each once."""
        is_new = ~np.isin(places, self.places, assume_unique=True)
        places = np.concatenate([self.places, places[is_new]])
        order = np.argsort(places)
        self.places = places[order]
        self._values = np.concatenate([self._values, values[is_new]])[order]

    def of(self, places: np.ndarray, now: np.ndarray) -> np.ndarray:
        """Returns some rows as they were. `now`: as they are."""
        values = now.copy()
        known = np.isin(places, self.places, assume_unique=True)
        values[known] = self._values[np.searchsorted(self.places, places[known])]
        return values


class SharedRows:
    """A passive client's table, and for each neighbour what has become of it since their last exchange.

    Behind an exchange both ends have the same rows, but for rounding; what neither has changed since moves by nothing,
    and isn't sent. A row that an exchange has moved is changed for the other neighbour: so it goes round until all have
    it to the bit.

    Args:
      rows: [rows, ...], floats; copied.
      neighbors: Numbers of the active clients that exchange; all begin with the same rows.

    Attributes:
      rows: As they are now.
    """

    def __init__(self, rows: np.ndarray, neighbors: Sequence[int]) -> None:
        self.rows = np.array(rows)
        self._since = {n: Earlier(self.rows) for n in neighbors}
        self._begun = Earlier(self.rows)

    def exchange(self, neighbor: int, places: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Move this table's rows to the mean of both; returns which, and by how much the neighbour's are to move down.

        Args:
          neighbor: Who asks.
          places: The rows that it has changed since their last exchange, ascending, each once.
          values: [n, ...]: these.
        """
        earlier = self._since[neighbor]
        union = np.union1d(places, earlier.places)
        now = self.rows[union]
        theirs = earlier.of(union, now)
        theirs[np.searchsorted(union, places)] = values
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

    def step(self, places: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Add what the client's own step has changed; returns the rows that aren't as the step made them, and these.

        Args:
          places: The rows that the step looked up, ascending, each once.
          values: [n, ...]: these, as it made them.
        """
        begun, now = self._begun, self.rows[places]
        moved = np.isin(places, begun.places, assume_unique=True)
        new = np.array(values)
        with np.errstate(all="ignore"):
            new[moved] = now[moved] + (values[moved] - begun.of(places[moved], now[moved]))
        for each in self._since.values():
            each.keep(places, now)
        self.rows[places] = new
        self._begun = Earlier(self.rows)
        return begun.places, self.rows[begun.places]
