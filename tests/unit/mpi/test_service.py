"""A service answers for handlers that are registered, in a process that is alone."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from autopar.mpi.service import Service
from autopar.mpi.world import World


@pytest.fixture
def service() -> Iterator[Service]:
    made = Service(World(0, 1, None))
    yield made
    made.stop()


def test_messages_are_answered_in_their_order(service: Service) -> None:
    seen: list[int] = []

    def handler(message: int) -> list[tuple[int, int]]:
        seen.append(message)
        return [(0, 10 * m) for m in seen] if message % 2 else []  # a reply may come later, and there may be several

    number = service.register(handler)
    other = service.register(lambda message: [(0, -message)])
    for message in (2, 3):
        service.send(number, 0, message)
    service.send(other, 0, 7)
    assert service.receive(other, 0) == -7, "replies of one handler aren't another's"
    assert [service.receive(number, 0) for _ in range(2)] == [20, 30]


def test_a_handler_that_fails_fails_who_asks(service: Service) -> None:
    def handler(message: int) -> list[tuple[int, int]]:
        raise ValueError(message)

    number = service.register(handler)
    with pytest.raises(ValueError, match="4"):
        service.send(number, 0, 4)
    service.send(service.register(lambda message: [(0, message)]), 0, 5)
    assert service.receive(number + 1, 0) == 5


def test_who_has_released_it_asks_no_more(service: Service) -> None:
    number = service.register(lambda message: [])
    service.release(number)
    with pytest.raises(AssertionError, match="released"):
        service.send(number, 0, 1)
