"""The bubble of each schedule on ranks whose stages take equally long, against its formula: sleep-emulated.

`python -m benchmarks bubbles`. Programs are those of a small perceptron, and each task sleeps as long as it is to take:
a machine with fewer cores than ranks can't compute on all of them at once. What is measured is all the rest: the order
of tasks, messages, and how long each rank waits for them, over all ranks' time.
"""

from __future__ import annotations

from benchmarks.served import started

#: Seconds of F, of B without gradients of weights, and of these.
TASK_S = 0.04
STEPS = 5
SCHEDULES = ("gpipe", "1f1b", "zero-bubble")


def formula(schedule: str, stages: int, microbatches: int) -> float:
    """The bubble's share of a step: (S - 1) / (M + S - 1); of H1 (S - 1)(F + B - W) over all (Qi et al., 2023)."""
    if schedule == "zero-bubble":
        return (stages - 1) / (stages - 1 + 3 * microbatches)
    return (stages - 1) / (microbatches + stages - 1)


def bubbles() -> None:
    """Two and four ranks, M = 4, 8 and 16."""
    for ranks in (2, 4):
        with started(f"{ranks} ranks", ranks, "benchmarks.pipelines_ranks") as served:
            for schedule in SCHEDULES:
                for count in (4, 8, 16):
                    times = served("sleep", schedule=schedule, microbatches=count, task_s=TASK_S, count=STEPS)
                    measured = sum(waited for waited, _ in times) / sum(seconds for _, seconds in times)
                    expected = formula(schedule, ranks, count)
                    ratio = f"{measured / expected - 1:+.1%}; sleep-emulated"
                    text = f"{schedule:12s} S = {ranks}, M = {count:2d}: bubble {measured:.1%}, by the formula"
                    print(f"{text} {expected:.1%} ({ratio})", flush=True)
