"""A transformer in four stages on ranks that are bound alike, beside PyTorch's `torch.distributed.pipelining`.

`python -m benchmarks pipelines_systems`; PyTorch is a benchmark-only extra, `bench-torch`. Same weights, batch,
schedule and microbatches; autopar by the same cut, and by its own.
"""

from __future__ import annotations

import importlib.util
import statistics

from benchmarks.served import started

RANKS, LAYERS, MICROBATCHES = 4, 8, 8
STEPS, TURNS = 4, 5


def pipelines_systems(ranks: int = RANKS) -> None:
    """Ratios are medians of turns in one run."""
    if importlib.util.find_spec("torch") is None:
        print("skipped, torch isn't installed: pip install 'autopar[bench-torch]'", flush=True)
        return
    each = LAYERS // ranks
    stages = [[f"0/layers/{k}" for k in range(n * each, (n + 1) * each)] for n in range(ranks)]
    stages[0] += ["0/words", "0/places"]
    stages[-1] += ["0/norm", "0/out"]
    with (
        started("autopar", ranks, "benchmarks.pipelines_ranks") as own,
        started("PyTorch", ranks, "benchmarks.pipelines_torch") as torch,
    ):
        about = {"name": "transformer", "microbatches": MICROBATCHES, "layers": LAYERS}
        own("prepare", system="same cut", schedule="1f1b", stages=stages, **about)
        own("prepare", system="own cut", schedule="1f1b", stages=ranks, **about)
        torch("prepare", layers=LAYERS, microbatches=MICROBATCHES)
        seconds: dict[str, list[float]] = {"PyTorch": [], "same cut": [], "own cut": []}
        losses = {}
        for _ in range(TURNS):
            answers = torch("turn", count=STEPS)
            seconds["PyTorch"].append(max(statistics.median(times) for times, _ in answers))
            losses["PyTorch"] = answers[-1][1]
            for system in ("same cut", "own cut"):
                answers = own("turn", name="transformer", system=system, count=STEPS)
                seconds[system].append(max(statistics.median(times) for times, _ in answers))
                losses[system] = answers[0][1]
    first = losses["PyTorch"]
    assert all(abs(loss - first) < 1e-2 * abs(first) for loss in losses.values()), losses
    for system, times in seconds.items():
        ratios = [a / b for a, b in zip(seconds["PyTorch"], times, strict=True)]
        print(
            f"{system:10s} {1e3 * statistics.median(times):6.0f} ms a step, {statistics.median(ratios):.2f} times "
            f"PyTorch's speed ({LAYERS} layers, {ranks} stages, M = {MICROBATCHES}, 1F1B)",
            flush=True,
        )
