"""Shape buckets: the row counts that programs are compiled for, and the choice of a step's program.

A program is compiled for two numbers: of rows that this rank asks for, and of rows that it is asked for. Batches that
don't fit get a larger bucket (`ir.figures.bucket_size`). It is made ahead, to be compiled beside the steps, once a step
has used half of a headroom (`is_near`); ranks that grow at different steps mostly get the same one, so that one of them
compiles it. Values computed once per distinct row are computed for all rows of the bucket: once most steps have needed
far fewer rows, smaller programs are made as well, and each step runs the smallest one that it fits. All of it follows
from the batches alone: a repeated run compiles the same programs, and runs them at the same steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from autopar.ir.figures import bucket_size, coarse_size, rounded_size

#: Family -> (rows of this owner, rows that this rank asks for).
Rows = Mapping[int, tuple[int, int]]

#: Number of latest steps that decide on a smaller bucket, of steps between two of these, and of those that pass while
#: it is compiled: no clock decides which programs a training runs.
_WATCHED = 64
#: Steps between two checks whether a smaller bucket would do.
_LOOKS = 2
#: A smaller bucket must leave out at least this share of the rows computed over the watched steps.
_GAIN = 1 / 32
#: The share of a headroom that a step uses for that a larger bucket is made ahead of need, and the share from which on
#: rows grow along with others.
_NEAR, _ALONG = 1 / 2, 1 / 4


@dataclass(frozen=True, slots=True, eq=False)
class ShapeBucket:
    """The row counts that one program is compiled for."""

    rows: Rows
    is_smaller: bool = False  #: Made for many steps that fit a larger one.

    @property
    def requested(self) -> int:
        """Rows of all families that this rank may ask for, with which a program's work grows."""
        return _requested(self.rows)

    def fits(self, needs: Rows) -> bool:
        """Says whether a step with these needs, perhaps of some families only, can run in it."""
        return all(n <= self.rows[k][0] and m <= self.rows[k][1] for k, (n, m) in needs.items())


class ShapeBuckets:
    """A step's shape buckets, and which of them a batch needs."""

    def __init__(self, first: Rows, limits: Rows) -> None:
        """Begins with the smallest bucket, `first`. Families that have their limit in it have it in all buckets: a
        step's needs of them aren't known before it is under way. `limits` never need to be exceeded."""
        self._limits = limits
        self._varied = [family for family in first if first[family] != limits[family]]
        #: Sorted by the rows that may be asked for; the last one is the largest for each family.
        self._buckets: list[ShapeBucket] = [ShapeBucket(first)]
        self._made_for: dict[int, tuple[int, int]] = {}  #: What the largest one has headroom over, once it has grown.
        self._coming: dict[ShapeBucket, int] = {}  #: Smaller buckets -> steps until one may run in them.
        self._grown = -1
        self._looks = 0
        self._watched: list[Rows] = []

    @property
    def least(self) -> ShapeBucket:
        return self._buckets[0]

    def best(self, needs: Rows) -> ShapeBucket | None:
        """Returns the smallest bucket that fits, if any."""
        return next((b for b in self._buckets if b not in self._coming and b.fits(needs)), None)

    def is_near(self, needs: Rows) -> bool:
        """Says whether a step with these needs has used half of a headroom of the largest bucket."""
        return any(self._used(family, needs[family]) > _NEAR for family in self._made_for if family in needs)

    def grow(self, needs: Rows) -> ShapeBucket:
        """Adds a larger bucket, which fits.

        What has grown before grows from its old size, by few steps: other ranks, whose needs are nearly the same, then
        have the same one, and one of them compiles it.
        """
        self._grown += 1
        rows = dict(self._buckets[-1].rows)
        for family in self._varied:
            if family in needs and (family not in self._made_for or self._used(family, needs[family]) > _ALONG):
                (n, m), largest, limits = needs[family], rows[family], self._limits[family]
                if family in self._made_for:
                    n, m = (coarse_size(max(pair)) for pair in zip((n, m), largest, strict=True))
                self._made_for[family] = n, m
                n, m = (bucket_size(need, limit, self._grown) for need, limit in zip((n, m), limits, strict=True))
                rows[family] = max(n, largest[0]), max(m, largest[1])
        self._add(ShapeBucket(rows))
        self._watched.clear()
        return self._buckets[-1]

    def _used(self, family: int, needed: tuple[int, int]) -> float:
        """Returns the share of the largest bucket's headroom that a step has used, of its numbers of rows the larger
        one."""
        numbers = needed, self._made_for[family], self._buckets[-1].rows[family], self._limits[family]
        of = zip(*numbers, strict=True)
        return max((need - base) / (size - base) if size < limit else 0.0 for need, base, size, limit in of)

    def ran(self, needs: Rows) -> ShapeBucket | None:
        """Counts a step with these needs; returns a smaller bucket if one was made, for steps to come."""
        self._coming = {bucket: left - 1 for bucket, left in self._coming.items() if left > 1}
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
        """Drops a smaller bucket, which saves nothing; no other one will be made."""
        self._buckets.remove(bucket)
        self._coming.pop(bucket, None)
        self._looks = _LOOKS

    def _smaller(self) -> ShapeBucket | None:
        """Makes a bucket for many of the watched steps, if that saves enough."""
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
        self._coming[bucket] = _WATCHED
        return bucket

    def _taken(self, needs: Rows) -> int:
        bucket = self.best(needs)
        assert bucket is not None, "the step has run"
        return bucket.requested

    def _around(self, steps: Sequence[Rows]) -> ShapeBucket:
        """Returns a bucket for all these steps, with as many owners' rows as the largest has: few programs depend on
        those."""
        rows = dict(self._buckets[-1].rows)
        for family in self._varied:
            n, most = rows[family]
            requested = max(needs[family][1] for needs in steps)
            rows[family] = n, min(most, rounded_size(requested, self._limits[family][1]))
        return ShapeBucket(rows, is_smaller=True)

    def _add(self, bucket: ShapeBucket) -> None:
        self._buckets = sorted([*self._buckets, bucket], key=lambda r: r.requested)


def _requested(needs: Rows) -> int:
    return sum(requested for _, requested in needs.values())
