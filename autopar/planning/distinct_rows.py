"""What a step with tables on hosts will compute for distinct rows, on batches like one that is known.

A plan is made with shape buckets that no batch exceeds. The runtime makes them for what batches need, and compiles
again when one needs more; only then is it known what is worth computing for distinct rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from autopar.analysis.local import OncePerRow
from autopar.compile import follow
from autopar.ir.sizes import bucket_size
from autopar.measure.alpha import example_ids
from autopar.passes.choosing.capacity import device_ids
from autopar.run.entry import Entry


def once_per_row_of(entry: Entry, leaves: Sequence[Any] | None) -> OncePerRow | None:
    """What a rank will compute for distinct rows; None for nothing, or where the ids aren't known.

    Args:
      entry: Of any step.
      leaves: Its flat arguments, or those that ids depend on.
    """
    program, bound = entry.compiled.analysed, entry.compiled.bound
    sizes: dict[int, tuple[int, int]] = {}
    for space in program.rows.spaces:
        family = bound.family(space.family)
        if family is None or not family.on_hosts or family.bounds.requested is None or not space.accesses:
            continue
        ids = program.ids[space.family]
        flat = example_ids(program, ids, leaves)
        if flat is None:
            return None
        need = max(rows.size for rows in device_ids(flat, ids.batched, bound.devices, space.extent))
        sizes[space.family] = (
            family.bounds.rows // bound.devices,
            bucket_size(need, family.bounds.requested // bound.devices),
        )
    if not sizes:
        return None
    return follow(program, bound.with_sizes(sizes), entry.options).once_per_row
