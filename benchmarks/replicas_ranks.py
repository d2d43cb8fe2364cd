"""One rank of the systems that `benchmarks.replicas` compares.

`mpiexec -n N python -m benchmarks.replicas_ranks ADDRESS`.
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

RANK, SIZE = int(os.environ.get("PMI_RANK", "0")), int(os.environ.get("PMI_SIZE", "1"))
EXAMPLES, HELD_OUT = 32, 2048


def main(address: str) -> None:
    """Serve the methods of a `Rank`."""
    os.sched_setaffinity(0, {RANK % (os.cpu_count() or 1)})
    rank = Rank()
    serve(address, RANK, {name: getattr(rank, name) for name in ("prepare", "train", "held_out", "slowed")})


class Rank:
    """A model, and one system's step and state at a time."""

    def prepare(self, task: str, sync: Mapping[str, Any] | None, examples: int = EXAMPLES) -> float:
        """Makes a step and a state, and compiles; returns the bytes that the plan has a client send in a step.

        `sync`: options of `Average` (`outer` being True or left out), or of the `kind` that is said; None: data
        parallelism over all ranks. `examples`: of a rank's minibatch.
        """
        import jax
        import optax

        import autopar
        from benchmarks.staleness import TASKS, step_of, wide_layers

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
        """This rank's own minibatch, or all of them as one batch."""
        workers = [self.worker] if self.is_replica else range(SIZE)
        own = [self._drawn((k + 10**6, worker), self.size) for worker in workers]
        return {name: np.concatenate([batch[name] for batch in own]) for name in own[0]}

    def _drawn(self, seed: Any, count: int) -> dict[str, np.ndarray]:
        x, y = self.task.draw(np.random.default_rng(seed), count)
        return {"x": x, "y": y}

    def train(self, steps: int) -> tuple[float, int]:
        """Goes on for some steps; their seconds, and the bytes that left this host."""
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
        """Trains for some seconds, or steps, one rank slower; how many steps, seconds, and their mean staleness."""
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
        """The loss of the mean of all replicas on examples that nobody trains on."""
        import jax
        import optax

        import autopar
        from autopar.backends.across import local

        params = jax.tree.map(local, autopar.average(self.state)[0])
        batch = self._drawn(7, HELD_OUT)
        logits = jax.jit(self.task.logits)(jax.tree.map(np.asarray, params), batch["x"])
        return float(optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"]).mean())


def by_hand(task: Any, servers: int) -> Any:
    """A step of synchronous momentum SGD by a key-value store: figure 6 of MXNET-MPI, the optimizer on the servers."""
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


if __name__ == "__main__":
    main(sys.argv[1])
