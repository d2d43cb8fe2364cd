"""Dense parameters in host memory in one process. Several ranks run the same cases: tests/mpi/test_worlds.py."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import autopar
from tests.support.explained import explained
from tests.support.mpi import dense_cases
from tests.support.mpi.dense_cases import HOSTS, OPTIMIZERS, batch_of, hosted_paths, make_state, step_of


@pytest.mark.parametrize(
    "check",
    [
        dense_cases.check_optimizers,
        dense_cases.check_16_bit_weights,
        dense_cases.check_beside_a_table,
        dense_cases.check_the_state,
        dense_cases.check_what_is_refused,
    ],
    ids=lambda check: check.__name__.removeprefix("check_"),
)
def test_agrees_with_plain_jax(check: Callable[[], None]) -> None:
    check()


def test_explain_says_what_is_pulled_and_pushed() -> None:
    tx = OPTIMIZERS["momentum"]
    text = explained(autopar.parallelize(step_of(tx), strategy={"params/w": HOSTS}), make_state(tx), batch_of(0))
    assert "params/w: pulled whole, ps on hosts: a step pulls 1.7 KiB of it and pushes 1.7 KiB of gradients" in text


def test_one_method_for_the_whole_step_means_tables() -> None:
    """Dense parameters stay on the devices, as they do where a pattern matches a table, too."""
    tx = OPTIMIZERS["sgd"]
    for strategy in (HOSTS, {"**": HOSTS}, {"params/*": HOSTS}):
        state, _ = autopar.parallelize(step_of(tx), strategy=strategy)(make_state(tx), batch_of(0))
        assert hosted_paths(state) == {"params/emb"}, strategy
