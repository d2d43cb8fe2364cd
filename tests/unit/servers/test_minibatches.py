"""A server gives each minibatch to one worker, and tells each of the others' signals once."""

from __future__ import annotations

import random
import signal

import pytest

from autopar.batches.on_demand import MinibatchServer, NextMinibatch, Position, Take

INT, TERM = signal.SIGINT, signal.SIGTERM


def ask(server: MinibatchServer, worker: int, *signals: int) -> NextMinibatch:
    ((to, answer),) = server.take(Take(worker, signals))
    assert to == worker and isinstance(answer, NextMinibatch)
    return answer


def position(server: MinibatchServer, number: int | None = None) -> int:
    ((_, answer),) = server.take(Position(0, number))
    assert isinstance(answer, int)
    return answer


@pytest.mark.parametrize("seed", range(5))
def test_each_minibatch_is_one_workers(seed: int) -> None:
    server, chosen, dealt, done = MinibatchServer(20, 3), random.Random(seed), [], set()
    while len(done) < 3:
        worker = chosen.choice([w for w in range(3) if w not in done])
        answer = ask(server, worker)
        done |= {worker} if answer.number is None else set()
        dealt += [] if answer.number is None else [answer.number]
        assert position(server) == len(dealt) and not answer.signals
    assert dealt == [*range(20)]


def test_a_signal_is_told_to_each_worker_once_and_loses_no_minibatch() -> None:
    server = MinibatchServer(None, 3)
    assert ask(server, 0).number == 0
    assert ask(server, 1, INT) == NextMinibatch(None, [INT]), "who has received it is told, too"
    assert ask(server, 1).number == 1
    assert ask(server, 0, INT, TERM) == NextMinibatch(None, [INT, TERM]), "both at once; INT isn't begun anew"
    assert [ask(server, w) for w in (2, 1)] == [NextMinibatch(None, [INT, TERM]), NextMinibatch(None, [TERM])]
    assert [ask(server, w).number for w in (0, 1, 2)] == [2, 3, 4]
    assert ask(server, 2, INT).signals == [INT], "a later one is another one"


def test_who_has_come_to_the_end_is_told_nothing_more() -> None:
    server = MinibatchServer(1, 2)
    assert ask(server, 0).number == 0 and ask(server, 0).number is None
    assert ask(server, 1, INT).signals == [INT] and ask(server, 1).number is None
    assert ask(server, 0) == NextMinibatch(None, ())


def test_an_epoch_begins_anew_where_it_is_told_to() -> None:
    server = MinibatchServer(None, 2)
    ask(server, 0)
    ask(server, 1, INT)
    assert position(server, 7) == 7
    assert ask(server, 0) == NextMinibatch(7, ()), "what was untold is forgotten"
