"""Weak scaling, in the shape of figures 12 and 13 of the Parallax paper: each host has as much work, however many there
are.

Hosts are network namespaces that share this machine's cores, so that several take longer even if they exchange nothing.
What counts is the throughput over that of as many processes of which each trains a model of its own.
"""

from __future__ import annotations

import contextlib
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.ablation import TASKS, step_of
from benchmarks.network import ENVIRONMENT, hosts, sent_by_interface
from benchmarks.ranks import RANK, SIZE, Ranks, serve, started

COUNTS = (1, 2, 4)


def scaling(rate: str = "10gbit", steps: int = 8, turns: int = 7) -> None:
    """Words a second on 1, 2 and 4 hosts of one rank each, over as many processes that exchange nothing; in turns."""
    for name in TASKS:
        for count in COUNTS:
            with tempfile.TemporaryDirectory() as folder, contextlib.ExitStack() as stack:
                made = stack.enter_context(hosts(count, Path(folder), rate=rate))
                environment = {"PJRT_NPROC": "1", "XDG_CACHE_HOME": folder}
                options: Any = {"environment": {**ENVIRONMENT, **environment}, "wrapper": made.wrapper}
                together = started("together", count, "benchmarks.scaling", **options)
                alone = [started(f"alone {k}", 1, "benchmarks.scaling", environment=environment) for k in range(count)]
                sides = [[stack.enter_context(together)], [stack.enter_context(one) for one in alone]]
                (words, *_) = [_ask(side, "prepare", name=name)[0] for side in sides]
                found: list[list[tuple[float, int]]] = [[], []]
                for _ in range(turns):
                    for side, taken in zip(sides, found, strict=True):
                        answers = _ask(side, "turn", count=steps)
                        taken.append((max(seconds for seconds, _ in answers) / steps, answers[0][1]))
                ms, ms_alone = (1e3 * statistics.median(s for s, _ in side) for side in found)
                ratio = statistics.median(b[0] / a[0] for a, b in zip(*found, strict=True))
                sent = statistics.median(n for _, n in found[0]) / steps / 1e6
                print(
                    f"{name}, {count} hosts at {rate}/s: {1e3 * words * count / ms:8.0f} words/s, {ms:.0f} ms a step, "
                    f"{sent:.2f} MB leave a host; exchanging nothing {ms_alone:.0f} ms: {ratio:.2f} of its throughput",
                    flush=True,
                )


def _ask(side: list[Ranks], command: str, **options: Any) -> list[Any]:
    """Asks the ranks of several jobs at once."""
    for ranks in side:
        ranks.tell(command, **options)
    return [answer for ranks in side for answer in ranks.answers()]


class _Rank:
    """The steps of one rank, whose part of a batch is the same on any number of ranks."""

    def prepare(self, name: str) -> int:
        """Makes the state and takes a few steps; returns the words of the rank's part of a batch."""
        import autopar

        task = TASKS[name](hosts=SIZE)
        step, make = step_of(task)
        options: Any = {"strategy": ("ps", "hosts"), "batch_axis": task.batch_axis}
        self.step = autopar.parallelize(step, **options)
        self.state = autopar.init(make, step=self.step, batch=task.batch(0))
        self.batches = iter(autopar.shard(map(task.batch, range(10**6)), step=self.step, batch_axis=task.batch_axis))
        self.turn(12)
        return task.words // SIZE

    def turn(self, count: int) -> tuple[float, int]:
        """Takes some steps; returns their seconds, and the bytes that left this host."""
        import jax

        before, start = sent_by_interface() or 0, time.perf_counter()
        for _ in range(count):
            self.state, loss = self.step(self.state, next(self.batches))
            float(loss)
        jax.block_until_ready(self.state)
        return time.perf_counter() - start, (sent_by_interface() or 0) - before


def main(address: str) -> None:
    """Runs one rank."""
    rank = _Rank()
    serve(address, RANK, {"prepare": rank.prepare, "turn": rank.turn})


if __name__ == "__main__":
    main(*sys.argv[1:])
