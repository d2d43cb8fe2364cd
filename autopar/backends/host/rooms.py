"""How much room programs have for rows, and which program a step runs.

A program is compiled for so many rows that this rank asks for, and so many that it is asked for. Batches differ: what
doesn't fit gets more room (`ir.sizes.room_for`). What is computed once for each distinct row is computed for all that
there is room for, so that, once most steps have had much room to spare, smaller programs are made as well; each step
runs the smallest one that it fits. All of it follows from the batches alone: a run that is repeated compiles the same
programs at the same steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.sizes import room_for, rounded_room

#: Family -> (rows of this owner, rows that this rank asks for).
Rows = Mapping[int, tuple[int, int]]

#: Steps by which smaller rooms are judged, and that pass between two new rooms.
_WATCHED = 64
#: How often it is asked whether a smaller room would do.
_LOOKS = 2
#: A smaller room is made for this much fewer rows at least, of those computed over the watched steps.
_GAIN = 1 / 32


@dataclass(frozen=True, slots=True, eq=False)
class Room:
    """What one program has room for."""

    rows: Rows

    @property
    def asked(self) -> int:
        """Rows of all families that this rank may ask for: what a program's work grows with."""
        return sum(asked for _, asked in self.rows.values())

    def fits(self, needs: Rows) -> bool:
        """Whether a step that needs so much can run in it. `needs` may be of some families only."""
        return all(n <= self.rows[k][0] and m <= self.rows[k][1] for k, (n, m) in needs.items())


class Rooms:
    """The rooms of a step."""

    def __init__(self, first: Rows, limits: Rows) -> None:
        """
        Args:
          first: The least room that there is to be. Families that have their limit in it have it in every room: what a
            step needs of them isn't known before it is under way.
          limits: What never needs to be exceeded.
        """
        self._limits = limits
        self._varied = [family for family in first if first[family] != limits[family]]
        #: By the rows that may be asked for; the last one has the most room of each kind.
        self._rooms: list[Room] = [Room(first)]
        self._grown = -1
        self._looks = 0
        self._watched: list[Rows] = []

    @property
    def least(self) -> Room:
        """The smallest room."""
        return self._rooms[0]

    def best(self, needs: Rows) -> Room | None:
        """The smallest room that fits; None if there is none."""
        return next((room for room in self._rooms if room.fits(needs)), None)

    def grow(self, needs: Rows) -> Room:
        """A larger room, which fits."""
        self._grown += 1
        rows = dict(self._rooms[-1].rows)
        for family, needed in needs.items():
            pairs = zip(needed, rows[family], self._limits[family], strict=True)
            n, m = (max(old, room_for(need, limit, self._grown)) for need, old, limit in pairs)
            rows[family] = n, m
        self._add(Room(rows))
        self._watched.clear()
        return self._rooms[-1]

    def ran(self, needs: Rows) -> Room | None:
        """A step is done that needed so much. Returns a smaller room, where there is one from now on."""
        if self._looks == _LOOKS:
            return None
        self._watched.append(needs)
        if len(self._watched) < _WATCHED:
            return None
        self._looks += 1
        room = self._smaller()
        self._watched.clear()
        return room

    def drop(self, room: Room) -> None:
        """A smaller room saves nothing: there is to be none."""
        self._rooms.remove(room)
        self._looks = _LOOKS

    def _smaller(self) -> Room | None:
        """Makes a room that would have fitted many of the watched steps, where that saves enough."""
        steps = sorted(self._watched, key=_asked)
        before = sum(self._taken(needs) for needs in steps)
        found: list[tuple[int, Room]] = []
        for count in range(_WATCHED // 8, _WATCHED, _WATCHED // 8):
            room = self._around(steps[:count])
            saved = sum(max(self._taken(n) - room.asked, 0) for n in steps if room.fits(n))
            found.append((saved, room))
        saved, room = max(found, key=lambda pair: pair[0])
        if saved < _GAIN * before:
            return None
        self._add(room)
        return room

    def _taken(self, needs: Rows) -> int:
        """Rows that are computed in a step."""
        room = self.best(needs)
        assert room is not None, "the step has run"
        return room.asked

    def _around(self, steps: Sequence[Rows]) -> Room:
        """A room for all these steps; owners' rows have the most that there is: few programs depend on them."""
        rows = dict(self._rooms[-1].rows)
        for family in self._varied:
            n, most = rows[family]
            asked = max(needs[family][1] for needs in steps)
            rows[family] = n, min(most, rounded_room(asked, self._limits[family][1]))
        return Room(rows)

    def _add(self, room: Room) -> None:
        self._rooms = sorted([*self._rooms, room], key=lambda r: r.asked)


def _asked(needs: Rows) -> int:
    return sum(asked for _, asked in needs.values())
