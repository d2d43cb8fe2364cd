"""Bags that the owners of rows add up, on ranks, beside the same step whose rows travel; both take turns."""

from __future__ import annotations

import functools
import statistics
import sys
import time
from typing import Any

import numpy as np

from benchmarks.ranks import RANK, SIZE, Ranks, bind, serve, started

RANKS, TABLES, ROWS, DIM, EXAMPLES, LENGTH = 4, 8, 100_000, 64, 512, 50
STEPS, TURNS = 6, 7
#: How ids are drawn: the exponent of Zipf's law; None: any row as likely as any other.
DRAWN = {"uniform": None, "Zipf (1.1)": 1.1}
#: "masks": 50 ids an example, of which a mask takes some; "segments": as many ids, in bags of any length.
FORMS = ("masks", "segments")


def bags() -> None:
    """A step with eight tables of 100,000 x 64, 512 examples a rank, an MLP and Adagrad on 4 ranks."""
    with started("bags", RANKS, "benchmarks.bags") as ranks:
        for form in FORMS:
            for name, exponent in DRAWN.items():
                _compare(ranks, form, name, exponent)


def _compare(ranks: Ranks, form: str, name: str, exponent: float | None) -> None:
    sent = ranks("prepare", form=form, exponent=exponent)[0]
    found: dict[bool, list[float]] = {True: [], False: []}
    for _ in range(TURNS):
        for way, taken in found.items():
            taken.append(max(ranks("train", way=way)) / STEPS)
    turns = [b / a for a, b in zip(found[True], found[False], strict=True)]
    ms = [1e3 * statistics.median(found[way]) for way in (True, False)]
    print(
        f"{form}, {name} ids: a rank sends {sent[True] / 2**20:.1f} MiB in place of {sent[False] / 2**20:.1f}; "
        f"{ms[0]:.0f} and {ms[1]:.0f} ms a step: {statistics.median(turns):.2f} times as fast (turns {min(turns):.2f} "
        f"to {max(turns):.2f})",
        flush=True,
    )


class _Rank:
    """The steps of one rank, by whether owners add up bags."""

    def prepare(self, form: str, exponent: float | None) -> dict[bool, int]:
        """Makes both steps and runs them; returns the bytes that a rank sends, as planned."""
        import jax
        import jax.numpy as jnp
        import optax

        import autopar
        from autopar.passes.choosing import families

        examples, optimizer = SIZE * EXAMPLES, optax.adagrad(0.05)

        def pooled(table: Any, batch: Any) -> Any:
            if form == "segments":
                return jax.ops.segment_sum(table[batch["ids"].reshape(-1)], batch["segments"], examples)
            return (table[batch["ids"]] * batch["mask"][..., None]).sum(1)

        def loss(params: Any, batches: Any) -> Any:
            x = jnp.concatenate([pooled(t, b) for t, b in zip(params["tables"], batches, strict=True)], -1)
            return (jnp.tanh(jax.nn.relu(x @ params["in"]) @ params["out"]) ** 2).mean()

        def step(state: Any, batches: Any) -> Any:
            value, gradients = jax.value_and_grad(loss)(state["params"], batches)
            updates, slots = optimizer.update(gradients, state["slots"], state["params"])
            return {"params": optax.apply_updates(state["params"], updates), "slots": slots}, value

        def make() -> Any:
            keys = jax.random.split(jax.random.key(0), TABLES + 2)
            tables = [jax.random.normal(key, (ROWS, DIM)) for key in keys[2:]]
            into = jax.random.normal(keys[0], (TABLES * DIM, 256)) / (TABLES * DIM) ** 0.5
            params = {"tables": tables, "in": into, "out": jax.random.normal(keys[1], (256, 1)) / 16}
            return {"params": params, "slots": optimizer.init(params)}

        rng = np.random.default_rng(0)
        draw = functools.partial(rng.integers, 0, ROWS) if exponent is None else functools.partial(rng.zipf, exponent)

        def one() -> dict[str, np.ndarray]:
            ids = (draw(size=(examples, LENGTH)) % ROWS).astype(np.int32)
            # Examples are behind one another, so that a rank's ids are of its own examples and of few others.
            segments = np.sort(rng.integers(0, examples, examples * LENGTH)).astype(np.int32)
            mask = (np.arange(LENGTH) < rng.integers(1, LENGTH + 1, (examples, 1))).astype(np.float32)
            return {"ids": ids, "segments": segments} if form == "segments" else {"ids": ids, "mask": mask}

        self.batches = [[one() for _ in range(TABLES)] for _ in range(STEPS)]
        self.steps: dict[bool, Any] = {}
        sent, owned = dict[bool, int](), families._owned_bags
        for way in (True, False):
            families._owned_bags = owned if way else lambda *_: ()
            planned = autopar.parallelize(step, strategy={"params/tables/*": ("ps", "hosts")})
            state = autopar.init(make, step=planned, batch=self.batches[0])
            sent[way] = sum(table.sent["ps on hosts"] for table in planned.plan.tables)
            self.steps[way] = planned, state
            self.train(way)
        families._owned_bags = owned
        return sent

    def train(self, way: bool) -> float:
        """Seconds of some steps."""
        import jax

        planned, state = self.steps[way]
        start = time.perf_counter()
        for batch in self.batches:
            state, value = planned(state, batch)
            float(value)
        jax.block_until_ready(state)
        self.steps[way] = planned, state
        return time.perf_counter() - start


def main(address: str) -> None:
    """Serves the steps of one rank at an address."""
    bind()
    rank = _Rank()
    serve(address, RANK, {"prepare": rank.prepare, "train": rank.train})


if __name__ == "__main__":
    main(*sys.argv[1:])
