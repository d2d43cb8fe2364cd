"""Log segments: what the full parts of an update log multiply scale-only rows by (`backends.deferred`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from autopar.backends.fading import beside, times
from autopar.ir.deferred import Replay

Array = Any


@dataclass(frozen=True, slots=True)
class Entries:
    """An update log, but for the stamps.

    Attributes:
      now: int32[], where the next step goes: from K to 2 K.
      segment: int32[], how many parts were closed before.
      records: [2 K, ...] each, what the steps wrote down.
      segments: [M] each, what the closed parts multiply scale-only rows by, leaf by leaf (logarithms where near one).
    """

    now: Array
    segment: Array
    records: Sequence[Array]
    segments: Sequence[Array]

    @staticmethod
    def of(replay: Replay, flat: Sequence[Array]) -> Entries:
        """From flat arrays."""
        n = len(replay.records)
        return Entries(flat[0], flat[1], flat[2 : 2 + n], flat[2 + n :])


def close(replay: Replay, entries: Entries) -> tuple[Array, Array, Array, list[Array]]:
    """Whether scale-only rows can't wait any longer; how many of the oldest segments are dropped, to make room; the
    next segment's number; and the segments with this one."""
    none = jnp.zeros((), jnp.int32)
    if replay.scale_only is None:
        return jnp.zeros((), bool), none, none, []
    tables, _, hold = scales(replay, entries)
    is_full = entries.segment >= replay.waiting + replay.dropped
    segments = []
    for known, by in zip(entries.segments, tables, strict=True):
        own = by[entries.segment]  # from this segment on: this part alone
        known = jax.lax.dynamic_update_index_in_dim(known, own, entries.segment, 0)
        segments.append(jnp.where(is_full, jnp.roll(known, -replay.dropped), known))
    dropped = jnp.where(is_full, jnp.int32(replay.dropped), none)
    return ~hold, dropped, entries.segment + 1 - dropped, segments


def scales(replay: Replay, entries: Entries) -> tuple[list[Array], list[Array], Array]:
    """For each scaled leaf [M], by segment, what a row that has waited since then is to be multiplied by.

    Logarithms where factors are near one, and sums of them: a product would round each factor.

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
    """For each scaled leaf [M], by segment, what the closed parts since then multiply a row by (`scales`)."""
    made = []
    scale_only = replay.scale_only
    for known, near_one in zip(segments, scale_only.near_one if scale_only else (), strict=True):
        past = jax.lax.iota(jnp.int32, known.shape[0]) < segment
        together, nothing = (jax.lax.cumsum, 0) if near_one else (jax.lax.cumprod, 1)
        made.append(together(jnp.where(past, known, nothing), reverse=True))
    return made


def multiplied(replay: Replay, changed: Sequence[Array], stamps: Array, scales: Sequence[Array]) -> list[Array]:
    """Rows of which the scale-only ones are multiplied by the scales, [M] for each scaled leaf."""
    changed = list(changed)
    waits = stamps < 0
    since = jnp.where(waits, ~stamps, 0)
    scale_only = replay.scale_only
    leaves = zip(scale_only.scaled, scale_only.near_one, strict=True) if scale_only else ()
    for (k, near_one), scale in zip(leaves, scales, strict=True):
        by = scale.at[since].get(mode="clip")
        changed[k] = jnp.where(beside(waits, changed[k]), times(changed[k], by, near_one), changed[k])
    return changed
