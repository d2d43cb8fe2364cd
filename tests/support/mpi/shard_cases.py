"""What every rank runs in `test_worlds.py`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils

import autopar

RANK, RANKS, COUNT = jax.process_index(), jax.process_count(), jax.device_count()
SIZE = 2 * COUNT  # examples in a global batch
MINE = SIZE // RANKS


def whole(batch: Any) -> Any:
    """A batch of global arrays, on the host."""

    def read(x: Any) -> np.ndarray:
        assert len(x.sharding.device_set) == COUNT
        return np.asarray(multihost_utils.process_allgather(x, tiled=True) if not x.is_fully_replicated else x)

    return jax.tree.map(read, batch)


def raises(match: str, run: Callable[[], Any]) -> None:
    """On every rank."""
    try:
        run()
    except autopar.ArgumentsError as error:
        assert match in str(error), str(error)
        return
    raise AssertionError(f"nothing was raised: {match}")


def stream(sizes: list[int], first: int = 0) -> Iterator[dict[str, Any]]:
    for size in sizes:
        yield {"ids": np.arange(first, first + size), "rate": 0.5}
        first += size


class Recorded:
    """Examples that say which were read."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count, self.first = count, first
        self.read: list[int] = []

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, k: int) -> dict[str, Any]:
        self.read.append(k)
        return {"id": self.first + k, "row": np.full(3, self.first + k, np.float32)}


def check_a_stream_that_is_the_same_everywhere() -> None:
    batches = list(autopar.shard(list(stream([SIZE] * 3)), epochs=2))
    assert len(batches) == 6
    for k, batch in enumerate(batches):
        assert {s.data.shape for s in batch["ids"].addressable_shards} == {(2,)}
        assert batch["rate"].is_fully_replicated and float(batch["rate"]) == 0.5
        np.testing.assert_array_equal(whole(batch)["ids"], np.arange(SIZE) + SIZE * (k % 3))
    uneven = [SIZE, SIZE, SIZE - 1]
    assert len(list(autopar.shard(stream(uneven), last="drop"))) == 2
    *_, padded = autopar.shard(stream(uneven), last="pad")
    np.testing.assert_array_equal(whole(padded)["mask"], np.arange(SIZE) < SIZE - 1)
    raises(f"batch 2 has {SIZE - 1} examples", lambda: list(autopar.shard(stream(uneven))))


def check_a_stream_that_is_not_the_same() -> None:
    raises("the first batch isn't the same on process 1", lambda: next(autopar.shard(stream([SIZE], RANK))))
    later = stream([SIZE] * 4)
    mine = (batch | {"rate": 0.5 + RANK * (k == 2)} for k, batch in enumerate(later))
    raises("batch 2, counted from 0, isn't the same on process 1", lambda: list(autopar.shard(mine)))


def check_examples_are_read_where_they_are_held() -> None:
    source = Recorded(4 * SIZE + 1)
    batches = [whole(b) for b in autopar.shard(source, batch_size=SIZE, last="drop")]
    np.testing.assert_array_equal(np.concatenate([b["id"] for b in batches]), np.arange(4 * SIZE))
    np.testing.assert_array_equal(batches[1]["row"][:, 2], np.arange(SIZE, 2 * SIZE))
    assert source.read == [SIZE * k + RANK * MINE + n for k in range(4) for n in range(MINE)]


def check_shuffled_arrays() -> None:
    data = {"ids": np.arange(3 * SIZE), "rows": np.arange(3 * SIZE)[:, None] * np.ones(2), "scale": np.float32(2)}
    found = [whole(b) for b in autopar.shard(data, batch_size=SIZE, shuffle=3, epochs=2)]
    again = [whole(b) for b in autopar.shard(data, batch_size=SIZE, shuffle=3, epochs=2)]
    epochs = [np.concatenate([b["ids"] for b in found[k : k + 3]]) for k in (0, 3)]
    for order in epochs:
        np.testing.assert_array_equal(np.sort(order), np.arange(3 * SIZE))
    assert not np.array_equal(*epochs)
    jax.tree.map(np.testing.assert_array_equal, found, again)
    assert found[0]["scale"] == 2
    np.testing.assert_array_equal(found[0]["rows"][:, 1], found[0]["ids"])


def check_padded_examples() -> None:
    count = 2 * SIZE - MINE - 1  # the last rank's part of the second batch is padding, of the one before one example
    *_, batch = autopar.shard({"ids": np.arange(count)}, batch_size=SIZE, last="pad")
    found = whole(batch)
    np.testing.assert_array_equal(found["ids"], np.minimum(np.arange(SIZE, 2 * SIZE), count - 1))
    np.testing.assert_array_equal(found["mask"], np.arange(SIZE, 2 * SIZE) < count)
    raises("don't use up equally", lambda: autopar.shard({"ids": np.arange(count)}, batch_size=SIZE))


def check_a_source_of_each_process() -> None:
    batches = [whole(b) for b in autopar.shard(stream([MINE] * 3, 100 * RANK), per_process=True)]
    assert len(batches) == 3
    wanted = np.concatenate([100 * r + MINE + np.arange(MINE) for r in range(RANKS)])
    np.testing.assert_array_equal(batches[1]["ids"], wanted)
    source = Recorded(3 * MINE, 100 * RANK)
    found = [whole(b)["id"] for b in autopar.shard(source, batch_size=SIZE, per_process=True)]
    np.testing.assert_array_equal(found[1], wanted)
    assert source.read == list(range(3 * MINE))


def check_sources_that_end_apart() -> None:
    """Rank k has k + 1 whole batches and one of a smaller size."""
    sizes = [MINE] * (RANK + 1) + [MINE - 1]

    def given() -> Iterator[Any]:
        return stream(sizes, 100 * RANK)

    assert len(list(autopar.shard(given(), per_process=True, last="drop"))) == 1
    raises(f"process 0 has {MINE - 1} examples in batch 1", lambda: list(autopar.shard(given(), per_process=True)))
    padded = [whole(b) for b in autopar.shard(given(), per_process=True, last="pad")]
    assert len(padded) == RANKS + 1
    kept = np.concatenate([b["ids"][b["mask"] > 0] for b in padded])
    wanted = np.concatenate([100 * r + np.arange(MINE * (r + 2) - 1) for r in range(RANKS)])
    np.testing.assert_array_equal(np.sort(kept), wanted)

    lengths = [MINE] * (RANK + 1)
    raises("process 0 has 1 batches, other processes", lambda: list(autopar.shard(stream(lengths), per_process=True)))
    examples = np.arange(sum(sizes)) + 100 * RANK
    options: Any = {"batch_size": SIZE, "per_process": True}
    assert len(list(autopar.shard(examples, last="drop", **options))) == 1
    raises("don't use up equally", lambda: autopar.shard(examples, **options))
    padded = [whole(b) for b in autopar.shard({"ids": examples}, last="pad", **options)]
    kept = np.concatenate([b["ids"][b["mask"] > 0] for b in padded])
    np.testing.assert_array_equal(np.sort(kept), wanted)


def check_time_major_padding() -> None:
    """Weights have no second axis, so every device has all of them."""
    source = [{"ids": np.arange(3 * n).reshape(3, n) + 100 * RANK} for n in (MINE, MINE - 1 + RANK % 2)]
    *_, batch = autopar.shard(source, per_process=True, last="pad", batch_axis=1)
    assert batch["ids"].shape == (3, SIZE) and batch["mask"].is_fully_replicated
    weights = np.concatenate([np.arange(MINE) < MINE - 1 + r % 2 for r in range(RANKS)])
    np.testing.assert_array_equal(np.asarray(batch["mask"]), weights)


def check_parts_that_do_not_fit() -> None:
    rate = [{"ids": np.arange(MINE), "rate": np.float32(RANK)}]
    raises("batch/rate is another one", lambda: list(autopar.shard(rate, per_process=True)))
    width = [{"ids": np.zeros((MINE, RANK + 1))}]
    raises("batch/ids is float64['examples', 2] there", lambda: list(autopar.shard(width, per_process=True)))
    nothing = [{"ids": np.arange(MINE)}] if RANK else []
    raises("process 0 gives no batch", lambda: list(autopar.shard(nothing, per_process=True, last="pad")))
    raises("of which each of", lambda: autopar.shard(np.arange(9), batch_size=RANKS + 1, per_process=True))
    if COUNT > RANKS:
        odd = [{"ids": np.arange(MINE + 1)}]
        raises("the devices must divide it", lambda: list(autopar.shard(odd, per_process=True)))
    sizes = [{"ids": np.arange(MINE + RANK)}] * 3
    told = f"batches of process 0 have {MINE} examples, those of others {MINE + RANKS - 1}"
    raises(told, lambda: list(autopar.shard(sizes, per_process=True, last="drop")))
    raises("are [", lambda: autopar.shard(np.arange(SIZE + RANK), batch_size=SIZE, last="drop"))


def check_positions() -> None:
    """In a new process (a new `shard`) the batches go on with the first one that wasn't given out."""
    data = {"ids": np.arange(3 * SIZE)}
    parts = list(stream([MINE] * 3, 100 * RANK))
    makers: dict[str, Callable[[], Any]] = {
        "examples": lambda: autopar.shard(data, batch_size=SIZE, shuffle=1, epochs=2, ahead=2),
        "stream": lambda: autopar.shard(list(stream([SIZE] * 3)), epochs=2),
        "parts": lambda: autopar.shard(parts, per_process=True, epochs=2),
        "examples of parts": lambda: autopar.shard(
            np.arange(3 * MINE) + 100 * RANK, batch_size=SIZE, shuffle=1, per_process=True, epochs=2
        ),
    }
    for make in makers.values():
        reference = [whole(b) for b in make()]
        for given in (0, 1, 3, 4, 6):
            first = make()
            for _ in range(given):
                next(first)
            state = first.state()
            assert all(isinstance(v, int) for v in state.values())
            second = make()
            second.restore(state)
            rest = [whole(b) for b in second]
            assert len(rest) == 6 - given
            jax.tree.map(np.testing.assert_array_equal, rest, reference[given:])
    one = autopar.shard(data, batch_size=SIZE, shuffle=1)
    other = autopar.shard(data, batch_size=SIZE, shuffle=2)
    raises("with seed=1, and here it is 2", lambda: other.restore(one.state()))
    raises("with sources=1, and here", lambda: makers["parts"]().restore(makers["stream"]().state()))


def check_a_mesh_of_ones_own() -> None:
    """Of this process's devices alone: nobody else takes part."""
    mesh = jax.make_mesh(
        (jax.local_device_count(),), ("data",), (jax.sharding.AxisType.Auto,), devices=jax.local_devices()
    )
    for _ in range(RANK + 1):
        (batch,) = autopar.shard([np.arange(4) + RANK], mesh=mesh, per_process=True)
        np.testing.assert_array_equal(np.asarray(batch), np.arange(4) + RANK)
