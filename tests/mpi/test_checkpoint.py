"""Ranks that are killed, and go on from their checkpoint: the numbers are those of a training that nobody disturbed."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.support.mpi.checkpoint_training import WITHIN
from tests.support.mpi.jobs import Run
from tests.support.object_store import object_store
from tests.support.pairs import long

TRAINING = "from tests.support.mpi.checkpoint_training import main\n\nmain()\n"
STEPS = 8
#: How often ranks are killed by chance, each time in as many steps as that may take and two more.
KILLS, STEPS_EACH = 3, WITHIN + 2
#: Steps -> the state that two ranks have behind them, whom nobody disturbs; trained once.
_states: dict[int, list[np.ndarray]] = {}


@pytest.fixture
def train(run_ranks: Run, tmp_path: Path) -> Any:
    """`train(ranks, folder, die="", steps=STEPS) -> (the step it began at, the state at its end; None if killed)`."""

    def run(
        count: int, folder: Path, die: str = "", steps: int = STEPS, **more: str
    ) -> tuple[int, list[np.ndarray] | None]:
        result = tmp_path / f"{folder.name}-{count}-{die.replace(':', '-')}.npz"
        given = {"FOLDER": str(folder), "STEPS": str(steps), "DIE": die, "RESULT": str(result), **more}
        result = Path(given["RESULT"])
        job = run_ranks(count, TRAINING, timeout_s=120, **given)
        assert (job.code == 0) == (not die), job.output
        began = {int(line.removeprefix("begins at ")) for r in job.ranks for line in r.splitlines() if "begins" in line}
        assert len(began) == 1, job.output
        return began.pop(), None if die else list(np.load(result).values())

    return run


@pytest.fixture
def undisturbed(train: Any, tmp_path: Path) -> Callable[[int], list[np.ndarray]]:
    """`undisturbed(steps)` is the state of two ranks whom nobody disturbs."""

    def state(steps: int = STEPS) -> list[np.ndarray]:
        if steps not in _states:
            most, result = max(steps, KILLS * STEPS_EACH), tmp_path / "undisturbed.npz"
            began, _states[most] = train(2, tmp_path / "undisturbed", steps=most, ALSO=str(STEPS), RESULT=str(result))
            assert began == 0
            _states[STEPS] = list(np.load(f"{result}-{STEPS}.npz").values())
        return _states[steps]

    return state


@pytest.mark.parametrize(
    ("kills", "others"),
    [
        # While it writes its rows, and what it saves is lost; 6 is the checkpoint, but 4 is still there, too.
        ({"rows:1:3": 0, "clean:0:5": 2}, (3,)),
        # Between saves; while it writes; all is written for 6, but not yet the checkpoint; the next to go.
        long({"step:1:3": 0, "rows:1:3": 2, "commit:0:5": 2, "clean:0:5": 4}, (3, 1)),
    ],
    ids=len,
)
def test_a_killed_training_goes_on_with_the_same_numbers(
    train: Any, undisturbed: Any, tmp_path: Path, kills: dict[str, int], others: tuple[int, ...]
) -> None:
    """On as many ranks bit for bit; on others up to the order of sums. `kills`: when -> the step that it began with."""
    expected = undisturbed()
    folder = tmp_path / "checkpoint"
    for kill, expected_start in kills.items():
        assert train(2, folder, kill)[0] == expected_start
    assert len(list(folder.glob("version-*"))) == 2
    copies = {count: shutil.copytree(folder, tmp_path / f"copy{count}") for count in others}
    began, found = train(2, folder)
    assert began == 6
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)
    assert len(list(folder.glob("version-*"))) == 1
    for count, copy in copies.items():
        began, found = train(count, copy)
        assert began == 6
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, strict=True)


@pytest.mark.parametrize("kills", [KILLS, long(20)])
def test_killed_ranks_are_started_again(undisturbed: Any, launch: Run, tmp_path: Path, kills: int) -> None:
    """At any moment, by chance; the training ends in the state of an undisturbed one, bit for bit."""
    steps = kills * STEPS_EACH
    expected = undisturbed(steps)
    files = {"FOLDER": str(tmp_path / "checkpoint"), "RESULT": str(tmp_path / "result.npz")}
    flags = ["-n", "2", "--max-restarts", str(kills)]
    job = launch(flags, TRAINING, timeout_s=60 * kills, KILLS=str(kills), STEPS=str(steps), **files)
    assert job.code == 0, job.output
    assert job.output.count("was killed by SIGKILL") == job.output.count(f" of {kills}\n") == kills, job.output
    assert (tmp_path / "kills").stat().st_size == kills
    found = list(np.load(files["RESULT"]).values())
    for a, b in zip(found, expected, strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def test_a_training_that_is_killed_while_it_saves_beside_its_steps(
    train: Any, undisturbed: Any, tmp_path: Path
) -> None:
    """A rank's thread has written one of its arrays for step 4, and the other rank trains on."""
    folder = tmp_path / "run"
    assert train(2, folder, "rows:1:3", BESIDE="1") == (0, None)
    assert not (folder / "step-00000004" / "CURRENT").exists() and (folder / "step-00000004").exists()
    began, found = train(2, folder, BESIDE="1")
    assert began == 2
    for a, b in zip(found, undisturbed(), strict=True):
        np.testing.assert_array_equal(a, b, strict=True)


def test_a_killed_training_goes_on_from_an_object_store(train: Any, undisturbed: Any) -> None:
    """A rank is killed between its arrays, on two ranks; it goes on on as many, bit for bit, and on others."""
    with object_store() as store:
        folder = Path("s3://bucket/run")
        assert train(2, folder, "rows:1:3", **store.environment) == (0, None)
        assert {name.split("/")[2] for name in store.objects} == {"CURRENT", "version-000001", "version-000002"}
        left = dict(store.objects)
        began, found = train(2, folder, **store.environment)
        assert began == 2
        expected = undisturbed()
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_array_equal(a, b, strict=True)
        store.objects = left
        began, found = train(3, folder, **store.environment)
        assert began == 2
        for a, b in zip(found, expected, strict=True):
            np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6, strict=True)


CASES = """
    import resource, signal
    from pathlib import Path
    import jax, numpy as np
    import autopar
    from autopar.mpi.world import world
    from tests.support.mpi.checkpoint_training import make_state, train_step

    rank = world().rank
    batch = {"ids": jax.ShapeDtypeStruct((12,), np.int32), "y": jax.ShapeDtypeStruct((12,), np.float32)}
    state = autopar.init(make_state, jax.random.key(0), step=train_step, batch=batch)
    values = [np.asarray(leaf) for leaf in jax.tree.leaves(state)]

    def fails(text, work, kind=autopar.CheckpointError):
        try:
            work()
        except kind as error:
            assert text in str(error), str(error)
        else:
            raise AssertionError(f"no error: {text}")

    def whole():
        found = autopar.restore("it", step=train_step, batch=batch)
        for a, b in zip(jax.tree.leaves(found.state), values, strict=True):
            np.testing.assert_array_equal(np.asarray(a), b)
        assert found.position == {"batch": 7}

    fails("there is no checkpoint", lambda: autopar.restore("it"), autopar.MissingCheckpointError)
    autopar.save("it", state, position={"batch": 7})
    whole()
    plain = autopar.restore("it").state  # every rank reads all of it
    for a, b in zip(jax.tree.leaves(plain), values, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)

    # A rank's disk is full (to the system: its files mustn't be longer).
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    fails("00001-of-00002 can't be written by TensorStore: ", lambda: autopar.save("it", state))
    fails("File too large", lambda: autopar.save("it", state))
    fails(f"rank 1: {Path.cwd()}/it/version-", lambda: autopar.save("it", state, position={"batch": 8}))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    world().comm.Barrier()  # rank 0 removes what it wrote
    assert len(list(Path("it").glob("version-*"))) == 1
    whole()

    # Ranks that don't save the same.
    fails("rank 1 saves another state than rank 0: position", lambda: autopar.save("it", state, position={"a": rank}))
    other = {**state, "step": np.float32(1)} if rank else state
    fails("rank 1 saves another state than rank 0: step: float32", lambda: autopar.save("it", other))
    fails("rank 1: step is of type object", lambda: autopar.save("it", {**state, "step": object()} if rank else state))
    like = other["params"] if rank else state
    fails("rank 1: the state has another structure", lambda: autopar.restore("it", like=like))
    whole()

    # Tables, and ordinary arrays, that are spread over the devices of all ranks.
    mesh = jax.sharding.Mesh(jax.devices(), ("data",))
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec(None, "data"))
    step = autopar.parallelize(train_step.fun, strategy={"params/emb": "ps"}, mesh=mesh)
    spread = autopar.init(make_state, jax.random.key(0), step=step, batch=batch)
    assert isinstance(spread["params"]["emb"], autopar.Table)
    columns = np.arange(8.0).reshape(2, 4)
    both = {"state": spread, "columns": jax.make_array_from_callback(columns.shape, sharding, lambda k: columns[k])}
    autopar.save("spread", both)
    if rank == 1:
        resource.setrlimit(resource.RLIMIT_FSIZE, (100, limits[1]))
    fails("can't be written by TensorStore: ", lambda: autopar.save("spread", both))
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    found = autopar.restore("spread").state
    np.testing.assert_array_equal(found["columns"], columns)
    for a, b in zip(jax.tree.leaves(found["state"]), values, strict=True):
        np.testing.assert_array_equal(a, b)
    found = autopar.restore("spread", like=both).state
    assert found["columns"].sharding == sharding
    for shard in found["columns"].addressable_shards:
        np.testing.assert_array_equal(shard.data, columns[shard.index])
    autopar.save("spread", found["state"])
    found = autopar.restore("spread", step=step, batch=batch).state
    table = found["params"]["emb"]
    assert isinstance(table, autopar.Table) and table.stored.sharding == spread["params"]["emb"].stored.sharding
    assert found["params"]["w"].sharding.is_fully_replicated and not found["params"]["w"].is_fully_addressable
    for a, b in zip(jax.tree.leaves(found), values, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)
    found = autopar.restore("spread", step=train_step, batch=batch).state  # onto hosts
    for a, b in zip(jax.tree.leaves(found), values, strict=True):
        np.testing.assert_array_equal(np.asarray(a), b)

    # A byte was changed in a file that every rank reads, and only one rank checks.
    files = sorted(path for path in Path("it").rglob("*") if path.is_file())
    for file in files:
        data = file.read_bytes()
        world().comm.Barrier()
        if rank == 0:
            file.write_bytes(data[:-1] + bytes([data[-1] ^ 1]))
        world().comm.Barrier()
        fails(str(file.relative_to("it")), lambda: autopar.restore("it", step=train_step, batch=batch))
        if rank == 0:
            file.write_bytes(data)
        world().comm.Barrier()
    assert len(files) > 8
    whole()

    # One file was cut short.
    (cut,) = Path("it").glob("version-*/rows/*params_emb*.00001-of-00002/c.0.0")
    world().comm.Barrier()
    if rank == 0:
        with cut.open("r+b") as file:
            file.truncate(100)
    world().comm.Barrier()
    fails(f"{cut} has 100 bytes instead of", lambda: autopar.restore(Path("it"), step=train_step, batch=batch))
    print("done")
"""


def test_what_fails_on_one_rank_is_an_error_on_all(run_ranks: Run) -> None:
    job = run_ranks(2, CASES, timeout_s=120)
    assert job.code == 0 and all("done" in printed for printed in job.ranks), job.output


#: Two steps with whole tables, saved and gone on with, or restored in each way and gone on with.
WHOLE = """
import os
import autopar
import jax, numpy as np, optax
from tests.support.mpi.bag_cases import BAGS, RANKS, batch_of, start, step_of

forms, tx = {f"{k}": BAGS["sum"] for k in range(5)}, optax.adamw(0.05)
step = autopar.parallelize(step_of(forms, tx), strategy={"params/tables/*": ("ps:table", "hosts")})
make = lambda: start(forms, tx, (8,))
folder, is_first = os.environ["FOLDER"], RANKS == 4

def trained(state, name):
    for k in (2, 3):
        state, _ = step(state, batch_of(k))
    owners = [table.layout.owner for table in state["params"]["tables"].values()]
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(autopar.materialize(state))]
    if jax.process_index() == 0:
        np.savez(f"{folder}-{RANKS}-{name}.npz", *leaves)
        print("owners", *owners)

if RANKS == 4:
    state = autopar.init(make, step=step, batch=batch_of(0))
    for k in (0, 1):
        state, _ = step(state, batch_of(k))
    autopar.save(folder, state)
    trained(state, "by itself")
else:
    trained(autopar.restore(folder, jax.eval_shape(make), step=step, batch=batch_of(0)).state, "by the step")
    trained(autopar.restore(folder, jax.eval_shape(make)).state, "alone")
"""


def test_whole_tables_go_on_with_other_numbers_of_ranks(run_ranks: Run, tmp_path: Path) -> None:
    """Saved by 4 ranks, and restored by 2 and 3, whose tables have other owners."""
    folder = tmp_path / "whole"
    for ranks in (4, 2, 3):
        job = run_ranks(ranks, WHOLE, FOLDER=str(folder))
        assert job.code == 0, job.output
        owners = [line.split()[1:] for line in job.output.splitlines() if line.startswith("owners")]
        assert {*owners[0]} == {*map(str, range(ranks))}, owners
        for name in ("by itself",) if ranks == 4 else ("by the step", "alone"):
            found, expected = (np.load(f"{folder}-{at}.npz") for at in (f"{ranks}-{name}", "4-by itself"))
            for leaf in expected:
                np.testing.assert_allclose(found[leaf], expected[leaf], rtol=1e-4, atol=1e-5, err_msg=f"{ranks} {name}")
