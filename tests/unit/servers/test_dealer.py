"""A dealer gives each minibatch to one worker, and tells each of the others' signals once."""

from __future__ import annotations

import random
import signal

import pytest

from autopar.servers.dealer import Dealer, Dealt, Position, Take

INT, TERM = signal.SIGINT, signal.SIGTERM


def ask(dealer: Dealer, worker: int, *signals: int) -> Dealt:
    ((to, answer),) = dealer.take(Take(worker, signals))
    assert to == worker and isinstance(answer, Dealt)
    return answer


def position(dealer: Dealer, number: int | None = None) -> int:
    ((_, answer),) = dealer.take(Position(0, number))
    assert isinstance(answer, int)
    return answer


@pytest.mark.parametrize("seed", range(5))
def test_each_minibatch_is_one_workers(seed: int) -> None:
    dealer, chosen, dealt, done = Dealer(20, 3), random.Random(seed), [], set()
    while len(done) < 3:
        worker = chosen.choice([w for w in range(3) if w not in done])
        answer = ask(dealer, worker)
        done |= {worker} if answer.number is None else set()
        dealt += [] if answer.number is None else [answer.number]
        assert position(dealer) == len(dealt) and not answer.signals
    assert dealt == [*range(20)]


def test_a_signal_is_told_to_each_worker_once_and_loses_no_minibatch() -> None:
    dealer = Dealer(None, 3)
    assert ask(dealer, 0).number == 0
    assert ask(dealer, 1, INT) == Dealt(None, [INT]), "who has received it is told, too"
    assert ask(dealer, 1).number == 1
    assert ask(dealer, 0, INT, TERM) == Dealt(None, [INT, TERM]), "both at once; INT isn't begun anew"
    assert [ask(dealer, w) for w in (2, 1)] == [Dealt(None, [INT, TERM]), Dealt(None, [TERM])]
    assert [ask(dealer, w).number for w in (0, 1, 2)] == [2, 3, 4]
    assert ask(dealer, 2, INT).signals == [INT], "a later one is another one"


def test_who_has_come_to_the_end_is_told_nothing_more() -> None:
    dealer = Dealer(1, 2)
    assert ask(dealer, 0).number == 0 and ask(dealer, 0).number is None
    assert ask(dealer, 1, INT).signals == [INT] and ask(dealer, 1).number is None
    assert ask(dealer, 0) == Dealt(None, ())


def test_an_epoch_begins_anew_where_it_is_told_to() -> None:
    dealer = Dealer(None, 2)
    ask(dealer, 0)
    ask(dealer, 1, INT)
    assert position(dealer, 7) == 7
    assert ask(dealer, 0) == Dealt(7, ()), "what was untold is forgotten"
