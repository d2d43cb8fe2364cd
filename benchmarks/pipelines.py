"""Stages of a model on ranks: against one rank and data parallelism, over slow links, against PyTorch; what "auto"
chooses; bubbles.

Each rank is bound to a core. Ratios are medians of turns in one run.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network import ENVIRONMENT, hosts, sent_by_interface
from benchmarks.ranks import RANK, SIZE, Ranks, bind, serve, started

RANKS, MICROBATCHES = 2, 16
ASYNCHRONOUS = ("async", "stash", "spectrain")
#: What a system is that isn't named like its schedule.
OTHERS: Mapping[str, Mapping[str, Any]] = {"no slack": {"schedule": "spectrain", "slack": 0}}
#: Steps of a turn, and those of them that aren't timed. Without a flush a rank may be some steps ahead of another, and
#: finds messages of the turn before: a turn is many times as long as that.
STEPS, FIRST, LONG, FILLED = 5, 1, 20, 8
TURNS = 3
_MODULE = "benchmarks.pipelines"
#: Model -> the sizes of its three cases in `auto`.
CASES: dict[str, list[dict[str, int]]] = {
    "perceptron": [{"examples": 512}, {"examples": 2048}, {"width": 1024, "examples": 256}],
    "LSTM": [{"examples": 32}, {"examples": 128}, {"layers": 2, "examples": 64, "words": 8000}],
    "transformer": [{"examples": 16}, {"examples": 32}, {"layers": 2, "examples": 16, "words": 8000}],
    "CNN": [{"examples": 32}, {"examples": 128}, {"layers": 4, "channels": 48, "examples": 64}],
}


def pipelines(ranks: int = RANKS) -> None:
    """Stages on ranks that are bound to a core each, against one such rank and data parallelism over the ranks.

    A perceptron, an LSTM, a transformer and a CNN: SpecTrain's figure 9 on what there is here (cores as devices).
    """
    with started("one rank", 1, _MODULE) as one, started(f"{ranks} ranks", ranks, _MODULE) as several:
        for name in CASES:
            _compare(name, one, several, ("1f1b", "gpipe", "zero-bubble", *ASYNCHRONOUS))


def network() -> None:
    """The comparison of `pipelines` on 2 and 4 ranks, each on a host of its own (a network namespace) with a link of 1
    Gbit/s; and the bytes that leave each host in a step, beside those of the plan."""
    for ranks in (2, 4):
        with tempfile.TemporaryDirectory() as folder, hosts(ranks, Path(folder), rate="1gbit") as made:
            options: Any = {"wrapper": made.wrapper, "environment": ENVIRONMENT}
            with started("one rank", 1, _MODULE) as one, started("hosts", ranks, _MODULE, **options) as several:
                for name in CASES:
                    _compare(name, one, several, ("1f1b", "gpipe", "zero-bubble", "spectrain", *OTHERS))
                    for system in ("data", "1f1b", "spectrain"):
                        sent = several("sent", name=name, system=system)
                        wire, planned = sum(own for own, _ in sent), sent[0][1]
                        said = f", {wire / planned:.3f} of the plan's {planned / 1e6:.2f} MB" if planned else ""
                        print(f"  {system}: {wire / 1e6:.2f} MB leave the {ranks} hosts in a step{said}", flush=True)


def _compare(name: str, one: Ranks, several: Ranks, schedules: Sequence[str]) -> None:
    systems = {"plain": one, "microbatches": one, "data": several, **dict.fromkeys(schedules, several)}
    predicted = {
        system: ranks("prepare", name=name, system=system, microbatches=MICROBATCHES, **OTHERS.get(system, {}))[0]
        for system, ranks in systems.items()
    }
    without_flush = {*ASYNCHRONOUS, *OTHERS}
    seconds: dict[str, list[float]] = {system: [] for system in systems}
    losses = {}
    for _ in range(TURNS):
        for system, ranks in systems.items():
            count, first = (LONG, FILLED) if system in without_flush else (STEPS, FIRST)
            turns = ranks("turn", name=name, system=system, count=count)
            losses[system] = turns[0][1]
            seconds[system].append(max(statistics.mean(times[first:]) for times, _ in turns))
    first, alike = losses["plain"], {s: loss for s, loss in losses.items() if s not in without_flush}
    assert all(abs(loss - first) < 1e-3 * abs(first) + 1e-5 for loss in alike.values()), losses
    print(f"{name}, {len(several.pids)} ranks, M = {MICROBATCHES}:", flush=True)
    for system, times in seconds.items():
        ratios = [a / b for a, b in zip(seconds["plain"], times, strict=True)]
        parts = [a / b for a, b in zip(seconds["microbatches"], times, strict=True)]
        said = "" if predicted[system] is None else f"; predicted {1e3 * predicted[system]:.0f} ms"
        print(
            f"  {system:12s} {1e3 * statistics.median(times):6.0f} ms; {statistics.median(ratios):.2f} times one rank, "
            f"{statistics.median(parts):.2f} times one rank's microbatches{said}",
            flush=True,
        )


# --- what "auto" chooses ---

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


def auto() -> None:
    """What `Pipeline("auto", "auto", "auto")` chooses, against the fastest of what there is to choose from.

    Twelve cases (four models, three sizes) on two ranks that are bound to a core each; all systems of a case take
    turns.
    """
    near, ratios, predicted = 0, [], []
    with started(f"{RANKS} ranks", RANKS, _MODULE) as ranks:
        for name, sizes in CASES.items():
            for each in sizes:
                systems = {**SYSTEMS, "auto": {**AUTO, "profile": True}}
                made = {s: ranks("pipeline", name=name, system=s, sizes=each, **o)[0] for s, o in systems.items()}
                times: dict[str, list[float]] = {system: [] for system in systems}
                for _ in range(4):
                    for system in systems:
                        seconds, _ = ranks("turn", name=name, system=system, count=4)[0]
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


# --- other systems ---


def systems(ranks: int = 4, layers: int = 8, microbatches: int = 8) -> None:
    """A transformer in four stages on ranks that are bound alike, beside PyTorch's `torch.distributed.pipelining`.

    Same weights, batch, schedule and microbatches; autopar by the same cut, and by its own. PyTorch is a benchmark-only
    extra, `bench-torch`.
    """
    if importlib.util.find_spec("torch") is None:
        print("skipped, torch isn't installed: pip install 'autopar[bench-torch]'", flush=True)
        return
    each = layers // ranks
    stages = [[f"0/layers/{k}" for k in range(n * each, (n + 1) * each)] for n in range(ranks)]
    stages[0] += ["0/words", "0/places"]
    stages[-1] += ["0/norm", "0/out"]
    with (
        started("autopar", ranks, _MODULE) as own,
        started("PyTorch", ranks, _MODULE, "PyTorch") as torch,
    ):
        about = {"name": "transformer", "microbatches": microbatches, "layers": layers}
        own("prepare", system="same cut", schedule="1f1b", stages=stages, **about)
        own("prepare", system="own cut", schedule="1f1b", stages=ranks, **about)
        torch("prepare", layers=layers, microbatches=microbatches)
        seconds: dict[str, list[float]] = {"PyTorch": [], "same cut": [], "own cut": []}
        losses = {}
        for _ in range(5):
            answers = torch("turn", count=4)
            seconds["PyTorch"].append(max(statistics.median(times) for times, _ in answers))
            losses["PyTorch"] = answers[-1][1]
            for system in ("same cut", "own cut"):
                answers = own("turn", name="transformer", system=system, count=4)
                seconds[system].append(max(statistics.median(times) for times, _ in answers))
                losses[system] = answers[0][1]
    first = losses["PyTorch"]
    assert all(abs(loss - first) < 1e-2 * abs(first) for loss in losses.values()), losses
    for system, times in seconds.items():
        ratios = [a / b for a, b in zip(seconds["PyTorch"], times, strict=True)]
        print(
            f"{system:10s} {1e3 * statistics.median(times):6.0f} ms a step, {statistics.median(ratios):.2f} times "
            f"PyTorch's speed ({layers} layers, {ranks} stages, M = {microbatches}, 1F1B)",
            flush=True,
        )


# --- bubbles ---


def formula(schedule: str, stages: int, microbatches: int) -> float:
    """Returns the bubble's share of a step: (S - 1) / (M + S - 1); of H1 (S - 1)(F + B - W) over all (Qi et al.,
    2023)."""
    if schedule == "zero-bubble":
        return (stages - 1) / (stages - 1 + 3 * microbatches)
    return (stages - 1) / (microbatches + stages - 1)


def bubbles() -> None:
    """The bubble of each schedule on ranks whose stages take equally long, against its formula: sleep-emulated.

    Programs are those of a small perceptron, and each task sleeps as long as it is to take: a machine with fewer cores
    than ranks can't compute on all of them at once. What is measured is all the rest: the order of tasks, messages, and
    how long each rank waits for them, over all ranks' time. Two and four ranks, M = 4, 8 and 16; F, B without gradients
    of weights, and these take 40 ms each.
    """
    for ranks in (2, 4):
        with started(f"{ranks} ranks", ranks, _MODULE) as served:
            for schedule in ("gpipe", "1f1b", "zero-bubble"):
                for count in (4, 8, 16):
                    times = served("sleep", schedule=schedule, microbatches=count, task_s=0.04, count=5)
                    measured = sum(waited for waited, _ in times) / sum(seconds for _, seconds in times)
                    expected = formula(schedule, ranks, count)
                    ratio = f"{measured / expected - 1:+.1%}; sleep-emulated"
                    text = f"{schedule:12s} S = {ranks}, M = {count:2d}: bubble {measured:.1%}, by the formula"
                    print(f"{text} {expected:.1%} ({ratio})", flush=True)


# --- one rank ---


class Rank:
    """One rank's models, steps and states, by their names.

    Alone: plain JAX, and the same microbatches one after the other. Of several: stages, and data parallelism.
    """

    def __init__(self) -> None:
        self.steps: dict[tuple[str, str], Any] = {}
        self.states: dict[tuple[str, str], Any] = {}
        self.models: dict[str, Any] = {}

    def _model(self, name: str, sizes: Mapping[str, int]) -> Any:
        from benchmarks.models import PIPELINES

        if name not in self.models:
            self.models[name] = PIPELINES[name](**sizes)
        return self.models[name]

    def _begin(self, name: str, system: str, step: Any, make: Any) -> tuple[Any, float | None]:
        """Returns the plan of a pipeline, and the seconds that it predicts."""
        import jax

        from autopar.cost.stage_time import pipeline_seconds
        from benchmarks.models import TX

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
        """Makes a system's step and state; returns the seconds that its plan predicts. `stages` and `slack`: of a
        pipeline, and `schedule`, where the system isn't named so."""
        import jax

        import autopar
        from autopar.ir.schedule import SCHEDULES, AsynchronousRule
        from benchmarks.models import step_of

        model = self._model(name, sizes)
        if system == "plain":
            step: Any = jax.jit(step_of(model.loss), donate_argnums=0)
        elif system == "microbatches":
            step = autopar.parallelize(step_of(model.loss), microbatches=microbatches)
        elif system == "data":
            step = autopar.parallelize(step_of(model.loss), strategy="allreduce", sparse="off")
        else:
            count = jax.process_count() if stages is None else stages
            rule = SCHEDULES[schedule or system]
            given = None if isinstance(rule, AsynchronousRule) else microbatches
            pipeline = autopar.Pipeline(count, rule.name, given, profile=stages is None, slack=slack)
            step = autopar.parallelize(step_of(model.loss), pipeline=pipeline)
        return self._begin(name, system, step, model.init)[1]

    def pipeline(self, name: str, system: str, sizes: Mapping[str, int], **options: Any) -> tuple[str, float | None]:
        """Makes a step with `autopar.Pipeline(**options)`; returns its plan's text, and the seconds that it
        predicts."""
        import autopar
        from benchmarks.models import step_of

        model = self._model(name, sizes)
        step = autopar.parallelize(step_of(model.loss), pipeline=autopar.Pipeline(**options))
        plan, seconds = self._begin(name, system, step, model.init)
        return f"{plan.pipeline}, {plan.schedule}, M = {plan.microbatches}{', remat' * plan.remat}", seconds

    def forget(self) -> None:
        """Drops all of them."""
        for each in (self.steps, self.states, self.models):
            each.clear()

    def turn(self, name: str, system: str, count: int) -> tuple[list[float], float]:
        """Returns the seconds of the next steps, and the last loss."""
        key, batch, seconds, loss = (name, system), self.models[name].batch(0), [], 0.0
        for _ in range(count):
            start = time.perf_counter()
            self.states[key], value = self.steps[key](self.states[key], batch)
            loss = 0.0 if value is None else float(np.asarray(value))  # a pipeline that fills
            seconds.append(time.perf_counter() - start)
        return seconds, loss

    def sent(self, name: str, system: str) -> tuple[int, int]:
        """Returns the bytes that this rank's interface sends in a step, and those that all ranks' plan says, if it is
        in stages."""
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
        """Returns the bytes that this rank's interface has sent, once nothing of a pipeline is on its way."""
        latest = getattr(self.steps[name, system], "latest", None)
        messages = getattr(getattr(latest, "runner", None), "messages", None)
        if messages is not None:
            messages.finish()
            time.sleep(0.2)  # what the kernel has still to send
        return sent_by_interface() or 0

    def sleep(self, schedule: str, microbatches: int, task_s: float, count: int) -> tuple[float, float]:
        """Returns the seconds that this rank waits, and all of them, in steps whose F, B and W sleep for `task_s`
        each."""
        import jax

        import autopar
        from benchmarks.models import TX, perceptron, step_of

        stages = [[f"0/{k}"] for k in range(jax.process_count())]
        model = perceptron(layers=len(stages), width=8, examples=4 * microbatches)
        step = autopar.parallelize(step_of(model.loss), pipeline=autopar.Pipeline(stages, schedule, microbatches))
        params, batch = model.init(jax.random.key(0)), model.batch(0)
        state, _ = step((params, TX.init(params)), batch)
        runner: Any = step.latest.runner  # a benchmark may look inside
        programs = runner.executor._compiled
        phases = {program.phase for program, _ in programs}
        backward = 2 / len(phases & {"B", "W"})  # the first stage has gradients of weights alone
        tasks = {"F": task_s, "B": backward * task_s, "W": backward * task_s}
        for key, compiled in programs.items():
            seconds = tasks.get(key[0].phase, 0.0)
            programs[key] = dataclasses.replace(compiled, run=_sleeping(compiled.run, seconds))
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


def serve_torch(address: str) -> None:
    """Serves the transformer of `benchmarks.models` by PyTorch: same weights, layers in equal numbers, Adam, "1f1b"."""
    import torch
    import torch.distributed as dist
    from torch import nn
    from torch.distributed.pipelining import PipelineStage, Schedule1F1B

    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{address}.torch", rank=RANK, world_size=SIZE)
    functional = nn.functional

    def norm(x: Any, scale: Any) -> Any:
        x = x - x.mean(-1, keepdim=True)
        return scale * x * torch.rsqrt((x * x).mean(-1, keepdim=True) + 1e-6)

    class Stage(nn.Module):
        """Some layers; the first stage looks words up, the last one computes logits."""

        def __init__(self, params: Any, heads: int) -> None:
            super().__init__()
            self.heads, count = heads, len(params["layers"])
            own = params["layers"][RANK * count // SIZE : (RANK + 1) * count // SIZE]
            self.layers = nn.ModuleList(nn.ParameterDict({k: as_parameter(v) for k, v in p.items()}) for p in own)
            names = ("words", "places") if RANK == 0 else ("norm", "out") if RANK == SIZE - 1 else ()
            self.own = nn.ParameterDict({name: as_parameter(params[name]) for name in names})

        def attend(self, p: Any, x: Any) -> Any:
            b, n, d = x.shape
            q, k, v = (y.reshape(b, n, self.heads, -1).transpose(1, 2) for y in (x @ p["qkv"]).chunk(3, -1))
            y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
            return y.transpose(1, 2).reshape(b, n, d) @ p["o"]

        def forward(self, x: Any) -> Any:
            if RANK == 0:
                x = functional.embedding(x, self.own["words"]) + self.own["places"]
            for p in self.layers:
                x = x + self.attend(p, norm(x, p["norm1"]))
                x = x + functional.gelu(norm(x, p["norm2"]) @ p["up"], approximate="tanh") @ p["down"]
            return norm(x, self.own["norm"]) @ self.own["out"] if RANK == SIZE - 1 else x

    def as_parameter(value: Any) -> Any:
        return nn.Parameter(torch.from_numpy(np.array(value)))

    def loss_of(logits: Any, labels: Any) -> Any:
        return functional.cross_entropy(logits.reshape(-1, logits.shape[-1]), labels.reshape(-1))

    made: dict[str, Any] = {}

    def prepare(layers: int, microbatches: int) -> None:
        """Makes the stage, its optimizer and the schedule."""
        import jax

        from benchmarks.models import transformer

        model = transformer(layers=layers)
        stage = Stage(jax.tree.map(np.asarray, model.init(jax.random.key(0))), heads=4)
        made["optimizer"] = torch.optim.Adam(stage.parameters(), 1e-3)
        made["batch"] = {k: torch.from_numpy(np.array(v, np.int64)) for k, v in model.batch(0).items()}
        pipelined = PipelineStage(stage, RANK, SIZE, torch.device("cpu"))
        made["schedule"] = Schedule1F1B(pipelined, microbatches, loss_of)
        turn(2)

    def turn(count: int) -> tuple[list[float], float]:
        """Returns the seconds of the next steps, and the last loss."""
        seconds, loss = [], 0.0
        for _ in range(count):
            start = time.perf_counter()
            losses: list[Any] = []
            given = (made["batch"]["ids"],) if RANK == 0 else ()
            last = {"target": made["batch"]["labels"], "losses": losses} if RANK == SIZE - 1 else {}
            made["optimizer"].zero_grad()
            made["schedule"].step(*given, **last)
            made["optimizer"].step()
            loss = float(torch.stack(losses).mean()) if losses else 0.0
            seconds.append(time.perf_counter() - start)
        return seconds, loss

    serve(address, RANK, {"prepare": prepare, "turn": turn})


def main(address: str, system: str = "autopar") -> None:
    """Serves one rank of a system."""
    bind()
    if system == "PyTorch":
        serve_torch(address)
    rank = Rank()
    commands = ("prepare", "pipeline", "turn", "sent", "sleep", "forget")
    serve(address, RANK, {name: getattr(rank, name) for name in commands})


if __name__ == "__main__":
    main(*sys.argv[1:])
