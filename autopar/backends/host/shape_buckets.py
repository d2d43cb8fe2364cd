"""Shape buckets: the numbers of rows that programs are compiled for, and which program a step runs.

A program is compiled for so many rows that this rank asks for, and so many that it is asked for. Batches differ: what
doesn't fit gets a larger bucket (`ir.sizes.bucket_size`). What is computed once for each distinct row is computed for
all rows that a program is compiled for. So smaller programs are made as well, once most steps have needed far fewer
rows, and each step runs the smallest one that it fits. All of it follows from the batches alone: a run that is repeated
compiles the same programs at the same steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.sizes import bucket_size, rounded_size

#: Family -> (rows of this owner, rows that this rank asks for).
Rows = Mapping[int, tuple[int, int]]

#: Steps by which smaller buckets are judged, and that pass between two new buckets.
_WATCHED = 64
#: How often it is asked whether a smaller bucket would do.
_LOOKS = 2
#: A smaller bucket is made for this much fewer rows at least, of those computed over the watched steps.
_GAIN = 1 / 32


@dataclass(frozen=True, slots=True, eq=False)
class ShapeBucket:
    """The numbers of rows that one program is compiled for."""

    rows: Rows

    @property
    def requested(self) -> int:
        """Rows of all families that this rank may ask for: what a program's work grows with."""
        return _requested(self.rows)

    def fits(self, needs: Rows) -> bool:
        """Returns whether a step that needs so much can run in it. `needs` may be of some families only."""
        return all(n <= self.rows[k][0] and m <= self.rows[k][1] for k, (n, m) in needs.items())


class ShapeBuckets:
    """The buckets of a step."""

    def __init__(self, first: Rows, limits: Rows) -> None:
        """
        Args:
          first: The smallest bucket. Families that have their limit in it have it in all buckets: what
            a step needs of them isn't known before it is under way.
          limits: What never needs to be exceeded.
        """
        self._limits = limits
        self._varied = [family for family in first if first[family] != limits[family]]
        #: By the rows that may be asked for; the last one is the largest in each.
        self._buckets: list[ShapeBucket] = [ShapeBucket(first)]
        self._grown = -1
        self._looks = 0
        self._watched: list[Rows] = []

    @property
    def least(self) -> ShapeBucket:
        """The smallest bucket."""
        return self._buckets[0]

    def best(self, needs: Rows) -> ShapeBucket | None:
        """Returns the smallest bucket that fits; None if there is none."""
        return next((bucket for bucket in self._buckets if bucket.fits(needs)), None)

    def grow(self, needs: Rows) -> ShapeBucket:
        """Adds a larger bucket, which fits."""
        self._grown += 1
        rows = dict(self._buckets[-1].rows)
        for family, needed in needs.items():
            pairs = zip(needed, rows[family], self._limits[family], strict=True)
            n, m = (max(old, bucket_size(need, limit, self._grown)) for need, old, limit in pairs)
            rows[family] = n, m
        self._add(ShapeBucket(rows))
        self._watched.clear()
        return self._buckets[-1]

    def ran(self, needs: Rows) -> ShapeBucket | None:
        """Counts a step that needed so much. Returns a smaller bucket, where there is one from now on."""
        if self._looks == _LOOKS:
            return None
        self._watched.append(needs)
        if len(self._watched) < _WATCHED:
            return None
        self._looks += 1
        bucket = self._smaller()
        self._watched.clear()
        return bucket

    def drop(self, bucket: ShapeBucket) -> None:
        """Drops a smaller bucket, which saves nothing; there will be no other one."""
        self._buckets.remove(bucket)
        self._looks = _LOOKS

    def _smaller(self) -> ShapeBucket | None:
        """Makes a bucket that would have fitted many of the watched steps, where that saves enough."""
        steps = sorted(self._watched, key=_requested)
        before = sum(self._taken(needs) for needs in steps)
        candidates: list[tuple[int, ShapeBucket]] = []
        for count in range(_WATCHED // 8, _WATCHED, _WATCHED // 8):
            bucket = self._around(steps[:count])
            saved = sum(max(self._taken(n) - bucket.requested, 0) for n in steps if bucket.fits(n))
            candidates.append((saved, bucket))
        saved, bucket = max(candidates, key=lambda pair: pair[0])
        if saved < _GAIN * before:
            return None
        self._add(bucket)
        return bucket

    def _taken(self, needs: Rows) -> int:
        bucket = self.best(needs)
        assert bucket is not None, "the step has run"
        return bucket.requested

    def _around(self, steps: Sequence[Rows]) -> ShapeBucket:
        """Returns a bucket for all these steps, with as many owners' rows as any has: few programs depend on those."""
        rows = dict(self._buckets[-1].rows)
        for family in self._varied:
            n, most = rows[family]
            requested = max(needs[family][1] for needs in steps)
            rows[family] = n, min(most, rounded_size(requested, self._limits[family][1]))
        return ShapeBucket(rows)

    def _add(self, bucket: ShapeBucket) -> None:
        self._buckets = sorted([*self._buckets, bucket], key=lambda r: r.requested)


def _requested(needs: Rows) -> int:
    return sum(requested for _, requested in needs.values())
