"""Workers and servers whose messages arrive at random; what they did is computed again of its timeline."""

from __future__ import annotations

import dataclasses
import functools
import pickle
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from autopar import jax_compat
from autopar.backends.served import ServedPrograms, copied
from autopar.errors import AutoparError, TimelineError
from autopar.ir.program import Block
from autopar.ir.served import ServedStep, ServerPart
from autopar.planning.local_clients import ChooseMessage, LocalJob, RecordedOrder
from autopar.servers.messages import Leave, Message, Pull, Pulled, Push, Reply
from autopar.servers.server import Server
from autopar.servers.timeline import Timeline
from tests.support.served import CLIPPED, batch, compiled, initial, loss, step

WORKERS, SERVERS = 3, 2


@functools.cache
def _programs() -> ServedPrograms:
    known = compiled(step, SERVERS, initial(0), *batch(0))
    return ServedPrograms(known.program, known.analysed)


def _leaves(worker: int, number: int) -> list[Any]:
    return jax.tree.leaves((initial(0), *batch(100 * worker + number)))


def _job(staleness: int | None) -> LocalJob:
    return LocalJob(_programs(), _leaves(0, 0), WORKERS, staleness)


def _random(seed: int) -> ChooseMessage:
    random = np.random.default_rng(seed)
    weights = random.exponential(size=WORKERS) + 0.01  # some workers are slower than others

    def choose(messages: Sequence[tuple[int, Message]]) -> int:
        p = np.array([weights[message.worker] for _, message in messages])
        return int(random.choice(len(messages), p=p / p.sum()))

    return choose


def _timeline(job: LocalJob, staleness: int | None) -> Timeline:
    return Timeline(WORKERS, staleness, [kept.events for kept in job.kept()])


def _state(job: LocalJob) -> dict[int, np.ndarray]:
    return {k: x for kept in job.kept() for k, x in {**kept.leaves, **kept.clocks}.items()}


@pytest.mark.parametrize("staleness", [None, 0, 1, 3])
def test_what_was_done_at_random_follows_from_its_timeline(staleness: int | None) -> None:
    job = _job(staleness)
    done = job.run([5, 3, 4], _leaves, _random(staleness or 7))
    timeline = _timeline(job, staleness)
    again = _job(None)
    same = again.run(timeline.steps, _leaves, RecordedOrder(timeline))
    assert jax.tree.all(jax.tree.map(np.array_equal, (done, _state(job)), (same, _state(again))))


def test_programs_that_travelled_update_in_place_to_the_same_bits() -> None:
    """As a dedicated server runs them; each leaf keeps its buffer."""
    here, leaves = _programs(), _leaves(0, 0)
    pulled = [program(leaves, ids) for program, ids in zip(_pulls(here, leaves), here.ids(leaves), strict=True)]
    pushed, _, _ = here.work(pulled, leaves)
    for n, part in enumerate(here.step.servers):
        update = here.servers[n][1]
        exported = pickle.loads(pickle.dumps(here.exported(n, leaves))).programs()[1]
        clocks = [leaves[k] for k in part.clocks]
        given = [copied(here.step.kept(k, leaves)) for k in part.leaves]
        buffers = [x.unsafe_buffer_pointer() for x in given]
        made = exported(given, clocks, pushed[n])
        theirs = update([copied(here.step.kept(k, leaves)) for k in part.leaves], clocks, pushed[n])
        assert jax.tree.all(jax.tree.map(np.array_equal, made, theirs))
        assert [x.unsafe_buffer_pointer() for x in made[0]] == buffers
        assert all(x.is_deleted() for x in given)


def _pulls(programs: ServedPrograms, leaves: Sequence[Any]) -> list[Any]:
    parts, kept = zip(programs.step.servers, programs.servers, strict=True), programs.step.kept
    return [
        lambda all_, ids, p=part, run=pull: run([kept(k, all_) for k in p.leaves], ids) for part, (pull, _) in parts
    ]


@pytest.mark.parametrize("staleness", [None, 0, 1, 3])
def test_no_order_of_messages_is_a_deadlock(staleness: int | None) -> None:
    programs = _without_compute()
    for seed in range(250):
        random = np.random.default_rng(seed)
        steps = random.integers(1, 7, WORKERS).tolist()
        job = LocalJob(programs, [jnp.zeros(())], WORKERS, staleness)
        job.run(steps, lambda *_: [], _random(seed))
        timeline = _timeline(job, staleness)  # it checks the bound
        assert timeline.steps.tolist() == steps
        if staleness == 0 and len(set(steps)) == 1:
            assert (timeline.staleness < WORKERS).all()


def test_workers_that_wait_for_one_that_is_gone_are_found() -> None:
    job = _job(0)
    order = _random(0)

    def choose(messages: Sequence[tuple[int, Message]]) -> int | None:
        there = [k for k, (_, message) in enumerate(messages) if not isinstance(message, Leave)]
        return there[order([messages[k] for k in there])] if there else None

    with pytest.raises(TimelineError, match="can have come next"):
        job.run([1, 2, 2], _leaves, choose)


def test_messages_have_the_bytes_of_the_plan() -> None:
    job, sent = _job(None), 0

    def counted(server: Server) -> Any:
        def take(message: Message) -> list[tuple[int, Reply]]:
            nonlocal sent
            replies = server.take(message)
            values = message.ids if isinstance(message, Pull) else message.values if isinstance(message, Push) else ()
            sent += sum(x.nbytes for x in values)
            sent += sum(x.nbytes for _, reply in replies if isinstance(reply, Pulled) for x in reply.values)
            return replies

        return SimpleNamespace(take=take)

    job.servers = [counted(server) for server in job.servers]
    job.run([3, 2, 4], _leaves, _random(1))
    plan = compiled(step, SERVERS, initial(0), *batch(0)).plan.served
    assert plan is not None and sent == 9 * plan.sent_bytes


@pytest.mark.parametrize("staleness", [None, 2])
def test_float64_by_the_steps_own_parts(staleness: int | None) -> None:
    with jax_compat.enable_x64():
        start = initial(0, dtype=np.float64)

        def leaves(worker: int, number: int) -> list[Any]:
            return jax.tree.leaves((start, *batch(100 * worker + number, np.float64)))

        known = compiled(step, SERVERS, start, *batch(0, np.float64))
        job = LocalJob(ServedPrograms(known.program, known.analysed), leaves(0, 0), WORKERS, staleness)
        results = job.run([5, 3, 4], leaves, _random(3))
        timeline = _timeline(job, staleness)
        served = known.program.served
        expected, losses = _by_hand(start, timeline, served, lambda w, n: batch(100 * w + n, np.float64))
        assert sorted([*served.homes, *served.clocks]) == [*range(len(expected))]
        assert served.pieces, "a table is kept by all"
        state = served.whole_leaves(_state(job))
        for k, pieces in served.homes.items():
            np.testing.assert_allclose(state[k], expected[k], rtol=0, atol=1e-12, err_msg=f"{k}, {pieces}")
        for w, mine in enumerate(results):
            np.testing.assert_allclose([x for each in mine for x in each.values()], losses[w], rtol=0, atol=1e-12)
        assert timeline.staleness.max() > 0


def _by_hand(start: Any, timeline: Timeline, served: ServedStep, minibatch: Any) -> tuple[list[Any], list[Any]]:
    """The state and each worker's losses, of whole steps of the optimizer on whole states of each server."""

    def leaf(k: int, versions: Sequence[int]) -> Any:
        """What the servers that keep it have at a version of each."""
        pieces = served.homes.get(k, [(0, k)])
        return served.whole_leaves({number: served.kept(number, whole[s][versions[s]]) for s, number in pieces})[k]

    tree = jax.tree.structure(start)
    whole = [[jax.tree.leaves(start)] for _ in timeline.events]  # of each server its versions
    parts = jax.jit(jax.value_and_grad(loss))
    losses: list[list[float]] = [[] for _ in range(timeline.workers)]
    pulls = [{(w, n): v for w, n, v in events.tolist()} for events in timeline.pushes]
    todo = [events[:, :2].tolist() for events in timeline.pushes]
    gradients: dict[tuple[int, int], Any] = {}
    while any(todo):
        for w in range(timeline.workers):
            key = (w, len(losses[w]))
            if key in pulls[0] and all(len(whole[s]) > pulls[s][key] for s in range(SERVERS)):
                pulled = [leaf(k, [versions[key] for versions in pulls]) for k in range(tree.num_leaves)]
                value, gradients[key] = parts(jax.tree.unflatten(tree, pulled)[0], *minibatch(*key))
                losses[w].append(float(value))
        for server, events in enumerate(todo):
            while events and tuple(events[0]) in gradients:
                params, slots = jax.tree.unflatten(tree, whole[server][-1])
                updates, slots = CLIPPED.update(gradients[tuple(events.pop(0))], slots, params)
                whole[server].append(jax.tree.leaves((optax.apply_updates(params, updates), slots)))
    return [leaf(k, [-1] * SERVERS) for k in range(tree.num_leaves)], losses


def _without_compute() -> ServedPrograms:
    """Programs that take no time, of two servers and steps that need both of them."""
    return cast("ServedPrograms", _Nothing(SERVERS))


class _Nothing:
    def __init__(self, servers: int) -> None:
        part = ServerPart((0,), (), Block((), (), ()), (), Block((), (), ()), (), 0, 0, 0)
        self.step = SimpleNamespace(servers=(part,) * servers, clocks=(), kept=lambda k, leaves: leaves[k])
        self.servers = [(lambda leaves, ids: list(leaves), lambda leaves, clocks, pushed: (leaves, clocks))] * servers

    def ids(self, leaves: Any) -> Any:
        return [()] * len(self.servers)

    def work(self, pulled: Any, leaves: Any) -> Any:
        return [()] * len(self.servers), {}, {}


def test_a_timeline_that_cannot_have_been_is_refused() -> None:
    job = _job(1)
    job.run([4, 4, 4], _leaves, _random(1))
    timeline = _timeline(job, 1)
    first = timeline.events[0]
    twice = np.concatenate([first[:3], first[:1], first[3:]])
    with pytest.raises(TimelineError, match="twice"):
        dataclasses.replace(timeline, events=[twice, timeline.events[1]])
    with pytest.raises(TimelineError, match="before an earlier one"):
        dataclasses.replace(timeline, events=[first[::-1], timeline.events[1]])
    with pytest.raises(TimelineError, match="staleness=0"):
        dataclasses.replace(timeline, bound=0)
    with pytest.raises(TimelineError, match="versions"):
        dataclasses.replace(timeline, events=[first + np.array([0, 0, 50]), timeline.events[1]])


def test_a_push_that_is_applied_twice_is_found() -> None:
    job = _job(None)
    server, pushes = job.servers[0], []
    job.run([1, 1, 1], _leaves, _noting(pushes))
    with pytest.raises(AutoparError, match="where 1 is next"):
        server.take(next(push for n, push in pushes if n == 0 and isinstance(push, Push)))


def _noting(seen: list[Any]) -> ChooseMessage:
    def choose(messages: Sequence[tuple[int, Message]]) -> int:
        seen.append(messages[0])
        return 0

    return choose


def test_a_pull_that_sees_half_an_update_is_found() -> None:
    """Server 1 gives what it had before a push that its timeline says it had applied."""
    job = _job(None)
    torn, old = job.servers[1], []
    take = torn.take

    def torn_take(message: Message) -> Any:
        replies = take(message)
        if isinstance(message, Pull):
            ((worker, reply),) = replies
            old.append(reply.values)
            return [(worker, Pulled(reply.version, old[-2 if len(old) > 4 else -1]))]
        return replies

    torn.take = torn_take  # type: ignore[method-assign]
    job.run([3, 3, 3], _leaves, _random(5))
    timeline = _timeline(job, None)
    again = _job(None)
    again.run(timeline.steps, _leaves, RecordedOrder(timeline))
    assert not jax.tree.all(jax.tree.map(np.array_equal, _state(job), _state(again)))
