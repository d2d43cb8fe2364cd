"""Follow the batch through the program: which axis of each value runs over its examples (`ir.batch`).

Inputs that aren't state are global batches, spread along the axis that the user says (`ir.examples`) if the devices
divide it.
"""

from __future__ import annotations

import dataclasses

from autopar.ir.batch import BatchAxes, follow_batch
from autopar.ir.examples import BatchAxis, example_axes
from autopar.ir.program import Program


def analyze_batch(program: Program, *, devices: int, batch_axis: BatchAxis = 0) -> tuple[Program, str]:
    """Fill `program.batch`.

    Args:
      program: An analysed program.
      devices: N; a batch whose size N doesn't divide is not spread.
      batch_axis: Which axis of the batch's leaves runs over its examples.

    Raises:
      ArgumentsError: `batch_axis` doesn't fit the batch.
    """
    pairs = zip(program.block.inputs, program.inputs, strict=True)
    inputs = [(v, given.path) for v, given in pairs if given.role == "batch"]
    found = example_axes(batch_axis, [(path, v.shape) for v, path in inputs])
    if devices == 1:
        return program, "one device"
    starts = {v: axis for (v, _), axis in zip(inputs, found, strict=True) if axis is not None}
    axes: BatchAxes = {v: axis for v, axis in starts.items() if v.shape[axis] and v.shape[axis] % devices == 0}
    count = len(axes)
    follow_batch(program.block.equations, axes)
    note = f"{count} inputs are spread over {devices} devices, and {len(axes) - count} values that follow from them"
    if not count and starts:
        sizes = ", ".join(map(str, sorted({v.shape[axis] for v, axis in starts.items()})))
        note = f"nothing is spread: {devices} devices don't divide the batch ({sizes})"
    return dataclasses.replace(program, batch=axes), note
