"""The devices' memory and the choice of methods: what must be sharded, and what is said where nothing fits."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.cost.memory import Shardable, choose_sharded, least_devices
from autopar.ir.cluster import STATE_SHARE, Device, Link, state_budget
from autopar.measure.cluster import Cluster
from autopar.planning.plan import elsewhere
from tests.support.settings import set_machine, set_options


@pytest.mark.parametrize(
    ("families", "excess", "expected"),
    [
        ([(10, 1.0)], 0, []),
        ([(10, 5.0), (10, 1.0)], 10, [1]),  # the cheaper one
        ([(100, 5.0), (10, 1.0)], 10, [1]),  # of 100 bytes only 10 count
        ([(100, 5.0), (10, 1.0)], 11, [0]),  # the second is taken first, and given back
        ([(10, 1.0), (10, 1.0), (10, 1.0)], 15, [0, 1]),  # equal ones by their order
        ([(10, 1.0), (20, 4.0)], 99, [0, 1]),  # all, though it isn't enough
        ([(0, -1.0), (20, 4.0)], 5, [1]),  # what saves nothing is left
    ],
)
def test_what_is_sharded(families: list[tuple[int, float]], excess: int, expected: list[int]) -> None:
    assert sorted(choose_sharded([Shardable(*f) for f in families], excess)) == expected


def test_what_is_sharded_is_needed_and_enough() -> None:
    """Nothing of it can be left out, and what some choice reaches is reached."""
    random = np.random.default_rng(0)
    for _ in range(200):
        count = random.integers(1, 6)
        sizes = random.integers(1, 50, count)
        families = [Shardable(int(s), float(c)) for s, c in zip(sizes, random.random(count), strict=True)]
        excess = int(random.integers(1, 100))
        taken = choose_sharded(families, excess)

        def saved(chosen: Sequence[int] | frozenset[int], families: list[Shardable] = families) -> int:
            return sum(families[k].saved for k in chosen)

        if saved(range(count)) < excess:
            assert taken == frozenset(range(count))
            continue
        assert saved(taken) >= excess
        assert all(saved(c) < excess for c in itertools.combinations(taken, len(taken) - 1))


@pytest.mark.parametrize(
    ("whole", "spread", "budget", "expected"),
    [
        (10, [90], 100, 1),
        (10, [90], 40, 3),
        (10, [90], 39, 4),  # 30 at most: 90 / 4 = 22.5
        (0, [10, 10], 7, 4),  # 3 devices have 4 + 4, 4 have 3 + 3
        (100, [], 100, 1),
        (101, [], 100, None),
        (99, [1, 1], 100, None),  # a byte of each, on each device
    ],
)
def test_devices_that_are_enough(whole: int, spread: list[int], budget: int, expected: int | None) -> None:
    assert least_devices(whole, spread, budget) == expected


WIDTH, BIG, SMALL = 64, 4096, 512


def step(state: Any, batch: Any) -> Any:
    def loss(s: Any) -> jax.Array:
        return jnp.mean((s["big"][batch["big"]].sum(1) @ s["w"] + s["small"][batch["small"]].sum(1)) ** 2)

    value, grads = jax.value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), value


def arguments(examples: int = 1024) -> Any:
    shape = jax.ShapeDtypeStruct
    rows = {"big": (BIG, WIDTH), "small": (SMALL, WIDTH), "w": (WIDTH, WIDTH)}
    random = np.random.default_rng(0)
    ids = {k: random.integers(0, rows[k][0], (examples, 8)).astype(np.int32) for k in ("big", "small")}
    return {k: shape(s, jnp.float32) for k, s in rows.items()}, ids


BYTES = {"big": 4 * WIDTH * BIG, "small": 4 * WIDTH * SMALL, "w": 4 * WIDTH * WIDTH}


def cluster_with(state: int) -> Cluster:
    """2 machines of 4 devices on which a state of so many bytes just fits; an exchange is dear by its messages."""
    memory = next(m for m in itertools.count(int(state / STATE_SHARE)) if int(STATE_SHARE * m) >= state)
    device = Device("of chalk", memory, 1e12, 1e12)
    return Cluster("chalk", 2, 4, device, Link(1e-3, 100e9), Link(1e-3, 100e9), 1e9)


def methods_of(cluster: Cluster, **options: Any) -> dict[str, Any]:
    planned = autopar.parallelize(step, **options)
    parameters = elsewhere(planned, cluster).planned_for(*arguments()).compiled.plan.parameters
    return {p.path: p for p in parameters if p.path != "w"}


def test_tables_that_do_not_fit_are_sharded() -> None:
    everything = sum(BYTES.values())
    free = methods_of(cluster_with(everything))
    assert all(p.method in ("allgather", "allreduce_rows", "allreduce") for p in free.values())
    one_less = methods_of(cluster_with(everything - 1))
    changed = [path for path, p in one_less.items() if p.method != free[path].method]
    assert len(changed) == 1 and one_less[changed[0]].method == "ps", "one of them is enough"
    both = methods_of(cluster_with(sum(BYTES.values()) // 7))
    assert {p.method for p in both.values()} == {"ps"}
    for path, p in both.items():
        assert p.seconds == free[path].seconds and set(p.sent) == set(p.seconds), "all methods are told"
        assert f"{free[path].method} would take " in p.reason and "(70% of its memory, for the whole state)" in p.reason


def test_what_it_would_take_is_told_in_bytes() -> None:
    """By hand: with `big` on every device the state is all of it, but for the small table's shard where that is one."""
    found = methods_of(cluster_with(BYTES["big"] + BYTES["w"]))
    assert found["big"].method == "ps" and "would take 1.1 MiB of 1.0 MiB on each device" in found["big"].reason


def test_the_user_has_the_last_word() -> None:
    found = methods_of(cluster_with(1000), strategy={"big": "allgather", "**": "auto"})
    assert (found["big"].method, found["small"].method) == ("allgather", "ps")


@pytest.mark.parametrize(
    ("state", "said"),
    [
        (sum(BYTES.values()), "on each device."),
        # w 16 KiB, and of the tables, 1152 KiB, an eighth: 160 KiB. 48 KiB of them are on 24 devices, rounded up.
        ((64 << 10) + 1, ": 96.0 KiB more than fit beside the model; 6 machines of 4 are enough."),
        (BYTES["w"] - 1, "more devices don't help"),
    ],
)
def test_where_nothing_fits_it_is_told_by_how_much(state: int, said: str) -> None:
    told = autopar.explain(autopar.parallelize(step), *arguments(), cluster=cluster_with(state))
    assert said in told.notes[0]


def test_six_machines_are_enough() -> None:
    cluster = cluster_with((64 << 10) + 1)
    made = autopar.plan(autopar.parallelize(step), *arguments(), cluster=cluster)
    assert (made.state_bytes, state_budget(cluster.device.memory_bytes)) == (160 << 10, (64 << 10) + 1)
    for machines, fits in ((5, False), (6, True)):
        text = autopar.explain(autopar.parallelize(step), *arguments(120 * 8), cluster=cluster.of(machines)).notes[0]
        assert ("more than fit" not in text) == fits, text


def test_one_device_that_is_too_small() -> None:
    """70000 bytes, of which w takes 16384; of the tables, 1179648, no more than 53616 on each."""
    planned = autopar.parallelize(step)
    set_options(planned, may_leave=False)
    set_machine(planned, 100_000)
    told = autopar.explain(planned, *arguments()).notes
    assert "on each device: " in told[0] and "23 devices are enough" in told[0]
