"""Plans as files, their difference, steps that are run by one, and `why`. On several devices: devices/test_plans.py."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import autopar
from autopar import Cluster, Plan, PlanError
from autopar.cost.exchange import sent_bytes
from autopar.ir.cluster import Device, Link
from autopar.ir.figures import Sizes, Term
from autopar.ir.plan import DensePlan, TablePlan
from autopar.measure.alpha import Alpha

SGD, ADAM = optax.sgd(0.1), optax.adam(0.01)
ROWS = 20_000


def make_state(tx: Any = SGD, rows: int = ROWS, **more: Any) -> Any:
    params = {"emb": jax.random.normal(jax.random.key(0), (rows, 4)), "w": jnp.ones((4, 8)), **more}
    return {"params": params, "opt": tx.init(params)}


def make_step(tx: Any = SGD, *, tied: bool = False, more: str | None = None) -> Any:
    def loss_of(p: Any, ids: Any) -> Any:
        logits = p["emb"][ids] @ (p["emb"].T if tied else p["w"])
        return jnp.mean(jnp.tanh(logits) ** 2) + (0 if more is None else p[more][ids].sum())

    def step(state: Any, ids: Any) -> Any:
        loss, grads = jax.value_and_grad(loss_of)(state["params"], ids)
        updates, opt = tx.update(grads, state["opt"], state["params"])
        return {"params": optax.apply_updates(state["params"], updates), "opt": opt}, loss

    return step


IDS = np.random.default_rng(0).integers(0, ROWS, 24, np.int32)
GOLDEN = Path(__file__).parent / "golden" / "plan.json"
EIGHT = Cluster.named("dgx-h100")


def shapes(tree: Any) -> Any:
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), tree)


def plan_of(tx: Any = SGD, *, cluster: Cluster | None = None, ids: Any = IDS, **options: Any) -> Plan:
    written = {k: options.pop(k) for k in ("tied", "more") if k in options}
    return autopar.plan(autopar.parallelize(make_step(tx, **written), **options), make_state(tx), ids, cluster=cluster)


#: One of everything.
BY_HAND = Plan(
    step="train",
    devices=2,
    cluster=Cluster("two", 2, 1, Device("d", 1e9, 1e12, 1e11, "assumed"), Link(1e-6, 1e9), Link(0.1 + 0.2, 1e8), 2**34),
    sparse="lazy",
    tables=(
        TablePlan(
            path="params/wörter",
            shape=(100, 8),
            dtype="bfloat16",
            axis=0,
            slots=("opt/m", "opt/v"),
            ids=12,
            method="ps",
            where="devices",
            lifted=True,
            reason='it "pays" [so far]',
            line="train.py:7",
            capacity=8,
            tight=True,
            cyclic=True,
            log_steps=64,
            alpha=Alpha(10, 100, 12, True, 5.5),
            sizes=Sizes(2, 100, 16, 80, 6, 6, 13, 8, 17, checks=True),
            terms={"ps": (Term("send ids", 1 / 3, 32, "all-to-all"), Term("route", 1e-7)), "allreduce": ()},
        ),
    ),
    dense=(DensePlan("step", (), "int32", 4), DensePlan("params/w", (8, 8), "float32", 256, sharded=True)),
    state_bytes=4321,
)


# --- files ---


def test_a_file_reads_as_it_was_written(tmp_path: Path) -> None:
    BY_HAND.save(tmp_path / "plan.json")
    assert Plan.load(tmp_path / "plan.json") == BY_HAND
    assert [path.name for path in tmp_path.iterdir()] == ["plan.json"]
    lines = [line.strip() for line in (tmp_path / "plan.json").read_text().splitlines()]
    assert '"reason": "it \\"pays\\" [so far]",' in lines and '"path": "params/wörter",' in lines
    step = '{"path": "step", "shape": [], "dtype": "int32", "nbytes": 4, "sharded": false, "unchanged": false},'
    assert step in lines
    assert '{"name": "route", "seconds": 1e-07, "sent": 0, "collective": "", "fixed": false}' in lines


def test_files_of_version_1_are_read() -> None:
    """By later autopars, too: this file isn't to be written anew."""
    assert Plan.load(GOLDEN) == BY_HAND


@pytest.mark.parametrize(
    "made",
    [
        lambda: plan_of(),
        lambda: plan_of(ADAM, strategy="ps", sparse="lazy"),
        lambda: plan_of(tied=True, cluster=EIGHT),
        lambda: plan_of(ADAM, cluster=EIGHT, strategy={"params/w": "ps"}),
        lambda: plan_of(strategy=("ps", "hosts")),
    ],
)
def test_plans_of_steps_survive_a_file(made: Any, tmp_path: Path) -> None:
    plan = made()
    plan.save(tmp_path / "plan.json")
    assert Plan.load(str(tmp_path / "plan.json")) == plan


def damaged(change: Any) -> str:
    text = GOLDEN.read_text()
    if isinstance(change, str):
        return text[: text.index(change)]
    found = json.loads(text)
    change(found)
    return json.dumps(found)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("reason", r"plan.json:\d+: this is no plan, or a damaged one"),
        (lambda f: f.update(format="rates"), "is no plan: it doesn't say"),
        (lambda f: f.update(version=2), r"is a plan of version 2; this autopar reads version 1. Make it again"),
        (lambda f: f.update(plan=[]), "plan is an object, not \\[\\]"),
        (lambda f: f["plan"].update(devices="4"), 'plan.devices is a whole number, not "4"'),
        (lambda f: f["plan"].update(sparse="all"), 'plan.sparse is one of .*, not "all"'),
        (lambda f: f["plan"].update(colour=3), "there is no plan.colour"),
        (lambda f: f["plan"]["tables"][0].pop("method"), r"plan.tables\[0\].method is missing"),
        (
            lambda f: f["plan"]["tables"][0].update(shape=[1, None]),
            r"tables\[0\].shape\[1\] is a whole number, not null",
        ),
        (lambda f: f["plan"]["tables"][0].update(tight=1), r"tables\[0\].tight is true or false, not 1"),
        (lambda f: f["plan"]["tables"][0]["terms"].update(ps=3), r"tables\[0\].terms.ps is a list, not 3"),
        (lambda f: f["plan"]["cluster"].update(machines=0), "plan.cluster: a cluster of 0 machines"),
        (lambda f: f["plan"].update(devices=-4), "plan.json: the plan is damaged: devices is -4. Make it again"),
        (lambda f: f["plan"]["tables"][0].update(method="psx"), "damaged: method of .* is 'psx'"),
        (lambda f: f["plan"]["tables"][0].update(log_steps=-1), "damaged: log_steps of .* is -1"),
        (
            lambda f: f["plan"]["tables"][0].update(dealt=True),
            r"or of an older autopar: .*dealt; .*Make it again",
        ),
    ],
)
def test_what_is_no_plan_is_told(change: Any, message: str, tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    file.write_text(damaged(change))
    with pytest.raises(PlanError, match=message):
        Plan.load(file)


def test_files_that_cannot_be_had(tmp_path: Path) -> None:
    (tmp_path / "image").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(PlanError, match="image is no plan: it is no text"):
        Plan.load(tmp_path / "image")
    with pytest.raises(PlanError, match="missing: the plan can't be read: No such file"):
        autopar.parallelize(make_step(), plan=tmp_path / "missing")
    with pytest.raises(PlanError, match="the plan can't be written: No such file"):
        BY_HAND.save(tmp_path / "nowhere" / "plan.json")


# --- differences ---


def test_differences_have_a_line_each() -> None:
    (table,) = BY_HAND.tables
    later = dataclasses.replace(
        table,
        shape=(200, 8),
        method="allgather",
        where="hosts",
        lifted=False,
        capacity=None,
        cyclic=False,
        log_steps=0,
        reason="other words",
    )
    new = dataclasses.replace(
        BY_HAND, devices=4, tables=(later, dataclasses.replace(table, path="params/b")), dense=BY_HAND.dense[1:]
    )
    assert str(BY_HAND.diff(new)).splitlines() == [
        "the step: devices 2 -> 4",
        "params/wörter: shape [100, 8] -> [200, 8]",
        "params/wörter: method ps -> allgather",
        "params/wörter: where devices -> hosts",
        "params/wörter: rows updated touched -> all",
        "params/wörter: capacity 8 (measured) -> none",
        "params/wörter: rows cyclic -> in shards of adjacent ones",
        "params/wörter: update log 64 -> 0",
        "params/wörter: predicted 333.33 ms -> unknown",
        "step: kind dense -> none",
        "params/b: kind none -> table",
    ]
    assert str(BY_HAND.diff(BY_HAND)) == "no difference" and not BY_HAND.diff(BY_HAND)
    reworded = dataclasses.replace(BY_HAND, tables=(dataclasses.replace(table, reason="other words"),))
    assert not BY_HAND.diff(reworded)


# --- steps that are run by a plan ---


@pytest.mark.parametrize("options", [{"strategy": "ps"}, {"strategy": "allreduce"}, {"sparse": "lazy"}, {}])
@pytest.mark.parametrize("tx", [SGD, ADAM], ids=["sgd", "adam"])
def test_one_device(tx: Any, options: dict[str, Any]) -> None:
    """The same program, so the same numbers; "auto" would decide otherwise for some."""
    theirs = autopar.parallelize(make_step(tx), **options)
    made = autopar.plan(theirs, make_state(tx), IDS)
    mine = autopar.parallelize(make_step(tx), plan=made)
    assert not made.diff(autopar.plan(mine, make_state(tx), IDS))
    states = [make_state(tx), make_state(tx)]
    for _ in range(2):
        states = [run(state, IDS)[0] for run, state in zip((mine, theirs), states, strict=True)]
    jax.tree.map(np.testing.assert_array_equal, *map(autopar.materialize, states))


def test_a_plan_with_tables_on_hosts() -> None:
    made = plan_of(strategy=("ps", "hosts"))
    state, _ = autopar.parallelize(make_step(), plan=made)(make_state(), IDS)
    assert isinstance(state["params"]["emb"], autopar.HostTable)
    expected, _ = make_step()(make_state(), IDS)
    np.testing.assert_allclose(np.asarray(state["params"]["emb"]), expected["params"]["emb"], rtol=1e-6)


def test_files_that_say_what_plans_say_no_more(tmp_path: Path) -> None:
    """`emit`, of an option that there was."""
    made, file = plan_of(), tmp_path / "plan.json"
    made.save(file)
    contents = json.loads(file.read_text())
    contents["plan"]["emit"] = "pjit"
    file.write_text(json.dumps(contents))
    assert Plan.load(file) == made


def test_options_that_the_plan_decides() -> None:
    made = plan_of()
    with pytest.raises(autopar.ArgumentsError, match="strategy= and sparse= given together with plan="):
        autopar.parallelize(make_step(), plan=made, strategy="auto", sparse="exact")
    with pytest.raises(autopar.ArgumentsError, match="plan is a dict; give what autopar.plan returns"):
        autopar.parallelize(make_step(), plan={})  # type: ignore[call-overload]


def misfit(made: Plan, step: Any, state: Any) -> str:
    with pytest.raises(PlanError) as found:
        autopar.parallelize(step, plan=made).planned_for(state, IDS)
    return str(found.value)


def test_what_does_not_fit_is_named(tmp_path: Path) -> None:
    made = plan_of(strategy="ps")
    table = made.table("params/emb")
    other = jnp.ones((ROWS, 4))
    more = make_step(more="other")
    assert "params/other is looked up by rows, and isn't in the plan" in misfit(made, more, make_state(other=other))
    two = dataclasses.replace(made, tables=(table, dataclasses.replace(table, path="params/old")))
    assert misfit(two, make_step(), make_state()) == (
        "the plan of step doesn't fit step: params/old is no table of the step. Plan the step as it is now: "
        "autopar.plan(step, state, batch).save(...); or leave plan= away"
    )
    told = misfit(made, make_step(ADAM), make_state(ADAM))
    assert "params/emb: slots opt/0/mu/emb, opt/0/nu/emb in the step, none in the plan" in told
    wrong = dataclasses.replace(table, shape=(ROWS, 5), dtype="bfloat16", axis=1)
    told = misfit(dataclasses.replace(made, tables=(wrong,)), make_step(), make_state())
    assert "shape [20000, 4] in the step, [20000, 5] in the plan; params/emb: dtype float32 in the step" in told
    assert "axis of rows 0 in the step, 1 in the plan" in told
    told = misfit(made, make_step(tied=True), make_state())
    assert "params/emb: ps on touched rows in the plan, allreduce on all rows in the step (" in told
    assert "test_plans.py:" in told, "the line that refuses it"
    dataclasses.replace(made, devices=2).save(tmp_path / "plan.json")
    with pytest.raises(PlanError, match="plan.json is for 2 devices, and step runs on 1. Give a mesh of 2, or plan"):
        autopar.parallelize(make_step(), plan=str(tmp_path / "plan.json")).planned_for(make_state(), IDS)


def test_rows_that_wait_now_do_not_fit_rows_that_did_not() -> None:
    made = plan_of(ADAM, strategy="ps")
    table = made.table("params/emb")
    assert table.log_steps > 0
    current = dataclasses.replace(made, tables=(dataclasses.replace(table, log_steps=0),))
    assert f"rows wait for 0 steps in the plan, for {table.log_steps}" in misfit(
        current, make_step(ADAM), make_state(ADAM)
    )
    longer = dataclasses.replace(made, tables=(dataclasses.replace(table, log_steps=7),))
    planned = autopar.parallelize(make_step(ADAM), plan=longer)
    assert [f.table.log_steps for f in planned.planned_for(make_state(ADAM), IDS).compiled.bound.families] == [7]


# --- why ---


def test_the_road_not_taken_has_all_its_terms() -> None:
    made = plan_of(cluster=EIGHT)
    table = made.table("params/emb")
    assert table.method != "allreduce"
    found = autopar.why(made, "params/emb", "allreduce")
    assert found.chosen is not None and found.other is not None and found.ratio is not None
    assert (found.chosen.terms, found.other.terms) == (table.terms[table.method], table.terms["allreduce"])
    assert found.ratio == pytest.approx(table.seconds["allreduce"] / table.seconds[table.method])
    assert found.other.sent == 2 * 7 * ROWS * 16 // 8
    told = repr(found)
    assert f"{table.method} was chosen, not allreduce" in told and "reduce the gradient" in told
    assert told.endswith(f"allreduce takes {found.ratio:.3g} times as long")
    assert f"{table.seconds['allreduce'] * 1e3:.3f} ms" in told
    assert "is what was chosen" in str(autopar.why(made, "params/emb", table.method))


def test_bytes_are_told_where_times_are_not_known() -> None:
    (table,) = plan_of(cluster=EIGHT, strategy="ps").tables
    assert table.sizes is not None
    sent = sent_bytes(table.sizes)
    untimed = dataclasses.replace(BY_HAND, tables=(dataclasses.replace(table, terms={}),))
    found = autopar.why(untimed, "params/emb", "allgather")
    assert found.chosen is not None and found.other is not None
    assert (found.chosen.sent, found.other.sent) == (sent["ps"], sent["allgather"])
    assert found.ratio == sent["allgather"] / sent["ps"] and found.other.seconds is None
    assert "times as many bytes; times aren't known" in str(found) and " ms" not in str(found)
    on_hosts = autopar.why(untimed, "params/emb", ("ps", "hosts")).other
    assert on_hosts is not None and on_hosts.name == "ps on hosts"
    assert on_hosts.sent == 7 * table.sizes.requested * (4 + 16 + 16) // 8, "24 ids over 8: 3 each, rows of 16 bytes"
    hosted = dataclasses.replace(untimed, tables=(dataclasses.replace(table, where="hosts", terms={}, capacity=None),))
    back = autopar.why(hosted, "params/emb", "ps")
    assert back.chosen is not None and back.other is not None
    assert (back.chosen.name, back.chosen.sent, back.other.name) == ("ps on hosts", on_hosts.sent, "ps")
    assert back.other.sent == 7 * 3 * (4 + 16 + 16), "a message may have all that a device asks for"


def test_what_cannot_be_had_says_why() -> None:
    made = plan_of(cluster=EIGHT, tied=True)
    table = made.table("params/emb")
    assert table.refused and table.line
    told = str(autopar.why(made, "params/emb", "ps"))
    assert told.startswith(f"params/emb: it can't have ps: {table.reason}, {table.line}")
    assert table.remedy in told
    off = autopar.why(plan_of(cluster=EIGHT, sparse="off"), "params/emb", "ps")
    assert off.other is None and "(sparse='off'). What ps would take isn't known" in str(off)
    one = autopar.why(plan_of(), "params/emb", "allreduce")
    assert "On one device nothing is sent: a step touches 24 of 20000 rows" in str(one)
    with pytest.raises(autopar.ArgumentsError, match="'auto' is no method of its own"):
        autopar.why(made, "params/emb", "auto")
    with pytest.raises(autopar.StrategyError, match="there is no method 'ring'"):
        autopar.why(made, "params/emb", "ring")
    with pytest.raises(autopar.ArgumentsError, match="'params/w' is no table"):
        autopar.why(made, "params/w", "ps")


# --- check ---


def test_one_device_has_no_collective() -> None:
    found = autopar.check(autopar.parallelize(make_step()), *shapes((make_state(), IDS)))
    assert found.ok and found.devices == 1 and not found.rows
    with pytest.raises(autopar.ArgumentsError, match="check takes a step's arguments as well"):
        autopar.check(autopar.parallelize(make_step()))
    with pytest.raises(autopar.ArgumentsError, match="step has tables on hosts: what ranks send goes through MPI"):
        autopar.check(autopar.parallelize(make_step(), strategy=("ps", "hosts")), make_state(), IDS)


def test_a_described_cluster_says_whether_rows_may_wait() -> None:
    """Not the devices of this process: rows that wait pay on CPUs, not on GPUs, where a table is trained whole."""
    size = 2**34
    cpus = Cluster("cpus", 2, 2, Device("core", size / 2, 1e11, 1e10), Link(1e-6, 1e9), Link(1e-5, 1e9), size)
    assert cpus.devices_are_hosts and not EIGHT.devices_are_hosts
    given = jax.eval_shape(lambda: make_state(ADAM, 2**24)), shapes(IDS)
    planned = autopar.parallelize(make_step(ADAM))
    on_cpus, on_gpus = (autopar.plan(planned, *given, cluster=c).table("params/emb") for c in (cpus, EIGHT))
    assert on_cpus.lifted and on_cpus.log_steps
    assert not on_gpus.lifted and not on_gpus.log_steps


@pytest.mark.parametrize("sync", [autopar.sync.Average(), autopar.sync.DPSGD(), autopar.sync.Elastic(0.5)])
def test_check_of_replicas_is_of_a_clients_own_step(sync: Any) -> None:
    found = autopar.check(autopar.parallelize(make_step(), sync=sync), make_state(), IDS)
    assert found.ok and "on one device: nothing travels" in str(found)
    assert "What a client sends the others" in str(found) and "autopar.explain(step, ...)" in str(found)


def test_check_of_what_servers_keep() -> None:
    workers = autopar.parallelize(make_step(), sync=autopar.sync.Async())
    with pytest.raises(autopar.ArgumentsError, match="in messages, .* autopar.explain.*, leave sync= out"):
        autopar.check(workers, make_state(), IDS)
