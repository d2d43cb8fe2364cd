"""One rank of each system that `benchmarks.pipelines` compares.

`mpiexec -n N python -m benchmarks.pipelines_ranks ADDRESS`. N = 1: plain JAX, and the same microbatches one after the
other. More: stages, and data parallelism over the ranks. Each rank is bound to a core.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import time
from collections.abc import Mapping
from typing import Any

import numpy as np

from benchmarks.served import serve
from tests.support.mpi.namespaces import sent_by_interface

RANK = int(os.environ.get("PMI_RANK", "0"))


def main(address: str) -> None:
    """Serve the methods of a `Rank`."""
    os.sched_setaffinity(0, {RANK % (os.cpu_count() or 1)})
    rank = Rank()
    commands = ("prepare", "pipeline", "turn", "sent", "sleep", "forget")
    serve(address, RANK, {name: getattr(rank, name) for name in commands})


class Rank:
    """Models, steps and states, by their names."""

    def __init__(self) -> None:
        self.steps: dict[tuple[str, str], Any] = {}
        self.states: dict[tuple[str, str], Any] = {}
        self.models: dict[str, Any] = {}

    def _model(self, name: str, sizes: Mapping[str, int]) -> Any:
        from benchmarks.pipeline_models import MODELS

        if name not in self.models:
            self.models[name] = MODELS[name](**sizes)
        return self.models[name]

    def _begin(self, name: str, system: str, step: Any, make: Any) -> tuple[Any, float | None]:
        """The plan of a pipeline, and the seconds that it predicts."""
        import jax

        from autopar.cost.stage_time import pipeline_seconds
        from benchmarks.pipeline_models import TX

        params = make(jax.random.key(0))
        self.steps[name, system], self.states[name, system] = step, (params, TX.init(params))
        self.turn(name, system, 2)
        plan = getattr(getattr(step, "plan", None), "pipeline", None)
        return plan, None if plan is None else pipeline_seconds(plan)

    def prepare(
        self,
        name: str,
        system: str,
        microbatches: int,
        schedule: str = "",
        stages: Any = None,
        slack: int | None = None,
        **sizes: int,
    ) -> float | None:
        """Makes a system's step and state; what its plan predicts, in seconds. `stages` and `slack`: of a pipeline, and
        `schedule`, where the system isn't named so."""
        import jax

        import autopar
        from autopar.ir.schedule import SCHEDULES, AsynchronousRule
        from benchmarks.pipeline_models import step_of

        loss, make, _ = self._model(name, sizes)
        if system == "plain":
            step: Any = jax.jit(step_of(loss), donate_argnums=0)
        elif system == "microbatches":
            step = autopar.parallelize(step_of(loss), microbatches=microbatches)
        elif system == "data":
            step = autopar.parallelize(step_of(loss), strategy="allreduce", sparse="off")
        else:
            count = jax.process_count() if stages is None else stages
            rule = SCHEDULES[schedule or system]
            given = None if isinstance(rule, AsynchronousRule) else microbatches
            pipeline = autopar.Pipeline(count, rule.name, given, profile=stages is None, slack=slack)
            step = autopar.parallelize(step_of(loss), pipeline=pipeline)
        return self._begin(name, system, step, make)[1]

    def pipeline(self, name: str, system: str, sizes: Mapping[str, int], **options: Any) -> tuple[str, float | None]:
        """Makes a step with `autopar.Pipeline(**options)`; what its plan is, and the seconds that it predicts."""
        import autopar
        from benchmarks.pipeline_models import step_of

        loss, make, _ = self._model(name, sizes)
        step = autopar.parallelize(step_of(loss), pipeline=autopar.Pipeline(**options))
        plan, seconds = self._begin(name, system, step, make)
        return f"{plan.pipeline}, {plan.schedule}, M = {plan.microbatches}{', remat' * plan.remat}", seconds

    def forget(self) -> None:
        """All of them."""
        for each in (self.steps, self.states, self.models):
            each.clear()

    def turn(self, name: str, system: str, count: int) -> tuple[list[float], float]:
        """Seconds of the next steps, and the last loss."""
        key, batch, seconds, loss = (name, system), self.models[name][2], [], 0.0
        for _ in range(count):
            start = time.perf_counter()
            self.states[key], value = self.steps[key](self.states[key], batch)
            loss = 0.0 if value is None else float(np.asarray(value))  # a pipeline that fills
            seconds.append(time.perf_counter() - start)
        return seconds, loss

    def sent(self, name: str, system: str) -> tuple[int, int]:
        """Bytes that this rank's interface sends in a step, and those that all ranks' plan says, if it is in stages."""
        before = self._settled(name, system)
        self.turn(name, system, 3)
        sent = self._settled(name, system) - before
        plan = getattr(self.steps[name, system], "plan", None)
        stages = None if plan is None else plan.pipeline
        planned = 0
        if stages is not None:
            each = sum(stage.ahead_bytes + stage.back_bytes for stage in stages.stages)
            planned = stages.microbatches * each + stages.tied_bytes
        return sent // 3, planned

    def _settled(self, name: str, system: str) -> int:
        """Bytes that this rank's interface has sent, once nothing of a pipeline is on its way."""
        latest = getattr(self.steps[name, system], "latest", None)
        messages = getattr(getattr(latest, "runner", None), "messages", None)
        if messages is not None:
            messages.finish()
            time.sleep(0.2)  # what the kernel has still to send
        return sent_by_interface() or 0

    def sleep(self, schedule: str, microbatches: int, task_s: float, count: int) -> tuple[float, float]:
        """Seconds that this rank waits, and all of them, in steps whose tasks sleep: F, B and W for `task_s` each."""
        import jax

        import autopar
        from benchmarks.pipeline_models import TX, perceptron, step_of

        stages = [[f"0/{k}"] for k in range(jax.process_count())]
        loss, make, batch = perceptron(layers=len(stages), width=8, examples=4 * microbatches)
        step = autopar.parallelize(step_of(loss), pipeline=autopar.Pipeline(stages, schedule, microbatches))
        params = make(jax.random.key(0))
        state, _ = step((params, TX.init(params)), batch)
        runner: Any = step.latest.runner  # a benchmark may look inside
        phases = {program.program.phase for program in runner._executor._programs.values()}
        backward = 2 / len(phases & {"B", "W"})  # the first stage has gradients of weights alone
        tasks = {"F": task_s, "B": backward * task_s, "W": backward * task_s}
        for key, compiled in runner._executor._compiled.items():
            seconds = tasks.get(runner._executor._programs[key[0]].program.phase, 0.0)
            runner._executor._compiled[key] = dataclasses.replace(compiled, run=_sleeping(compiled.run, seconds))
        waiting = runner.messages._waiting = Timed(runner.messages._waiting)
        state, _ = step(state, batch)
        start, waiting.seconds = time.perf_counter(), 0.0
        for _ in range(count):
            state, _ = step(state, batch)
        total = time.perf_counter() - start
        runner.messages._waiting = waiting.before
        return waiting.seconds, total


class Timed:
    """A way to wait that counts the seconds."""

    def __init__(self, before: Any) -> None:
        self.before, self.seconds = before, 0.0

    def finish(self, requests: Any) -> None:
        """Returns when all requests are done."""
        start = time.perf_counter()
        self.before.finish(requests)
        self.seconds += time.perf_counter() - start


def _sleeping(run: Any, seconds: float) -> Any:
    """A program that takes so long: the time that it needs is part of it."""

    def slept(*args: Any) -> Any:
        import jax

        start = time.perf_counter()
        results = jax.block_until_ready(run(*args))
        time.sleep(max(0.0, seconds - (time.perf_counter() - start)))
        return results

    return slept


if __name__ == "__main__":
    main(sys.argv[1])
