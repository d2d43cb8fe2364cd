"""Log segments: the factors by which full parts of an update log multiply scale-only rows (`backends.deferred`)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import reduce

import jax
import jax.numpy as jnp

from autopar.ir.deferred import FLOORS, Fading, Replay, ScaleOnly
from autopar.jax_types import Array


@dataclass(frozen=True, slots=True)
class Entries:
    """An update log without the stamps."""

    now: Array  #: int32[], the position of the next step, from K to 2 K.
    segment: Array  #: int32[], how many parts were closed before.
    records: Sequence[Array]  #: [2 K, ...] each, the steps' records.
    #: [M] each, the closed parts' factors of scale-only rows, leaf by leaf (logarithms where near one).
    segments: Sequence[Array]

    @staticmethod
    def of(replay: Replay, flat: Sequence[Array]) -> Entries:
        n = len(replay.records)
        return Entries(flat[0], flat[1], flat[2 : 2 + n], flat[2 + n :])


def close(replay: Replay, entries: Entries) -> tuple[Array, Array, Array, list[Array]]:
    """Closes a part of the update log as a segment.

    Returns:
      Whether scale-only rows can't wait any longer; how many of the oldest segments are dropped, to make room; the next
        segment's number; and the segments with this one.
    """
    none = jnp.zeros((), jnp.int32)
    if replay.scale_only is None:
        return jnp.zeros((), bool), none, none, []
    tables, _, hold = scales(replay, entries)
    is_full = entries.segment >= replay.waiting + replay.dropped
    segments = []
    for known, by in zip(entries.segments, tables, strict=True):
        own = by[entries.segment]  # this part alone
        known = jax.lax.dynamic_update_index_in_dim(known, own, entries.segment, 0)
        segments.append(jnp.where(is_full, jnp.roll(known, -replay.dropped), known))
    dropped = jnp.where(is_full, jnp.int32(replay.dropped), none)
    return ~hold, dropped, entries.segment + 1 - dropped, segments


def scales(replay: Replay, entries: Entries) -> tuple[list[Array], list[Array], Array]:
    """Returns for each scaled leaf [M], by segment, the factor of a row that has waited since then.

    Factors near one are logarithms that are summed, since a product would round each factor.

    Returns:
      With the newer part's steps, without them, and whether the first may be used.
    """
    assert replay.scale_only is not None, "there are scale-only rows"
    *rates, holds = entries.records[len(replay.values) :][: len(replay.scale_only.scaled) + 1]
    step = jax.lax.iota(jnp.int32, replay.length)
    done = (step >= replay.part) & (step < entries.now)
    hold = jnp.all(jnp.where(done, holds, True))
    whole, before_newer = [], closed(replay, entries.segment, entries.segments)
    for rate, before, near_one in zip(rates, before_newer, replay.scale_only.near_one, strict=True):
        if near_one:
            by = before + jnp.sum(jnp.where(done, jnp.log1p(rate), 0))
            hold &= jnp.all(jnp.isfinite(jnp.exp(by)))
        else:
            by = before * jnp.prod(jnp.where(done, rate, 1))
            hold &= jnp.all(jnp.isfinite(by))  # zero times a product that overflows isn't zero
        whole.append(by)
    return whole, before_newer, hold


def closed(replay: Replay, segment: Array, segments: Sequence[Array]) -> list[Array]:
    """Returns for each scaled leaf [M], by segment, the factor of the closed parts since then (`scales`)."""
    made = []
    scale_only = replay.scale_only
    for known, near_one in zip(segments, scale_only.near_one if scale_only else (), strict=True):
        past = jax.lax.iota(jnp.int32, known.shape[0]) < segment
        together, nothing = (jax.lax.cumsum, 0) if near_one else (jax.lax.cumprod, 1)
        made.append(together(jnp.where(past, known, nothing), reverse=True))
    return made


def multiplied(replay: Replay, changed: Sequence[Array], stamps: Array, scales: Sequence[Array]) -> list[Array]:
    """Multiplies scale-only rows by the scales, [M] for each scaled leaf."""
    changed = list(changed)
    waits = stamps < 0
    since = jnp.where(waits, ~stamps, 0)
    scale_only = replay.scale_only
    leaves = zip(scale_only.scaled, scale_only.near_one, strict=True) if scale_only else ()
    for (k, near_one), scale in zip(leaves, scales, strict=True):
        by = scale.at[since].get(mode="clip")
        changed[k] = jnp.where(beside(waits, changed[k]), times(changed[k], by, near_one), changed[k])
    return changed


# --- rows that have faded (`ir.deferred.Fading`), which missed steps only scale ---
#: The most that replaying a row to its end may add to an element, in units of the last place.
_NEGLIGIBLE = 1 / 4


@dataclass(frozen=True, slots=True)
class Suffixes:
    """For each step of an update log, the joint effect of it and those after it on a row. All are [K], except
    reaches."""

    scale_only: ScaleOnly
    fading: Fading
    holds: Array  #: They may be used.
    scales: Sequence[Array]  #: Factor of each scaled leaf (a logarithm where factors are near one).
    fades: Sequence[Array]  #: Factor of each fading leaf.
    sinks: Sequence[Array]  #: Factor of each leaf that may have a floor, or zero if it ever grows.
    #: For each pair, the most times that an element of the fading leaf is added to one of the scaled leaf; by floor,
    #: [K, F].
    reaches: Sequence[Array]

    @staticmethod
    def of(replay: Replay, flat: Sequence[Array]) -> Suffixes:
        scale_only, fading = replay.scale_only, replay.fading
        assert scale_only is not None and fading is not None, "there are rows that fade"
        rest = list(flat[1:])
        counts = len(scale_only.scaled), len(fading.zero), len(fading.floors), len(fading.pairs)
        parts = [[rest.pop(0) for _ in range(count)] for count in counts]
        return Suffixes(scale_only, fading, flat[0], *parts)

    def and_then(self, now: Array, rates: Sequence[Array], holds: Array, numbers: Sequence[Array]) -> list[Array]:
        """Returns the flat arrays with one step more.

        `now`: the number of the step; entries from it on are meaningless before. `rates`, `holds`: the step's factors
        of scale-only rows, and whether they may be used. `numbers`: findings of `analysis.scale_only`: factors of
        fading leaves, and each pair's reaches.
        """
        scale_only, fading = self.scale_only, self.fading
        new = jax.lax.iota(jnp.int32, self.holds.size) >= now
        own, reach = numbers[: len(fading.zero)], numbers[len(fading.zero) :]
        for f in own:
            holds &= jnp.isfinite(f)
        pairs = zip(scale_only.scaled, rates, scale_only.near_one, strict=True)
        by = {leaf: 1 + rate if near_one else rate for leaf, rate, near_one in pairs}
        scales = [
            jnp.where(new, 0, scale) + jnp.log1p(rate) if near_one else jnp.where(new, 1, scale) * rate
            for scale, rate, near_one in zip(self.scales, rates, scale_only.near_one, strict=True)
        ]
        fades = [jnp.where(new, 1, fade) for fade in self.fades]
        # A lower bound of elements sinks by each step's factor; one outside of [0, 1] leaves no bound.
        sinks = [
            jnp.where(new, 1, sink) * jnp.where((by[leaf] >= 0) & (by[leaf] <= 1), by[leaf], 0)
            for leaf, sink in zip(fading.floors, self.sinks, strict=True)
        ]
        reaches = []
        for (leaf, zero), old, more in zip(fading.pairs, self.reaches, reach, strict=True):
            faded = abs(fades[fading.zero.index(zero)]).astype(more.dtype)
            reaches.append(jnp.where(new[:, None], 0, old) * abs(by[leaf]).astype(more.dtype) + faded[:, None] * more)
        fades = [fade * f for fade, f in zip(fades, own, strict=True)]
        return [jnp.where(new, True, self.holds) & holds, *scales, *fades, *sinks, *reaches]

    def ends(self, changed: Sequence[Array], k: Array) -> dict[int, Array]:
        """Returns the sizes of each scaled leaf's elements if the steps from `k` ([] or [B]) on only scale them;
        zero if unknown."""
        sizes = {}
        for leaf, by, near_one in zip(self.scale_only.scaled, self.scales, self.scale_only.near_one, strict=True):
            scale = jnp.where(self.holds[k], abs(jnp.exp(by[k]) if near_one else by[k]), 0)
            along = beside(jnp.broadcast_to(scale, changed[0].shape[:1]), changed[leaf])
            sizes[leaf] = abs(changed[leaf] * along.astype(changed[leaf].dtype))
        return sizes

    def faded(self, changed: Sequence[Array], usual: Mapping[int, Array], k: Array) -> Array:
        """Returns bool[B], the rows ([B, ...] of changed leaves) that the steps from `k` on only scale.

        `changed`: rows after the steps before `k`. `usual`: `ends` of these rows some steps earlier, whose rounding is
        a measure of what is negligible.
        """
        scale_only, fading = self.scale_only, self.fading
        usable = self.holds[k]
        for by in self.fades:
            usable &= jnp.isfinite(by[k])
        ends = self.ends(changed, k)
        by_shape: dict[tuple[int, ...], Array] = {}  # one pass over all leaves of a shape
        for number, leaf in enumerate(changed):
            size = ends[number] if number in ends else abs(leaf)
            sound = (leaf >= 0) & (size < jnp.inf) if number in scale_only.not_negative else size < jnp.inf
            for (x, z), reach in zip(fading.pairs, self.reaches, strict=True):
                if x == number:
                    share = jnp.finfo(leaf.dtype).eps * _NEGLIGIBLE / fading.moving(x)
                    fades = abs(changed[z]).reshape(leaf.shape).astype(leaf.dtype)
                    most = jnp.maximum(size, usual[x]) * share
                    sound &= (fades * self._reach(changed, reach, leaf, k) <= most) & (most < jnp.inf)
            by_shape[leaf.shape] = by_shape[leaf.shape] & sound if leaf.shape in by_shape else sound
        good = jnp.broadcast_to(usable, changed[0].shape[:1])
        for sound in by_shape.values():
            good &= jnp.all(sound, axis=tuple(range(1, sound.ndim)))
        return good

    def _reach(self, changed: Sequence[Array], reach: Array, leaf: Array, k: Array) -> Array:
        """Returns, for each element of a pair's scaled leaf, the reach of the highest floor above which all leaves
        stay."""
        reached = reach[k, 0]
        if self.fading.floors:
            least = [
                changed[x].reshape(leaf.shape) * sink[k] for x, sink in zip(self.fading.floors, self.sinks, strict=True)
            ]
            for number, floor in enumerate(FLOORS[1:], 1):
                reached = jnp.where(reduce(jnp.minimum, least) >= floor, reach[k, number], reached)
        return reached

    def without_fading(self, changed: Sequence[Array], k: Array) -> list[Array]:
        """Returns rows that have faded, after the steps from `k` on."""
        scale_only, fading = self.scale_only, self.fading
        done = list(changed)
        count = changed[0].shape[:1]
        for leaf, by, near_one in zip(scale_only.scaled, self.scales, scale_only.near_one, strict=True):
            done[leaf] = times(changed[leaf], jnp.broadcast_to(by[k], count), near_one)
        for leaf, by in zip(fading.zero, self.fades, strict=True):
            done[leaf] = times(changed[leaf], jnp.broadcast_to(by[k], count), False)
        return done


def beside(flags: Array, rows: Array) -> Array:
    """Reshapes flags [B] so that they broadcast over rows [B, ...]."""
    return flags.reshape(flags.shape[0], *(1,) * (rows.ndim - 1))


def times(rows: Array, by: Array, near_one: bool) -> Array:
    """Multiplies rows by `by` [B], or by e^by without rounding the factor where it is near one."""
    if not near_one:
        return rows * beside(by, rows).astype(rows.dtype)
    small = by < -0.5
    kept, more = jnp.where(small, 0, 1), jnp.where(small, jnp.exp(by), jnp.expm1(by))
    return rows * beside(kept, rows).astype(rows.dtype) + rows * beside(more, rows).astype(rows.dtype)
