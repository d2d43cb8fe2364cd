"""Rows that are fetched beside the step before: the same bits as without, whatever happens between two steps, and what
is sent."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import autopar  # first: it makes the ranks JAX's processes

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar import interrupts
from autopar.backends.global_arrays import place_array
from autopar.backends.host import ranks
from autopar.backends.host.ranks import Ranks
from autopar.backends.host.segmented import SegmentedProgram
from autopar.batches import iterator
from autopar.ir.program import known
from autopar.ir.strategy import OPTIMIZATIONS
from autopar.mpi.buffers import aligned
from autopar.mpi.exchange import divide
from autopar.mpi.machines import exchange
from autopar.run import hosts

HOSTS = ("ps", "hosts")
RANK, RANKS = jax.process_index(), jax.process_count()
ROWS, WIDTH, EXAMPLES, LENGTH = 300, 8, 12, 5


def _by_its_norm(inner: Any) -> Any:
    """Returns an optimizer that makes updates larger where gradients are."""

    def update(updates: Any, state: Any, params: Any = None) -> Any:
        norm = jnp.sqrt(sum(jnp.sum(x**2) for x in jax.tree.leaves(updates)))
        updates, state = inner.update(updates, state, params)
        return jax.tree.map(lambda x: x * (1 + norm), updates), state

    return optax.GradientTransformation(inner.init, update)


#: A table for each.
OPTIMIZERS: Mapping[Any, Any] = {
    "adagrad": optax.adagrad(0.1),
    # Momentum fades within the steps that rows wait, so that rows that are replayed together matter.
    "adamw": optax.adamw(optax.warmup_cosine_decay_schedule(1e-3, 3e-2, 20, 100), b1=0.5, weight_decay=0.1),
    "momentum": optax.sgd(0.1, momentum=0.5),
}
#: Those that move untouched rows by what a step has computed of its gradients.
SURPRISING: Mapping[Any, Any] = {"by its norm": _by_its_norm(optax.adamw(1e-2, weight_decay=0.1))}
#: Optimizers whose tables' rows wait.
WAITING = ("adamw", "momentum")

Batch = Mapping[str, np.ndarray]


def batches(count: int, seed: int = 0) -> Iterator[Batch]:
    """Yields batches of the same few arrays, filled anew each time. Their ids are Zipf distributed, so that many rows
    of one batch are in the next one."""
    rng = np.random.default_rng(seed)
    ids, y = np.empty((EXAMPLES, LENGTH), np.int32), np.empty(EXAMPLES, np.float32)
    for _ in range(count):
        ids[...] = rng.zipf(1.3, ids.shape) % ROWS
        y[...] = rng.normal(size=y.shape)
        yield {"ids": ids, "y": y}


def make(
    *names: str, forward: Callable[[jax.Array], jax.Array] = jnp.tanh, clip: float = 1e9, **options: Any
) -> tuple[Any, Any]:
    """Returns a step with tables on hosts, by these optimizers (Adagrad alone by default), and its first state.

    `clip`: the largest norm of all gradients together."""
    names = names or ("adagrad",)
    by_table = optax.partition({**OPTIMIZERS, **SURPRISING}, {"w": "adagrad", "tables": {name: name for name in names}})
    update = by_table if clip == 1e9 else optax.chain(optax.clip_by_global_norm(clip), by_table)

    @autopar.parallelize(strategy={"params/tables/*": HOSTS}, **options)
    def train_step(state: Any, batch: Any) -> Any:
        def loss_of(params: Any) -> jax.Array:
            # By themselves: owners would add them up.
            rows = jnp.sum(jnp.stack([forward(table[batch["ids"]]) for table in params["tables"].values()]), 0)
            return ((jnp.tanh(rows.mean(1) @ params["w"]).sum(-1) - batch["y"]) ** 2).mean()

        loss, grads = jax.value_and_grad(loss_of)(state["params"])
        updates, slots = update.update(grads, state["slots"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "slots": slots}, loss

    rng = np.random.default_rng(1)
    tables = {name: jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32) for name in names}
    width = jax.eval_shape(forward, tables[names[0]]).shape[-1]
    params = {"w": jnp.asarray(rng.normal(size=(width, WIDTH)), jnp.float32), "tables": tables}
    return train_step, {"params": params, "slots": update.init(params)}


Between = Callable[[int, Any, Any], tuple[Any, Any]]


def train(step: Any, state: Any, given: Iterator[Batch], *, ahead: bool, between: Between | None = None) -> Any:
    """Returns losses and the last state as NumPy arrays; `between` may change state and batch before each step."""
    losses = []
    for k, batch in enumerate(autopar.shard(given, step=step if ahead else None)):
        if between is not None:
            state, batch = between(k, state, batch)
        state, loss = step(state, batch)
        losses.append(np.asarray(loss))
    return losses, jax.tree.map(np.asarray, autopar.materialize(state))


def assert_same_bits(one: Any, other: Any) -> None:
    for a, b in zip(jax.tree.leaves(one), jax.tree.leaves(other), strict=True):
        assert a.tobytes() == b.tobytes(), (a, b)


class Fetches:
    """Counts a rank's calls: fetches of all rows that it asked for, and of those that the step before has written."""

    def __init__(self) -> None:
        self.whole = self.late = 0

    def __enter__(self) -> Fetches:
        def fetching(one: Ranks, *args: Any) -> Any:
            self.whole += 1
            return self._whole(one, *args)

        def fetching_part(one: Ranks, *args: Any) -> Any:
            self.late += 1
            return self._part(one, *args)

        self._whole, self._part = Ranks.fetching, Ranks.fetching_part
        self._patch = mock.patch.multiple(Ranks, fetching=fetching, fetching_part=fetching_part)
        self._patch.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._patch.stop()


def run_both(
    given: Callable[[], Iterator[Batch]],
    between: Callable[[], Between] | None = None,
    *names: str,
    **options: Any,
) -> tuple[Any, Fetches]:
    """Trains with and without rows that are fetched ahead, asserts that the bits are the same, and returns the losses
    and what was fetched with them."""
    results = []
    for ahead in (False, True):
        step, state = make(*names, **options)
        with Fetches() as fetches:
            results.append(train(step, state, given(), ahead=ahead, between=between and between()))
        assert fetches.late == 0 or ahead
    assert_same_bits(*results)
    return results[1][0], fetches


def check_the_bits_are_the_same() -> None:
    """Over steps in which update logs are full four times. Rows are fetched anew then."""
    losses, fetches = run_both(lambda: batches(140), None, *OPTIMIZERS, clip=0.1)
    assert (fetches.whole, fetches.late) == (3 * (1 + 4), 2 * 3 * (140 - 1 - 4))
    assert np.isfinite(losses).all() and losses[-1] != losses[0]


def check_rows_that_wait_are_brought_up_to_date_ahead() -> None:
    """A step finds all of its rows up to date; those that the step before writes are none that go ahead."""

    def pulled(program: Any, equation: Any, step: Any, leaf: Any, route: Any) -> Any:
        results = pull(program, equation, step, leaf, route)
        if leaf.path == "stamps of deferred rows":
            lags.setdefault(threading.current_thread() is not threading.main_thread(), []).append(np.ptp(results[0]))
        return results

    lags, pull = dict[bool, list[int]](), SegmentedProgram._pull
    step, state = make("adamw", clip=0.1)
    with mock.patch.object(SegmentedProgram, "_pull", pulled):
        right = train(step, state, batches(8), ahead=True)
    assert len(lags[False]) == 8 and not any(lags[False])
    assert len(lags[True]) == 7 and all(lags[True][1:]), "rows that were never touched wait alike"
    step, state = make("adamw", clip=0.1)
    with mock.patch.object(SegmentedProgram, "_written", lambda *_: np.zeros(0, np.int32)):
        wrong = train(step, state, batches(8), ahead=True)
    assert np.any(np.array(right[0]) != np.array(wrong[0]))


def check_what_brings_rows_up_to_date_between_two_steps() -> None:
    """An evaluation that reads some rows, and one of all: the rows that went ahead aren't used."""

    def between() -> Between:
        evaluate = autopar.parallelize(lambda params, ids: jnp.tanh(params["tables"]["adamw"][ids]).sum())
        ids = np.arange(EXAMPLES, dtype=np.int32)

        def change(k: int, state: Any, batch: Any) -> tuple[Any, Any]:
            if k == 4:
                evaluate(state["params"], ids)
            if k == 8:
                np.asarray(state["params"]["tables"]["momentum"])
            return state, jax.tree.map(_copied, batch) if k == 11 and RANK == RANKS - 1 else batch

        return change

    _, fetches = run_both(lambda: batches(14), between, *WAITING)
    # Both tables' in the first step, in those after the evaluation and the reading, and where a rank gets another
    # batch, after which nobody knows what follows; and those of the evaluation.
    assert (fetches.whole, fetches.late) == (2 * (1 + 1 + 1 + 2) + 1, 2 * (12 + 9))


def check_entries_that_nobody_expected() -> None:
    """Of a step that moves untouched rows by what it finds out, nothing is used; after three nothing is done ahead."""
    _, fetches = run_both(lambda: batches(9), None, "by its norm")
    assert (fetches.whole, fetches.late) == (9, 3)
    _, fetches = run_both(lambda: batches(9), None, "by its norm", "adagrad")
    assert (fetches.whole, fetches.late) == (9 + 4, 3 * 2 + 5 * 2)


def check_a_step_that_is_not_finite() -> None:
    """It writes something unexpected."""

    def given() -> Iterator[Batch]:
        for k, batch in enumerate(batches(9)):
            yield {**batch, "y": batch["y"] * np.float32(np.inf if k == 4 else 1)}

    losses, fetches = run_both(given, None, "adamw", clip=0.1)
    assert np.isfinite(losses[:4]).all() and not np.isfinite(losses[4:]).any()
    # The tables aren't finite from then on, and neither are gradients: three steps in a row.
    assert (fetches.whole, fetches.late) == (1 + 4, 7 + 4)


def check_rows_that_were_written_are_sent_again() -> None:
    """Otherwise the numbers are others."""
    step, state = make()
    right = train(step, state, batches(8), ahead=False)

    def nothing_is_written(exchange_: Any, requested: Any, written: np.ndarray) -> Any:
        return divide(exchange_, requested, written[:0])

    step, state = make()
    with mock.patch.object(ranks, "divide", nothing_is_written):
        wrong = train(step, state, batches(8), ahead=True)
    assert np.any(np.array(right[0]) != np.array(wrong[0]))


def check_a_source_that_fills_its_arrays_again() -> None:
    """`shard` gives copies: without them ids and labels change after they were read ahead, and numbers are others."""

    def given(*, again: bool) -> Iterator[Batch]:
        rng, shape = np.random.default_rng(2), (16 * RANKS, 16)  # each rank's part of the memory is aligned, too
        ids, y = aligned(shape, np.int32), aligned(shape[:1], np.float32)
        for _ in range(8):
            if not again:
                ids, y = aligned(shape, np.int32), aligned(shape[:1], np.float32)
            ids[...], y[...] = rng.zipf(1.3, shape) % ROWS, rng.normal(size=y.shape)
            yield {"ids": ids, "y": y}

    def trained(*, again: bool) -> Any:
        step, state = make()
        return train(step, state, given(again=again), ahead=True)

    with Fetches() as fetches:
        right = trained(again=True)
    assert fetches.late > 4, "most steps find what was read ahead"
    assert_same_bits(right, trained(again=False))
    shared = mock.patch.object(iterator, "_placed", lambda leaf, along, on: place_array(leaf, on.sharding(along)))
    with shared:
        assert_same_bits(right, trained(again=False))
        wrong = trained(again=True)
    assert np.any(np.array(right[0]) != np.array(wrong[0]))


def check_bytes() -> None:
    """Ids are sent once, ahead, with a bit for each on whether it is written; rows once, ahead unless they are."""
    step, state = make()
    sent = exchange().sent_bytes
    before, found = dict(sent), list[tuple[int, int]]()
    given = [{k: x.copy() for k, x in batch.items()} for batch in batches(6)]
    for batch in autopar.shard(given, step=step):
        state, _ = step(state, batch)
        found.append((sent["ids"] - before["ids"], sent["rows"] - before["rows"]))
        before = dict(sent)
    #: By batch and rank the distinct ids; by batch those of all.
    asked = [[np.unique(ids) for ids in np.split(batch["ids"], RANKS)] for batch in given]
    written = [np.unique(batch["ids"]) for batch in given]
    mine = [[ids[ids % RANKS == RANK] for k, ids in enumerate(each) if k != RANK] for each in asked]
    sizes = list[Any]()
    for k in range(1, len(given) - 1):
        wanted = [np.count_nonzero(asked[k + 1][RANK] % RANKS == r) for r in range(RANKS) if r != RANK]
        flags = sum(-(-ids.size // 8) for ids in mine[k + 1])
        early = sum(ids.size - np.isin(ids, written[k]).sum() for ids in mine[k + 1])
        late = sum(np.isin(ids, written[k - 1]).sum() for ids in mine[k])
        sizes.append((early, late))
        assert found[k] == (sum(4 * (1 + n) for n in wanted) + flags, 4 * WIDTH * (early + late)), (k, found[k])
    assert np.all(np.sum(sizes, 0) > 0), "some are early, some late"
    assert found[-1] == (0, 4 * WIDTH * sum(np.isin(ids, written[-2]).sum() for ids in mine[-1]))


def _copied(array: jax.Array) -> jax.Array:
    parts = [s.data.copy() for s in array.addressable_shards]
    return jax.make_array_from_single_device_arrays(array.shape, array.sharding, parts)


def check_other_batches_than_announced() -> None:
    """One rank gives an equal batch, or all give another one: everything is asked for anew, by all."""

    def between() -> Between:
        first: list[Any] = []

        def change(k: int, state: Any, batch: Any) -> tuple[Any, Any]:
            first.append(batch)
            if k == 3 and RANK == RANKS - 1:
                batch = jax.tree.map(_copied, batch)
            return state, first[0] if k == 7 else batch

        return change

    _, fetches = run_both(lambda: batches(10), between)
    # Of batches that were changed themselves nobody knows what follows: steps 0, 3, 4, 7 and 8 ask.
    assert (fetches.whole, fetches.late) == (5, 12)


def check_what_is_done_between_two_steps() -> None:
    """An evaluation, reading and saving leave rows that were fetched as they are; another step writes to the table."""

    def between() -> Between:
        other, _ = make()
        evaluate = autopar.parallelize(lambda params, ids: jnp.tanh(params["tables"]["adagrad"][ids]).sum())
        ids = np.arange(EXAMPLES, dtype=np.int32)

        def change(k: int, state: Any, batch: Any) -> tuple[Any, Any]:
            if k == 3:
                evaluate(state["params"], ids)
                np.asarray(state["params"]["tables"]["adagrad"])
            if k == 5:
                state = other(state, batch)[0]
            if k == 7:
                state = jax.tree.map(jnp.asarray, autopar.materialize(state))
            return state, batch

        return change

    _, fetches = run_both(lambda: batches(10), between)
    # All rows are fetched in the first step, by the evaluation, by the other step, and after the changes in 5 and 7.
    assert (fetches.whole, fetches.late) == (5, 9 + 7)


def of_other_numbers_of_rows() -> Iterator[Batch]:
    for k, batch in enumerate(batches(9)):
        wide = np.arange(batch["ids"].size, dtype=np.int32).reshape(batch["ids"].shape) * (k % 4 + 1)
        yield {"ids": batch["ids"] % 7 if k % 4 < 2 else wide, "y": batch["y"]}


def check_other_numbers_of_rows() -> None:
    """Rows that fit no program yet are asked for ahead, and fetched where the program is."""
    _, fetches = run_both(of_other_numbers_of_rows)
    found = fetches.whole, fetches.late
    assert found == ((5, 4 + 4) if RANKS == 3 else (7, 2 + 2)), found  # a larger program of three ranks fits earlier


def check_rows_that_owners_compute_with() -> None:
    """What moves to the owners of rows is computed there ahead, too, of rows that were brought up to date as well."""
    for names in (("adagrad",), ("adagrad", "adamw")):
        _, fetches = run_both(
            lambda: batches(8), None, *names, forward=lambda rows: jnp.tanh(rows[..., :4].astype(jnp.bfloat16))
        )
        assert (fetches.whole, fetches.late) == (len(names), len(names) * 2 * 7)


def check_a_loop_that_is_left() -> None:
    """A loop ends in the middle, and another one goes on from its position."""
    results = []
    for ahead in (False, True):
        step, state = make()
        source = list({k: x.copy() for k, x in batch.items()} for batch in batches(12))
        position, losses = None, []
        for end in (5, 12):
            given = autopar.shard(source, step=step if ahead else None)
            if position is not None:
                given.restore(position)
            for batch in given:
                state, loss = step(state, batch)
                losses.append(np.asarray(loss))
                if len(losses) == end:
                    break
            position = given.state()
        assert position is not None and len(losses) == 12
        results.append((losses, jax.tree.map(np.asarray, autopar.materialize(state))))
    assert_same_bits(*results)


def check_interrupts() -> None:
    """Ctrl-C on one rank while ids and rows are under way: whoever goes on, or restores what is saved then, gets the
    bits of a run that nobody interrupts."""
    source = [{k: x.copy() for k, x in batch.items()} for batch in batches(14)]
    step, state = make()
    losses, whole = train(step, state, iter(source), ahead=True)
    folder = Path(os.environ["XDG_CACHE_HOME"]).parent / "interrupted ahead"
    #: In turn: ids that are asked for, rows that are fetched, rows that were written, and between two steps.
    places = ("ask", "fetching_part", "fetching_part", None) * 2
    step, state = make()
    given, found = autopar.shard(source, step=step), list[np.ndarray]()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    with Fetches() as fetches, mock.patch.object(interrupts, "LATE_S", 0.0):
        for k, place in enumerate((*places, "")):
            with contextlib.suppress(KeyboardInterrupt), _interrupted(place, beside=k % 4 < 2, rank=k % RANKS):
                for batch in given:
                    state, loss = step(state, batch)
                    found.append(np.asarray(loss))
                    if place is None:
                        _interrupt(k % RANKS)
            assert len(found) == (k + 1 if place != "" else len(source)), (k, place, len(found))
            autopar.save(folder, state, position=given.state())
            if place is None:
                state, position = autopar.restore(folder, jax.eval_shape(lambda: make()[1]), step=step, batch=source[0])
                given = autopar.shard(source, step=step)
                given.restore(known(position))
    assert_same_bits((found, jax.tree.map(np.asarray, autopar.materialize(state))), (losses, whole))
    assert (fetches.whole, fetches.late) == (1 + 2, len(source) - 1 + len(source) - 1 - 2)


def _interrupt(rank: int) -> None:
    if rank == RANK:
        os.kill(os.getpid(), signal.SIGINT)


@contextlib.contextmanager
def _interrupted(place: str | None, *, beside: bool, rank: int) -> Iterator[None]:
    """Interrupts a rank once, in a call of one of `Ranks`' functions; `beside`: in the thread beside a step."""
    if not place:
        yield
        return
    usual, times = getattr(Ranks, place), [1]

    def call(*args: Any) -> Any:
        if beside == (threading.current_thread() is not threading.main_thread()) and times:
            times.pop()
            _interrupt(rank)
        return usual(*args)

    with mock.patch.object(Ranks, place, call):
        yield


def check_arrays_of_the_batch_with_a_row_for_each() -> None:
    """They are another batch's: rows that are multiplied by them are fetched after the update."""
    results = []
    for ahead in (False, True):
        paths = {"batch/scale": None}

        @autopar.parallelize(strategy={"table": HOSTS}, batch_axis=paths)
        def step(state: Any, batch: Any) -> Any:
            def loss_of(table: jax.Array) -> jax.Array:
                rows = jnp.tanh((table * batch["scale"])[batch["ids"]])
                return ((rows.mean(1).sum(-1) - batch["y"]) ** 2).mean()

            loss, grad = jax.value_and_grad(loss_of)(state["table"])
            return {"table": state["table"] - 0.1 * grad}, loss

        rng = np.random.default_rng(2)
        state = {"table": jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32)}
        given = ({**b, "scale": rng.normal(size=(ROWS, WIDTH)).astype(np.float32)} for b in batches(6))
        losses = []
        for batch in autopar.shard(given, step=step if ahead else None, batch_axis=paths):
            state, loss = step(state, batch)
            losses.append(np.asarray(loss))
        results.append((losses, np.asarray(state["table"])))
    assert_same_bits(*results)


def check_nothing_is_kept_alive() -> None:
    """A loop is left, and its state and batches are let go: a step that was begun keeps neither."""
    step, state = make()
    given = autopar.shard(batches(6), step=step)
    for _ in range(3):
        state, _ = step(state, next(given))
    table, (_, following) = state["params"]["tables"]["adagrad"], given._waiting[0]
    kept = [weakref.ref(table.storage), weakref.ref(following["ids"])]
    del state, given, table, following
    step.latest.runner.ranks.in_thread(lambda: None)()  # until then it may be about to let go of its last work
    gc.collect()
    assert [ref() for ref in kept] == [None, None]


def check_what_is_told() -> None:
    """`explain` names what is fetched ahead, what isn't and why, and what is switched off."""

    def told(optimize: Any, *names: str) -> str:
        step, state = make(*names, optimize=optimize)
        return " ".join(str(autopar.explain(step, state, next(batches(1)))).split())

    text = told("all", "adagrad", "adamw")
    assert "of params/tables/adagrad rows of the next batch are asked for beside a step, by batch/ids as shard" in text
    assert "as shard gives it, and fetched as far as" in text
    assert "as shard gives it, brought up to date by what it is expected to write" in text
    others = [name for name in OPTIMIZATIONS if name != "prefetch"]
    text = told(others)
    assert "Batches of autopar.shard" not in text
    assert "leaves out 'prefetch': with it of params/tables/adagrad rows of the next batch" in text
    _, fetches = run_both(lambda: batches(3), optimize=others)
    assert (fetches.whole, fetches.late) == (3, 0)


#: Ranks of one machine exchange ahead as well: these are cases of what is sent, not of what it takes.
ANYWHERE = mock.patch.object(Ranks, "hides_exchanges", staticmethod(lambda exchange: True))
for _name in [name for name in globals() if name.startswith("check_")]:
    globals()[_name] = ANYWHERE(globals()[_name])


def check_one_machine_does_nothing_ahead() -> None:
    """Its cores would compute and exchange at once."""
    _, fetches = run_both(lambda: batches(3))
    assert (fetches.whole, fetches.late) == (3, 0)
    step, state = make()
    text = " ".join(str(autopar.explain(step, state, next(batches(1)))).split())
    assert "nothing is fetched ahead, as all ranks are on one machine" in text


def check_cpus_of_several_machines_time_exchanges_first() -> None:
    """By the 12th step it is known whether they take enough of the time."""
    unsure = mock.patch.object(Ranks, "hides_exchanges", staticmethod(lambda exchange: None))
    for least, expected in ((0, (12, 2 * 5)), (2, (17, 0))):
        with unsure, mock.patch.multiple(hosts, TIMED=4, LEAST_SHARE=least):
            _, fetches = run_both(lambda: batches(17))
        assert (fetches.whole, fetches.late) == expected
    with unsure:
        step, state = make()
        text = " ".join(str(autopar.explain(step, state, next(batches(1)))).split())
    assert "write them, once exchanges of ids and rows are found to take a sixth of the time" in text
    with unsure, mock.patch.multiple(hosts, TIMED=4, LEAST_SHARE=2):
        for count, told in (
            (3, "exchanges are timed for 9 more steps"),
            (14, "nothing is fetched ahead, exchanges of"),
        ):
            step, state = make()
            for batch in autopar.shard(batches(count), step=step):
                state, _ = step(state, batch)
            assert f"So far: {told}" in " ".join(str(autopar.explain(step, state, next(batches(1)))).split())
