"""One rank of each system that `benchmarks.pipelines` compares.

`mpiexec -n N python -m benchmarks.pipelines_ranks ADDRESS`. N = 1: plain JAX, and the same microbatches one after the
other. More: stages, and data parallelism over the ranks. Each rank is bound to a core.
"""

from __future__ import annotations

import functools
import os
import sys
import time
from typing import Any

import numpy as np

from benchmarks.served import serve

RANK = int(os.environ.get("PMI_RANK", "0"))


def main(address: str) -> None:
    """Serve `prepare` and `turn`."""
    os.sched_setaffinity(0, {RANK % (os.cpu_count() or 1)})
    import jax

    import autopar
    from benchmarks.pipeline_models import MODELS, TX, step_of

    states: dict[tuple[str, str], Any] = {}
    steps: dict[tuple[str, str], Any] = {}

    @functools.cache
    def model(name: str) -> Any:
        return MODELS[name]()

    def prepare(name: str, system: str, microbatches: int) -> float | None:
        """Makes a system's step and state; what its plan predicts, in seconds."""
        loss, make, _ = model(name)
        params = make(jax.random.key(0))
        if system == "plain":
            step: Any = jax.jit(step_of(loss), donate_argnums=0)
        elif system == "microbatches":
            step = autopar.parallelize(step_of(loss), microbatches=microbatches)
        elif system == "data":
            step = autopar.parallelize(step_of(loss), strategy="allreduce", sparse="off")
        else:
            pipeline = autopar.Pipeline(jax.process_count(), system, microbatches, profile=True)
            step = autopar.parallelize(step_of(loss), pipeline=pipeline)
        key = name, system
        steps[key], states[key] = step, (params, TX.init(params))
        turn(name, system, 2)
        plan = getattr(step, "plan", None)
        return plan.pipeline.seconds if plan is not None and plan.pipeline is not None else None

    def turn(name: str, system: str, count: int) -> tuple[list[float], float]:
        """Seconds of the next steps, and the last loss."""
        key, batch, seconds, loss = (name, system), model(name)[2], [], 0.0
        for _ in range(count):
            start = time.perf_counter()
            states[key], value = steps[key](states[key], batch)
            loss = float(np.asarray(value))
            seconds.append(time.perf_counter() - start)
        return seconds, loss

    serve(address, RANK, {"prepare": prepare, "turn": turn})


if __name__ == "__main__":
    main(sys.argv[1])
