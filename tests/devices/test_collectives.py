"""The collectives in the compiled program are the plan's, and so are their bytes."""

from __future__ import annotations

from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import PartitionSpec as P

import autopar
from autopar.cost.exchange import sent_bytes, transfer_bytes
from autopar.ir.figures import Sizes
from autopar.measure.compiled_collectives import Collective, read_collectives, sent_by_device
from tests.support.meshes import mesh_of
from tests.zoo import MODELS

DEVICES, ROWS, WIDTH, IDS = 4, 4000, 16, (32, 5)
TX = optax.chain(optax.clip_by_global_norm(0.1), optax.adagrad(0.1))
#: On 4 devices, ids of 32 x 5.
ASKED = 40
SMALL = 4 * WIDTH * WIDTH  # the dense parameter's gradient, scalars


def step(state: Any, ids: Any) -> Any:
    def loss_fn(p: Any) -> jax.Array:
        return jnp.mean(jnp.tanh(p["emb"][ids] @ p["w"]) ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state["p"])
    updates, opt = TX.update(grads, state["o"], state["p"])
    return {"p": optax.apply_updates(state["p"], updates), "o": opt}, loss


def compiled_text(method: str, rows: int = ROWS) -> str:
    params = {"emb": jnp.zeros((rows, WIDTH)), "w": jnp.eye(WIDTH)}
    shapes = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), {"p": params, "o": TX.init(params)})
    planned = autopar.parallelize(step, strategy=method, mesh=mesh_of(DEVICES))
    return planned.lower(shapes, jax.ShapeDtypeStruct(IDS, jnp.int32)).compile().as_text()


def test_a_parser_reads_tuples_of_any_length() -> None:
    text = """HloModule jit_step

%body (p: (f32[2], s32[])) -> (f32[2], s32[]) {
  %r = bf16[2]{0} all-reduce(%q), channel_id=3, to_apply=%sum
}

%rare (p: f32[2]) -> f32[2] {
  %s = f32[2]{0} collective-permute(%q)
}

ENTRY %main (x: f32[4]) -> f32[4] {
  %a = (s32[1,2]{1,0}, f32[3]{0}, /*index=2*/pred[]) all-to-all(%x, %y, %z), channel_id=1
  %b = (f32[1,5]{1,0}, f32[4,5]{1,0:T(8)}) all-gather-start(%c), dimensions={0}
  %c = f32[7]{0} add(%all-reduce.1, %b)
  %w = (f32[2], s32[]) while(%t), condition=%c1, body=%body, backend_config={"known_trip_count":{"n":"20"}}
  %v = f32[2] while(%t), condition=%c2, body=%rare
}
"""
    assert read_collectives(text) == [
        Collective("all-to-all", (("s32", (1, 2)), ("f32", (3,)), ("pred", ())), 1),
        Collective("all-gather", (("f32", (4, 5)),), 1),
        Collective("all-reduce", (("bf16", (2,)),), 20),
        Collective("collective-permute", (("f32", (2,)),), 0),
    ]
    assert [c.nbytes for c in read_collectives(text)] == [21, 80, 4, 8]
    assert sent_by_device(text, 4) == 21 * 3 // 4 + 80 * 3 // 4 + 20 * (2 * 4 * 3 // 4)


@pytest.mark.parametrize(
    ("written", "groups"),
    [
        ("replica_groups={{0,1},{2,3}}", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[4]", ((0, 1), (2, 3))),
        ("replica_groups=[2,2]<=[2,2]T(1,0)", ((0, 2), (1, 3))),
        ("replica_groups=mesh['axis_0'=2,'axis_1'=1,'axis_2'=2] {'axis_0'}", ((0, 2), (1, 3))),
        ("replica_groups=mesh['a'=2,'b'=2] {'a','b'}", ((0, 1, 2, 3),)),
        ("source_target_pairs={{0,1},{1,0}}", ((0, 1), (1, 0))),
        ("channel_id=1", ()),
    ],
)
def test_groups_of_devices(written: str, groups: Any) -> None:
    text = f"ENTRY %main (x: f32[4]) -> f32[4] {{\n  %r = f32[2]{{0}} all-reduce(%q), {written}, to_apply=%sum\n}}"
    assert read_collectives(text) == [Collective("all-reduce", (("f32", (2,)),), 1, groups)]


def result_bytes(text: str, larger_than: int = 0) -> Counter[str]:
    """Op -> bytes of its results on one device, of arrays larger than so many bytes."""
    total: Counter[str] = Counter()
    for c in read_collectives(text):
        total[c.op] += c.times * sum(n for n in c.sizes if n > larger_than)
    return total


@pytest.mark.parametrize(("model", "tolerance"), [("mlp", 0), ("cnn_batchnorm", 0), ("lstm_lm", 0.1)])
def test_sums_over_examples_are_counted(model: str, tolerance: float) -> None:
    """What the plan says is reduced, from the traced step, beside what XLA reduces."""
    case = MODELS[model].make(optax.sgd(0.1))
    planned = autopar.parallelize(case.step, strategy="ps", mesh=mesh_of(2))
    state, batch = case.state, case.batches(0)
    text = planned.lower(state, batch).compile().as_text()
    counted = sum(size * count for size, count in autopar.plan(planned, state, batch).work.sums)
    assert counted == pytest.approx(result_bytes(text)["all-reduce"], rel=tolerance)


def test_collectives_in_loops_are_counted_as_often_as_they_run() -> None:
    def loop(x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda c, _: (c + jax.lax.psum(c, "data"), None), x, None, length=7)[0]

    mapped = jax.shard_map(loop, mesh=mesh_of(4), in_specs=P("data"), out_specs=P("data"))
    text = jax.jit(mapped).lower(jnp.ones((8, 3))).compile().as_text()
    assert [(c.op, c.times, c.nbytes) for c in read_collectives(text)] == [("all-reduce", 7, 24)]


def expected() -> dict[str, int]:
    sizes = Sizes(
        devices=DEVICES,
        extent=ROWS,
        row_bytes=4 * WIDTH,
        family_bytes=8 * WIDTH,
        ids=ASKED,
        requested=ASKED,
        routed=DEVICES * ASKED + 1,
        capacity=ASKED,
        owned=DEVICES * ASKED + 1,
    )
    return dict(sent_bytes(sizes))


@pytest.mark.parametrize("rows", [ROWS, ROWS + 1])
def test_ps_exchanges_ids_rows_and_gradients(rows: int) -> None:
    text = compiled_text("ps", rows)
    found = result_bytes(text, larger_than=SMALL // 2)
    assert sum(c.op == "all-to-all" for c in read_collectives(text)) == 3
    exchanged = result_bytes(text)["all-to-all"]  # to itself, too
    assert exchanged * (DEVICES - 1) // DEVICES == expected()["ps"]
    assert found["all-gather"] == found["collective-permute"] == found["reduce-scatter"] == 0
    assert found["all-reduce"] == SMALL


def test_allgather_gathers_ids_and_summed_rows() -> None:
    text = compiled_text("allgather")
    gathered = result_bytes(text)["all-gather"]
    assert gathered * (DEVICES - 1) // DEVICES == expected()["allgather"]
    assert result_bytes(text, larger_than=SMALL // 2)["all-reduce"] == SMALL
    assert result_bytes(text)["all-to-all"] == 0


def test_allreduce_rows_reduces_the_routed_rows() -> None:
    text = compiled_text("allreduce_rows")
    found = result_bytes(text)
    reduced = result_bytes(text, larger_than=SMALL // 2)["all-reduce"] - SMALL
    sent = found["all-gather"] * (DEVICES - 1) // DEVICES + 2 * (DEVICES - 1) * reduced // DEVICES
    assert sent == expected()["allreduce_rows"]
    assert found["all-to-all"] == 0


def test_allreduce_reduces_the_whole_gradient() -> None:
    reduced = result_bytes(compiled_text("allreduce"), larger_than=SMALL)["all-reduce"]
    assert 2 * (DEVICES - 1) * reduced // DEVICES == expected()["allreduce"]


def test_a_sharded_table_takes_its_share_of_memory() -> None:
    """Arguments of one device: its rows of the table and of its slot, and the dense leaves."""
    params = {"emb": jnp.zeros((ROWS, WIDTH)), "w": jnp.eye(WIDTH)}
    planned = autopar.parallelize(step, strategy="ps", mesh=mesh_of(DEVICES))
    memory = planned.lower({"p": params, "o": TX.init(params)}, jnp.zeros(IDS, jnp.int32)).compile().memory_analysis()
    share, dense = 2 * 4 * ROWS * WIDTH // DEVICES, 2 * SMALL + 4 * IDS[0] * IDS[1] // DEVICES
    assert memory.argument_size_in_bytes == pytest.approx(share + dense, rel=0.01)


def test_table_3_of_parallax() -> None:
    b, n, alpha = 1000.0, 4, 0.01
    assert transfer_bytes("ps", "dense", b=b, n=n) == 2000
    assert transfer_bytes("allreduce", "dense", b=b, n=n) == 1500
    assert transfer_bytes("ps", "sparse", b=b, n=n, alpha=alpha) == pytest.approx(20)
    assert transfer_bytes("allgather", "sparse", b=b, n=n, alpha=alpha) == pytest.approx(60)
    for method, kind in (("allgather", "dense"), ("allreduce", "sparse"), ("ring", "dense")):
        with pytest.raises(ValueError, match="the table has no"):
            transfer_bytes(method, kind, b=b, n=n)
    with pytest.raises(ValueError, match="alpha is in"):
        transfer_bytes("ps", "sparse", b=b, n=n, alpha=2)
