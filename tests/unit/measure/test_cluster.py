"""Planning for machines that aren't here: exchanges by hand, and which method wins where."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar.cost.collectives import all_gather_s, all_reduce_s, all_to_all_s
from autopar.cost.exchange import sent_bytes
from autopar.cost.rates import planned_rates
from autopar.ir.cluster import Device, Link
from autopar.launch.cluster_file import read_cluster
from autopar.measure.cluster import NAMED, Cluster
from autopar.planning.plan import elsewhere
from tests.support.explained import explained

DEVICE = Device("of chalk", 1e9, 1e12, 100e9)
#: 3 machines of 2 devices; 10 bytes a second inside of a machine, 4 between them, messages take 1 and 2 seconds.
SMALL = Cluster("small", 3, 2, DEVICE, Link(1.0, 10.0), Link(2.0, 4.0), 1e9)


def test_exchanges_by_hand() -> None:
    # inside: 2 messages of 60 / 2; between: 4 of 60 / 3
    assert all_reduce_s(SMALL, 60) == pytest.approx((2 + 60 / 10) + (4 * 2 + 80 / 4))
    # between: what 2 devices of each of 2 other machines have; inside: what the fellow has gathered of 3 machines
    assert all_gather_s(SMALL, 5) == pytest.approx((2 * 2 + 4 * 5 / 4) + (1 + 3 * 5 / 10))
    # between: 2 devices, to 4 others each
    assert all_to_all_s(SMALL, 5) == pytest.approx(max(4 * 2 + 8 * 5 / 4, 1 + 5 / 10))


@pytest.mark.parametrize("cost", [all_reduce_s, all_gather_s, all_to_all_s])
def test_one_device_exchanges_nothing(cost: Any) -> None:
    assert cost(SMALL.of(1, 1), 1e9) == 0


def test_rates_are_those_of_the_exchanges() -> None:
    rates = planned_rates(SMALL)
    for size in (6.0, 6e6, 6e9):
        assert rates.all_reduce(size) == pytest.approx(all_reduce_s(SMALL, size))
        assert rates.all_gather(size) == pytest.approx(all_gather_s(SMALL, size / 6))
        assert rates.all_to_all(size) == pytest.approx(all_to_all_s(SMALL, size / 6))
    assert rates.walk(100e9) == pytest.approx(1.0)


def test_named_clusters() -> None:
    cluster = Cluster.named("parallax-8x6")
    assert (cluster.machines, cluster.devices, cluster.count) == (8, 6, 48)
    assert cluster.between.bytes_s == 100e9 / 8
    assert all(part.source for part in (cluster.device, cluster.inside, cluster.between))
    with pytest.raises(autopar.ArgumentsError, match="no cluster is called 'dgx-1'; there are parallax-8x6, "):
        Cluster.named("dgx-1")
    with pytest.raises(autopar.ArgumentsError, match="0 machines of 6 devices"):
        cluster.of(0)


def test_machines_from_a_file(tmp_path: Path) -> None:
    like = Cluster.named("parallax-8x6")
    file = tmp_path / "resources"
    file.write_text("10.0.0.1: 0,1,2\n10.0.0.2: 0,1,2\n")
    found = Cluster.load(file, like)
    assert (found.machines, found.devices, found.name, found.between) == (2, 3, "resources", like.between)
    file.write_text("10.0.0.1: 0,1,2\n10.0.0.2: 0\n")
    with pytest.raises(autopar.ArgumentsError, match="are alike; devices: 10.0.0.1 3, 10.0.0.2 1"):
        Cluster.load(file, like)


TX = optax.chain(optax.clip_by_global_norm(1.0), optax.adagrad(0.1))


def step(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((p["emb"][batch["ids"]] @ p["w"]) ** 2))(state["params"])
    updates, opt = TX.update(grads, state["opt"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss


def arguments(rows: int, examples: int) -> Any:
    shape = jax.ShapeDtypeStruct
    params = {"emb": shape((rows, 64), jnp.float32), "w": shape((64, 64), jnp.float32)}
    ids = (np.random.default_rng(0).zipf(1.3, (examples, 20)).clip(max=rows) - 1).astype(np.int32)
    return {"params": params, "opt": jax.eval_shape(TX.init, params)}, {"ids": ids}


@pytest.mark.parametrize(("rows", "method"), [(1_000_000, "ps"), (100, "allreduce")])
def test_large_tables_are_served_and_small_ones_reduced(rows: int, method: str) -> None:
    """Parallax's choice, on its cluster, which has more devices than there are here."""
    cluster = Cluster.named("parallax-8x6")
    planned = autopar.parallelize(step)
    plan = elsewhere(planned, cluster).planned_for(*arguments(rows, 48 * 128)).compiled.plan
    assert plan.devices == 48 and [p.method for p in plan.parameters] == [method]
    seconds = plan.parameters[0].seconds
    assert min(seconds, key=lambda m: seconds[m]) == method
    told = explained(planned, *arguments(rows, 48 * 128), cluster=cluster)
    assert "Plan of step (48 devices)" in told and "Planned for parallax-8x6: 8 x 6 TITAN Xp" in told
    seconds = autopar.plan(planned, *arguments(rows, 48 * 128), cluster=cluster).seconds
    assert f"A step is predicted to take {seconds * 1e3:.2f} ms: model " in told
    assert planned.latest is None, "nothing is planned here"


@pytest.mark.parametrize(("rows", "said"), [(1_000_000, "on each device."), (2_000_000_000, "more than fit beside")])
def test_whether_the_state_fits_is_told(rows: int, said: str) -> None:
    told = autopar.explain(autopar.parallelize(step), *arguments(rows, 48), cluster=Cluster.named("parallax-8x6"))
    assert "The state takes " in told.notes[0] and said in told.notes[0]


def test_a_plan_as_data() -> None:
    cluster = Cluster.named("parallax-8x6")
    made = autopar.plan(autopar.parallelize(step), *arguments(800_000, 48 * 128), cluster=cluster)
    assert (made.devices, made.cluster, made.step) == (48, cluster, "step")
    table = made.table("params/emb")
    assert (table.shape, table.dtype, table.axis, table.method) == ((800_000, 64), "float32", 0, "ps")
    assert len(table.slots) == 1 and all("emb" in path for path in table.slots)
    assert table.sizes is not None and table.sizes.devices == 48
    assert min(table.seconds, key=lambda m: table.seconds[m]) == "ps"
    sent = sent_bytes(table.sizes)
    for method, terms in table.terms.items():
        assert sum(t.sent for t in terms) == pytest.approx(sent[method], rel=1e-6), method
    assert "params/w" in {leaf.path for leaf in made.dense}
    with pytest.raises(autopar.ArgumentsError, match="'params/w' is no table of the plan of step; .*: params/emb"):
        made.table("params/w")


def test_a_cluster_needs_arguments() -> None:
    planned = autopar.parallelize(step)
    autopar.explain(planned, *arguments(100, 4))
    with pytest.raises(autopar.ArgumentsError, match="takes a step's arguments as well"):
        autopar.explain(planned, cluster=SMALL)


FILE = """\
host_bytes = 256e9

[[host]]
name = "node1"
devices = [0, 1]

[[host]]
name = "node2"
devices = [0, 1]

[device]
name = "of chalk"
memory_bytes = 12e9
flops_s = 1e12
memory_bytes_s = 500e9

[link.inside]
latency_s = 10e-6
bytes_s = 12e9
source = "a ruler"
[link.between]
latency_s = 0
bytes_s = 1.25e9
"""


def test_a_file_that_says_what_its_machines_can_do(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(FILE)
    device, inside = Device("of chalk", 12e9, 1e12, 500e9), Link(10e-6, 12e9, "a ruler")
    assert Cluster.load(file) == Cluster("cluster.toml", 2, 2, device, inside, Link(0, 1.25e9), 256e9)
    assert [h.name for h in read_cluster(file).hosts] == ["node1", "node2"], "the launcher reads it, too"
    file.write_text(f"host_bytes_s = 80e9\n{FILE}[link.host]\nlatency_s = 1e-6\nbytes_s = 50e9\n")
    found = Cluster.load(file)
    assert (found.host_bytes_s, found.to_host) == (80e9, Link(1e-6, 50e9))


MEASURED = {"all_reduce": {"inside": Link(1e-7 / 3, 1e11 / 7), "between": Link(0.0, float("inf"))}}


@pytest.mark.parametrize(
    "cluster",
    [*map(Cluster.named, ("parallax-8x6", "dgx-h200")), replace(SMALL, name='a "b"\n\\ é\x7f', measured=MEASURED)],
)
def test_what_is_saved_is_loaded_again(cluster: Cluster, tmp_path: Path) -> None:
    file = tmp_path / "saved.toml"
    cluster.save(file)
    assert Cluster.load(file) == cluster == Cluster.of_dict(cluster.as_dict())
    with pytest.raises(autopar.LaunchError, match="it has no \\[\\[host\\]\\] tables"):
        read_cluster(file)
    with pytest.raises(autopar.ArgumentsError, match="ends in .toml"):
        cluster.save(tmp_path / "saved")


def test_what_a_file_lacks(tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    file.write_text(FILE.split("[link.between]")[0].replace("host_bytes = 256e9\n", ""))
    with pytest.raises(autopar.ArgumentsError, match=r"cluster.toml lacks \[link.between\], host_bytes. .* like="):
        Cluster.load(file)
    found = Cluster.load(file, SMALL)
    assert (found.between, found.host_bytes, found.count) == (SMALL.between, SMALL.host_bytes, 4)
    assert found.inside.source == "a ruler" and found.device.memory_bytes == 12e9
    file.write_text("")
    with pytest.raises(autopar.ArgumentsError, match=r"lacks \[device\], \[link.inside\], .*, machines, devices"):
        Cluster.load(file)
    assert Cluster.load(file, SMALL) == replace(SMALL, name="cluster.toml")


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        ("flops_s", "flops", "cluster.toml: there is no device.flops; there are name, memory_bytes, "),
        ("flops_s = 1e12\n", "", "cluster.toml: device.flops_s is missing"),
        ("flops_s = 1e12", 'flops_s = "1e12"', 'cluster.toml: device.flops_s is a number, not "1e12"'),
        ("latency_s = 0", "latency_s = nan", "cluster.toml: link.between: a link of nan s and"),
        ("link.inside", "link.insde", "cluster.toml: there is no link.insde; there are inside, between"),
        ("link.inside", "links.inside", "cluster.toml: there is no links; there are name, machines, "),
        ("link.inside", "measured.sum.inside", "cluster.toml: there is no measured.sum; there are all_red"),
        ("host_bytes = 256e9", "machines = 2", "cluster.toml: machines is for files without [[host]] tables"),
        ("devices = [0, 1]\n\n[dev", "host_bytes = 3\n[dev", "there is no host[1].host_bytes; there are name, addr"),
    ],
)
def test_a_wrong_file(old: str, new: str, message: str, tmp_path: Path) -> None:
    file = tmp_path / "cluster.toml"
    assert FILE.count(old) == 1
    file.write_text(FILE.replace(old, new))
    with pytest.raises(autopar.LaunchError) as raised:
        Cluster.load(file)
    assert message in str(raised.value)


def test_measured_links_take_the_place_of_general_ones() -> None:
    """3 machines of 2: what was measured of one collective on one level, by hand; the rest is as without."""
    link = Link(0.5, 20.0)
    inside, between = (replace(SMALL, measured={"all_reduce": {level: link}}) for level in ("inside", "between"))
    assert all_reduce_s(inside, 60) == pytest.approx((2 * 0.5 + 60 / 20) + (4 * 2 + 80 / 4))
    assert all_reduce_s(between, 60) == pytest.approx((2 + 60 / 10) + (4 * 0.5 + 80 / 20))
    assert all_gather_s(inside, 5) == all_gather_s(SMALL, 5) and all_to_all_s(between, 5) == all_to_all_s(SMALL, 5)


def test_measured_links_are_of_the_links_that_are_given(tmp_path: Path) -> None:
    """A file with links of its own doesn't take measurements of others; two machines may have one name."""
    file = tmp_path / "cluster.toml"
    file.write_text(FILE.replace('name = "node2"', 'name = "node1"\naddress = "10.0.0.2"'))
    like = replace(SMALL, measured=MEASURED)
    assert Cluster.load(file, like).measured == {} and Cluster.load(file, like).machines == 2
    file.write_text(FILE.split("[link.inside]")[0])
    assert Cluster.load(file, like).measured == MEASURED


def test_figures_that_cannot_be() -> None:
    with pytest.raises(autopar.ArgumentsError, match="chalk: memory_bytes, flops_s and memory_bytes_s are more than 0"):
        Device("chalk", 1.0, -1.0, 1.0)
    with pytest.raises(autopar.ArgumentsError, match="a link of 0 s and 0 bytes a second"):
        Link(0, 0)
    with pytest.raises(autopar.ArgumentsError, match="1.5 machines of 1 devices: whole numbers"):
        SMALL.of(1.5, 1)


def test_what_is_told_of_devices_that_do_not_divide_a_batch() -> None:
    planned = autopar.parallelize(step)
    state, batch = arguments(100, 4)
    text = explained(planned, state, batch, cluster=SMALL.of(7, 1))
    assert "All devices" not in text and "7 devices don't divide the batch (4): each has 1 or fewer, padded" in text
    text = explained(planned, state, batch, cluster=SMALL.of(1, 1))
    assert "All devices" not in text and "don't divide" not in text
    assert "A step is predicted to take" in text and "Figures: of chalk: as given" in text  # as of one accelerator


def test_named_clusters_say_where_their_figures_come_from() -> None:
    for cluster in NAMED.values():
        parts = (cluster.device, cluster.inside, cluster.between, cluster.to_host)
        assert cluster.host_source and all(part.source for part in parts), cluster.name
