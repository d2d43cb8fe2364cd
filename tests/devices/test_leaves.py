"""Each kind of leaf is read, copied and pickled like an array, and no later step changes what was made of it."""

from __future__ import annotations

import copy
import functools
import pickle
from collections import Counter
from pathlib import Path
from typing import Any

import flax.serialization
import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from tests.support import leaves_page
from tests.support.leaves_page import OPERATIONS, Case

_PAGE = Path(__file__).parents[2] / "docs" / "leaves.md"
KINDS = ("Table", "TablePart", "DeferredTable", "HostTable", "StageArray", "PendingArray", "Replica", "ServedLeaf")


@functools.cache
def _cases() -> dict[str, Case]:
    return leaves_page.cases()


def _arrays(state: Any) -> list[np.ndarray]:
    return [np.array(x) for x in jax.tree.leaves(state)]


def _same(some: Any, others: Any, rtol: float = 1e-5) -> None:
    for a, b in zip(_arrays(some), _arrays(others), strict=True):
        np.testing.assert_allclose(a, b, rtol=rtol, atol=1e-6)


def test_the_page_is_what_is_generated() -> None:
    assert leaves_page.page() == _PAGE.read_text(), "python -m tests.support.leaves_page > docs/leaves.md"


def test_there_is_a_case_for_every_kind() -> None:
    kinds = [type(case.state()[0]["e"]).__name__ for case in _cases().values()]
    assert kinds == [*_cases()] == [*KINDS]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_made_of_a_leaf_stays_and_the_training_goes_on(kind: str) -> None:
    case = _cases()[kind]
    state, twin = case.state(), autopar.drain(case.state())
    leaf = state[0]["e"]
    array = np.array(leaf)
    made = {name: act(leaf) for name, (act, _) in OPERATIONS.items()}
    expected = {name: compute(array) for name, (_, compute) in OPERATIONS.items()}
    for _ in range(3):
        state, _ = case.step(state, case.batch)
        twin, _ = case.step(twin, case.batch)
    for name, result in made.items():
        rtol = 1e-3 if "float16" in name else 1e-5
        np.testing.assert_allclose(np.asarray(result), expected[name], rtol=rtol, atol=1e-6, err_msg=name)
    _same(state, twin)
    assert not np.array_equal(np.asarray(state[0]["e"]), array)  # the steps did something


def _pickled(state: Any) -> Any:
    return pickle.loads(pickle.dumps(state))


@pytest.mark.parametrize("make", [copy.deepcopy, _pickled])
@pytest.mark.parametrize("kind", KINDS)
def test_a_copied_state_is_trained_like_the_first(kind: str, make: Any) -> None:
    case = _cases()[kind]
    state = autopar.drain(case.state())
    kept = make(state)
    buffers = {id(x) for x in jax.tree.leaves(state)}
    assert not any(id(x) in buffers for x in jax.tree.leaves(kept) if hasattr(x, "shape"))
    runs = []
    for start in (state, kept):
        for _ in range(3):
            start, _ = case.step(start, case.batch)
        runs.append(start)
    _same(*runs)


@pytest.mark.parametrize("kind", KINDS)
def test_a_leaf_that_a_step_has_taken_is_nowhere_read(kind: str) -> None:
    case = _cases()[kind]
    state = case.state()
    case.step(state, case.batch)
    for name, (act, _) in OPERATIONS.items():
        if "zeros_like" in name:  # which needs its shape alone
            continue
        with pytest.raises(RuntimeError, match=r"given to a|deleted"):
            jax.block_until_ready(act(state[0]["e"]))
            pytest.fail(name)


@pytest.mark.parametrize("kind", KINDS)
def test_one_process_pickles_no_part_of_a_leaf(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    state = _cases()[kind].state()
    monkeypatch.setattr(type(state[0]["e"]), "is_whole_here", False)
    for act in (pickle.dumps, flax.serialization.to_bytes):
        with pytest.raises(autopar.CheckpointError, match=r"autopar\.save\(.*autopar\.materialize\("):
            act(state)


def test_a_table_in_host_memory_is_written_from_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device may have no room for it."""
    state = _cases()["HostTable"].state()
    arrays = jax.tree.map(np.asarray, state)

    def on_a_device(_: Any) -> Any:
        raise AssertionError("the table was brought to a device")

    monkeypatch.setattr(autopar.HostTable, "materialize", on_a_device)
    read = pickle.loads(pickle.dumps(state))
    assert isinstance(read[0]["e"], np.ndarray)
    _same(read, arrays)
    _same(flax.serialization.from_bytes(arrays, flax.serialization.to_bytes(state)), arrays)


def test_a_leaf_that_is_kept_twice_is_copied_once() -> None:
    leaf = _cases()["Table"].state()[0]["e"]
    first, second = copy.deepcopy([leaf, leaf])
    assert first is second is not leaf


@pytest.mark.parametrize("read", [jnp.sum, np.asarray])
@pytest.mark.parametrize("kind", ["Table", "TablePart", "DeferredTable", "HostTable"])
def test_large_leaves_that_are_read_whole_again_and_again_are_told_of(
    kind: str, read: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = _cases()[kind]
    state = case.state()
    monkeypatch.setattr("autopar.tables.leaf._LARGE_BYTES", state[0]["e"].nbytes)
    monkeypatch.setattr("autopar.tables.leaf._reads", Counter())
    for _ in range(9):
        read(state[0]["e"])
        autopar.materialize(state)  # which makes ordinary arrays, as the warning says
    with pytest.warns(autopar.SlowPlanWarning, match=f"have read autopar.{kind}.* 10 times") as told:
        state, _ = case.step(state, case.batch)
        read(state[0]["e"])
        jax.jit(jnp.sum)(state[0]["e"])
    assert len(told) == 1 and told[0].filename == __file__
