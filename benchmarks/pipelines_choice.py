"""What `Pipeline("auto", "auto", "auto")` chooses, against the fastest of what there is to choose from.

`python -m benchmarks pipelines_choice`. Twelve cases (four models, three sizes) on two ranks that are bound to a core
each; all systems of a case take turns.
"""

from __future__ import annotations

import statistics
from typing import Any

from benchmarks.served import started

RANKS = 2
#: Model -> the sizes of its three cases.
CASES: dict[str, list[dict[str, int]]] = {
    "perceptron": [{"examples": 512}, {"examples": 2048}, {"width": 1024, "examples": 256}],
    "LSTM": [{"examples": 32}, {"examples": 128}, {"layers": 2, "examples": 64, "words": 8000}],
    "transformer": [{"examples": 16}, {"examples": 32}, {"layers": 2, "examples": 16, "words": 8000}],
    "CNN": [{"examples": 32}, {"examples": 128}, {"layers": 4, "channels": 48, "examples": 64}],
}
#: What there is to choose from: one stage of both ranks is data parallelism.
SYSTEMS: dict[str, dict[str, Any]] = {
    "1 stage, M = 2": {"stages": 1, "replicas": 2, "microbatches": 2},
    "1 stage, M = 8": {"stages": 1, "replicas": 2, "microbatches": 8},
    "2 stages, 1f1b, M = 4": {"microbatches": 4},
    "2 stages, 1f1b, M = 16": {"microbatches": 16},
    "2 stages, zero-bubble, M = 4": {"schedule": "zero-bubble", "microbatches": 4},
    "2 stages, zero-bubble, M = 16": {"schedule": "zero-bubble", "microbatches": 16},
}
AUTO: dict[str, Any] = {"stages": "auto", "schedule": "auto", "microbatches": "auto", "remat": "auto"}
STEPS, TURNS = 4, 4


def pipelines_choice() -> None:
    """All cases, and in how many of them the choice is within 10% of the best."""
    near, ratios, predicted = 0, [], []
    with started(f"{RANKS} ranks", RANKS, "benchmarks.pipelines_ranks") as ranks:
        for name, sizes in CASES.items():
            for each in sizes:
                systems = {**SYSTEMS, "auto": {**AUTO, "profile": True}}
                made = {s: ranks("pipeline", name=name, system=s, sizes=each, **o)[0] for s, o in systems.items()}
                times: dict[str, list[float]] = {system: [] for system in systems}
                for _ in range(TURNS):
                    for system in systems:
                        seconds, _ = ranks("turn", name=name, system=system, count=STEPS)[0]
                        times[system].append(statistics.median(seconds[1:]))
                alike = [system for system in SYSTEMS if made[system][0] == made["auto"][0]]
                times["auto"] += [seconds for system in alike for seconds in times.pop(system)]  # the very same plan
                found = {system: statistics.median(seconds) for system, seconds in times.items()}
                best = min(found, key=found.__getitem__)
                ratio = found["auto"] / found[best]
                near, plan = near + (ratio <= 1.1), made["auto"]
                ratios.append(ratio)
                predicted += [seconds / found[system] for system, (_, seconds) in made.items() if system == "auto"]
                print(f"{name} {each}: {1e3 * found['auto']:.1f} ms with {plan[0]} (predicted {1e3 * plan[1]:.1f}); ")
                print(f"  best {best}: {1e3 * found[best]:.1f} ms; {ratio:.2f} times that", flush=True)
                print("  " + "; ".join(f"{system} {1e3 * s:.1f}" for system, s in found.items()), flush=True)
                ranks("forget")
    print(f"{near} of {len(ratios)} within 10% of the best; median {statistics.median(ratios):.2f}")
    print(f"predicted over measured: median {statistics.median(predicted):.2f}", flush=True)
