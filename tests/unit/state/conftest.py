"""Shared by the tests of checkpoints."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from tests.support.object_store import ObjectStore, object_store


@pytest.fixture
def store(environment: Callable[..., None]) -> Iterator[ObjectStore]:
    """A server of objects, whose `watch` may refuse files or have them wait; checkpoints are at s3://bucket/run."""
    with object_store() as server:
        environment(**server.environment)
        yield server
