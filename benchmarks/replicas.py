"""Replicas and servers (`sync=`): over slow links, beside the backward pass, in MXNET-MPI's figures, with a slow
worker.

Hosts are network namespaces that share this machine's cores; each rank is bound to one.
"""

from __future__ import annotations

import dataclasses
import statistics
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.network import ENVIRONMENT, hosts, sent_by_interface
from benchmarks.ranks import RANK, SIZE, bind, serve, started

_MODULE = "benchmarks.replicas"
HOSTS, STEPS, EVERY, EVALUATIONS, TASK = 4, 240, 30, 4, "transformer"
RATES = ("10mbit", "100mbit")
SYSTEMS: Mapping[str, Mapping[str, Any] | None] = {
    "data parallelism": None,
    "Average(1)": {},
    f"local SGD, every {EVERY}": {"every": EVERY},
    f"DiLoCo, every {EVERY}": {"every": EVERY, "outer": True},
    f"streaming, every {EVERY}, 3 parts, 5 late": {"every": EVERY, "outer": True, "fragments": 3, "delay": 5},
}


def replicas() -> None:
    """Replicas over slow links against data parallelism: held-out loss by samples and by seconds, and bytes on the
    wire.

    A transformer on 4 hosts at 10 and 100 Mbit/s, each system from the same weights on the same examples. A turn is a
    system after the other, in one run; losses are told after a quarter, a half, ... of the steps.
    """
    for rate in RATES:
        with tempfile.TemporaryDirectory() as folder, hosts(HOSTS, Path(folder), rate=rate) as made:
            options: Any = {"wrapper": made.wrapper, "environment": ENVIRONMENT}
            with started("hosts", HOSTS, _MODULE, **options) as ranks:
                print(f"{TASK}, {HOSTS} hosts at {rate}/s, {STEPS} steps of {HOSTS} x 32 examples:", flush=True)
                for name, sync in SYSTEMS.items():
                    planned = ranks("prepare", task=TASK, sync=sync)[0]
                    seconds, sent, shown = 0.0, 0, []
                    for _ in range(EVALUATIONS):
                        turns = ranks("train", steps=STEPS // EVALUATIONS)
                        seconds += max(own for own, _ in turns)
                        sent += sum(own for _, own in turns)
                        shown.append(f"{ranks('held_out')[0]:.4f} at {seconds:.1f} s")
                    wire = sent / HOSTS / STEPS
                    said = f" ({wire / planned:.2f} of the plan's)" if planned else ""
                    print(f"  {name:42s} {', '.join(shown)}; {wire / 1e3:.1f} kB a step leave a host{said}", flush=True)


# --- means beside the gradient ---

BESIDE: Mapping[str, Mapping[str, Any]] = {
    "alone": {"every": 40},
    "SYNC": {},
    "HYBRID": {"kind": "Hybrid"},
    "DPSGD": {"kind": "DPSGD"},
    "ADPSGD": {"kind": "ADPSGD"},
}


def hybrid(count: int = 2, rate: str = "1gbit", steps: int = 20, turns: int = 3) -> None:
    """HYBRID at 1 Gbit/s: a step with the mean of all weights beside its gradient, against what each takes alone.

    2 hosts (a core each), dense layers of 9 MB, minibatches of several sizes. Computing is a step without a mean,
    communication what a step with a mean behind it (SYNC) takes longer. No step can be shorter than the longer one of
    them (Zhang et al., "Distributed deep learning strategies for automatic speech recognition", section 3.2).
    """
    task = "wide layers"
    with tempfile.TemporaryDirectory() as folder, hosts(count, Path(folder), rate=rate) as made:
        options: Any = {"wrapper": made.wrapper, "environment": {**ENVIRONMENT, "PJRT_NPROC": "2"}}
        with started("hosts", count, _MODULE, **options) as ranks:
            print(f"{task}, {count} hosts at {rate}/s, ms a step:", flush=True)
            for examples in (32, 256, 512):
                found: dict[str, list[float]] = {name: [] for name in BESIDE}
                for _ in range(turns):
                    for name, sync in BESIDE.items():
                        ranks("prepare", task=task, sync=sync, examples=examples)
                        found[name].append(max(s for s, _ in ranks("train", steps=steps)) / steps * 1e3)
                ms = {name: statistics.median(values) for name, values in found.items()}
                longer = max(ms["alone"], ms["SYNC"] - ms["alone"])
                shown = ", ".join(f"{name} {value:.0f}" for name, value in ms.items())
                print(
                    f"  {examples:5d} examples: {shown}; HYBRID is {ms['HYBRID'] / longer:.2f} of the longer part",
                    flush=True,
                )


# --- servers ---

WORKERS, CLIENTS, SERVERS = 6, 2, 2
ELASTIC = {"kind": "Elastic", "interval": 8, "servers": SERVERS}
SERVED: Mapping[str, Mapping[str, Any] | None] = {
    "dist-SGD": {"kind": "kvstore", "servers": SERVERS},
    "mpi-SGD": None,
    "dist-ASGD": {"kind": "Async", "servers": SERVERS},
    "mpi-ASGD": {"kind": "Async", "servers": SERVERS, "clients": CLIENTS},
    "dist-ESGD": {**ELASTIC, "alpha": 0.9 / WORKERS},
    "mpi-ESGD": {**ELASTIC, "alpha": 0.9 / CLIENTS, "clients": CLIENTS},
}


def clients(rate: str = "1gbit", steps: int = 60, evaluations: int = 4) -> None:
    """Six workers, two servers, a dense model, hosts at 1 Gbit/s: synchronous, asynchronous and elastic SGD, with a
    worker a host ("dist-"), and with two workers of three hosts each ("mpi-"): figures 11 to 14 of MXNET-MPI.

    Held-out loss by time, at equal samples: after a quarter, a half, ... of them. Each push of an asynchronous worker
    is an update, so its learning rate is divided by the workers.
    """
    task = "wide layers"
    with tempfile.TemporaryDirectory() as folder, hosts(WORKERS, Path(folder), rate=rate) as made:
        options: Any = {"wrapper": made.wrapper, "environment": ENVIRONMENT}
        with started("hosts", WORKERS, _MODULE, **options) as ranks:
            print(
                f"{task}, {WORKERS} hosts at {rate}/s, {SERVERS} servers, {steps} x {WORKERS} x 32 examples:",
                flush=True,
            )
            for name, sync in SERVED.items():
                ranks("prepare", task=task, sync=sync)
                seconds, shown, sent = 0.0, [], 0
                for _ in range(evaluations):
                    turns = ranks("train", steps=steps // evaluations)
                    seconds += max(own for own, _ in turns)
                    sent += sum(own for _, own in turns)
                    shown.append(f"{ranks('held_out')[0]:.3f} at {seconds:.1f} s")
                print(
                    f"  {name:10s} {seconds / steps * 1e3:6.0f} ms for {WORKERS} x 32 examples, "
                    f"{sent / WORKERS / steps / 1e6:.1f} MB sent by a host; loss {', '.join(shown)}",
                    flush=True,
                )


# --- a slow worker ---

SLOWED: Mapping[str, Mapping[str, Any]] = {
    "Average(), SYNC": {},
    "Async(staleness=4)": {"kind": "Async", "staleness": 4},
    "Async(), unbounded": {"kind": "Async"},
    "Hybrid()": {"kind": "Hybrid"},
    "DPSGD()": {"kind": "DPSGD"},
    "ADPSGD()": {"kind": "ADPSGD"},
}
#: Those that wait for the slowest.
TIED = ("Average(), SYNC", "Hybrid()", "DPSGD()")


def stragglers(workers: int = 4, least_s: float = 0.1, limit_s: float = 12.0, turns: int = 3) -> None:
    """One of four workers slower than the others: minibatches a second of synchronous and asynchronous training.

    Four ranks of one machine, whose steps sleep for most of their time (so that they don't compete for cores), one of
    them 2, 10 and 100 times as long. The unit is what one worker alone does at full speed. With n workers, one of them
    c times slower, no exchange that costs anything and nobody who waits, (n-1) + 1/c is all there is; who waits for the
    slowest has n/c.
    """
    with started("stragglers", workers, _MODULE) as ranks:
        print(
            f"transformer, {workers} workers on one machine, steps of {least_s} s at least (slept), one of them slowed:"
        )
        for factor in (1, 2, 10, 100):
            found: dict[str, list[float]] = {name: [] for name in SLOWED}
            stale: dict[str, list[float]] = {name: [] for name in SLOWED}
            for _ in range(turns):
                for name, sync in SLOWED.items():
                    ranks("prepare", task="transformer", sync=sync)
                    # Who waits for the slowest has few steps in that time: they are counted, not foreseen.
                    limit = max(2, int(limit_s / least_s / factor)) if name in TIED else None
                    each = ranks(
                        "slowed", rank=workers - 1, factor=factor, least_s=least_s, seconds=limit_s, steps=limit
                    )
                    found[name].append(sum(steps / seconds for steps, seconds, _ in each) * least_s)
                    stale[name].append(each[0][2])
            most = workers - 1 + 1 / factor
            print(f"  {factor} times: (n-1) + 1/c = {most:.2f}, n/c = {workers / factor:.2f}", flush=True)
            for name, values in found.items():
                value = statistics.median(values)
                late = statistics.median(stale[name])
                said = f", staleness {late:.2f} on average" if "Async" in name else ""
                bound = workers / factor if name in TIED else most
                print(f"    {name:20s} {value:.2f}, {value / bound:.0%} of its bound{said}", flush=True)


# --- one rank ---

EXAMPLES, HELD_OUT = 32, 2048


class Rank:
    """One rank: a model, and one system's step and state at a time."""

    def prepare(self, task: str, sync: Mapping[str, Any] | None, examples: int = EXAMPLES) -> float:
        """Makes a step and a state, and compiles; returns the bytes that the plan has a client send in a step.

        `sync`: options of `Average` (`outer` being True or left out), or of the `kind` that is said; None: data
        parallelism over all ranks. `examples`: of a rank's minibatch.
        """
        import jax
        import optax

        import autopar
        from benchmarks.spectrain import TASKS, step_of, wide_layers

        self.task = {**TASKS, "wide layers": wide_layers}[task]()
        workers = (sync or {}).get("clients") or SIZE
        if (sync or {}).get("kind") == "Async":
            self.task = dataclasses.replace(self.task, rate=self.task.rate / workers)
        step, make = step_of(self.task)
        # The vocabulary is small, and calibrating takes minutes here.
        options: dict[str, Any] = {"strategy": "allreduce"}
        chosen: dict[str, Any] = {name: value for name, value in (sync or {}).items() if name != "kind"}
        self.is_replica, kind = sync is not None, (sync or {}).get("kind", "Average")
        if kind == "kvstore":
            self.step = by_hand(self.task, **chosen)
        else:
            if sync is not None:
                if sync.get("outer"):
                    chosen["outer"] = optax.sgd(0.7, momentum=0.9, nesterov=True)
                options["sync"] = getattr(autopar.sync, kind)(**chosen)
            self.step = autopar.parallelize(step, **options)
        #: This rank's number among the workers, of which each has a minibatch.
        self.worker = RANK // (SIZE // workers)
        #: How much larger minibatches are, where several ranks have one together.
        self.size = examples * (SIZE // workers)
        state = make(0)
        for k in range(2 * chosen.get("every", chosen.get("interval", 1))):  # a mean is compiled, too
            state, _ = self.step(state, self._batch(-1 - k))
        jax.block_until_ready(autopar.average(state))
        self.state, self.done = make(0), 0
        plan = getattr(self.step, "plan", None)
        known = plan and (plan.sync or plan.served)
        return known.sent_bytes if known else 0.0

    def _batch(self, k: int) -> Any:
        """Makes this rank's own minibatch, or all of them as one batch."""
        workers = [self.worker] if self.is_replica else range(SIZE)
        own = [self._drawn((k + 10**6, worker), self.size) for worker in workers]
        return {name: np.concatenate([batch[name] for batch in own]) for name in own[0]}

    def _drawn(self, seed: Any, count: int) -> dict[str, np.ndarray]:
        x, y = self.task.draw(np.random.default_rng(seed), count)
        return {"x": x, "y": y}

    def train(self, steps: int) -> tuple[float, int]:
        """Takes some steps; returns their seconds, and the bytes that left this host."""
        import jax

        batches = [self._batch(self.done + k) for k in range(steps)]
        before, start = sent_by_interface(), time.perf_counter()
        for batch in batches:
            self.state, metrics = self.step(self.state, batch)
        jax.block_until_ready((self.state, metrics))
        self.done += steps
        return time.perf_counter() - start, sent_by_interface() - before

    def slowed(
        self, rank: int, factor: float, least_s: float, seconds: float, steps: int | None
    ) -> tuple[int, float, float]:
        """Trains for some seconds, or steps, one rank slower; returns steps, seconds, and mean staleness."""
        import jax

        import autopar
        from autopar import testing
        from autopar.launch.group import everyone

        batch, done = self._batch(0), 0
        everyone().gather(b"", "a start")
        start = time.perf_counter()
        with testing.slow(rank, factor, least_s=least_s):
            while done < steps if steps is not None else time.perf_counter() - start < seconds:
                self.state, metrics = self.step(self.state, batch)
                jax.block_until_ready(metrics)
                done += 1
        passed = time.perf_counter() - start
        is_served = self.step.plan.served is not None
        return done, passed, float(autopar.timeline(self.state).staleness.mean()) if is_served else 0.0

    def held_out(self) -> float:
        """Returns the loss of the mean of all replicas on examples that nobody trains on."""
        import jax
        import optax

        import autopar
        from autopar.backends.global_arrays import local

        params = jax.tree.map(local, autopar.average(self.state)[0])
        batch = self._drawn(7, HELD_OUT)
        logits = jax.jit(self.task.logits)(jax.tree.map(np.asarray, params), batch["x"])
        return float(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean())


def by_hand(task: Any, servers: int) -> Any:
    """Makes a step of synchronous momentum SGD by a key-value store: figure 6 of MXNET-MPI, the optimizer on the
    servers."""
    import jax
    import optax

    from autopar import kvstore

    store = kvstore.create("sync", servers=servers)
    names: list[str] = []

    def loss_of(params: Any, batch: Any) -> Any:
        logits = task.logits(params, batch["x"])
        return optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean()

    gradient = jax.jit(jax.value_and_grad(loss_of))

    def step(state: Any, batch: Any) -> Any:
        params, *rest = state
        leaves, tree = jax.tree.flatten(params)
        if not names or rest[-1] is not names:  # a state from the beginning
            keys = [f"{len(names)}.{k}" for k in range(len(leaves))]
            store.init(keys, [np.asarray(x) for x in leaves])
            store.set_optimizer(optax.sgd(task.rate, momentum=0.9), 1 / SIZE)
            names[:] = keys
        loss, gradients = gradient(params, batch)
        store.push(names, jax.tree.leaves(gradients))
        return (jax.tree.unflatten(tree, store.pull(names)), names), {"loss": loss}

    return step


def main(address: str) -> None:
    """Serves the methods of a `Rank`."""
    bind()
    rank = Rank()
    serve(address, RANK, {name: getattr(rank, name) for name in ("prepare", "train", "held_out", "slowed")})


if __name__ == "__main__":
    main(sys.argv[1])
