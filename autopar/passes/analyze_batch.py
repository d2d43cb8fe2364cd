"""Follow the batch through the program: which axis of each value runs over its examples (`ir.batch`).

Inputs that aren't state are global batches: axis 0 of each runs over the examples if its size is that of most of them.
"""

from __future__ import annotations

import dataclasses
from collections import Counter

from autopar.ir.batch import BatchAxes, follow_batch
from autopar.ir.program import Program


def analyze_batch(program: Program, *, devices: int) -> tuple[Program, str]:
    """Fill `program.batch`.

    Args:
      program: An analysed program.
      devices: N; a batch whose size N doesn't divide is not spread.
    """
    if devices == 1:
        return program, "one device"
    inputs = [v for v, given in zip(program.block.inputs, program.inputs, strict=True) if given.role == "batch"]
    sizes = Counter(v.shape[0] for v in inputs if v.shape)
    spread = [n for n in sizes if n % devices == 0 and n > 0]
    axes: BatchAxes = {v: 0 for v in inputs if v.shape and v.shape[0] in spread}
    starts = len(axes)
    follow_batch(program.block.equations, axes)
    note = f"{starts} inputs are spread over {devices} devices, and {len(axes) - starts} values that follow from them"
    if not starts and sizes:
        shown = ", ".join(map(str, sorted(sizes)))
        note = f"nothing is spread: {devices} devices don't divide the batch ({shown})"
    return dataclasses.replace(program, batch=axes), note
