"""Reports of steps with `sync=`: figures have the numbers of `simulate`, and those of a timeline by hand."""

from __future__ import annotations

import dataclasses
import itertools
import re
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import autopar
from autopar.ir.cluster import Device, Link
from autopar.measure.cluster import Cluster
from autopar.sync import ADPSGD, DPSGD, Async, Average, Elastic, Hybrid
from tests.unit.planning.test_simulate_clients import table_plan
from tests.unit.report.test_report import Page, lines_of

pytest.importorskip("matplotlib", reason="reports need matplotlib: pip install 'autopar[report]'")
# After what needs matplotlib.
from autopar.report.clients import FACTORS, name_of, simulate_stragglers, straggler_figure, ways

CLUSTER = Cluster("chalk", 4, 1, Device("chalk", 1e9, 1e8, 1e10), Link(0.0, 1e9), Link(1e-4, 1e8), 1e9)
#: One server for three workers: 0 pushes twice, 1 once, 0 again, 2 once; and a second server, in another order.
TIMELINE = autopar.Timeline(
    3,
    None,
    [
        np.array([(0, 0, 0), (0, 1, 1), (1, 0, 0), (0, 2, 2), (2, 0, 0)]),
        np.array([(1, 0, 0), (0, 0, 0), (0, 1, 2), (2, 0, 1), (0, 2, 3)]),
    ],
)


def step(state: Any, batch: Any) -> Any:
    loss, grads = jax.value_and_grad(lambda p: jnp.mean((jnp.tanh(batch @ p["a"]) @ p["b"]) ** 2))(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def planned(sync: Any) -> autopar.Plan:
    state = {"a": jnp.eye(32), "b": jnp.eye(32)}
    return autopar.plan(autopar.parallelize(step, sync=sync), state, jnp.ones((64, 32)))


@pytest.fixture(scope="module")
def plan() -> autopar.Plan:
    return planned(Async())


@pytest.fixture(scope="module")
def made(plan: autopar.Plan) -> autopar.Report:
    return autopar.report(plan, cluster=CLUSTER, timeline=TIMELINE, measured={"4 workers": (1.0, 1.1)})


def test_what_a_report_has(made: autopar.Report) -> None:
    assert list(made.figures) == list(made.captions) == ["stragglers", "steps", "workers", "staleness", "measured"]
    assert list(made.tables) == ["parameters", "exchanges", "stragglers", "steps", "workers", "staleness", "measured"]
    assert made.title == "step by 1 worker, 1 server, asynchronous SGD"
    assert "Servers: 1 worker trains one state" in made.notes[0] and len(made.notes) == 2
    (server,) = made.tables["exchanges"]
    assert server["pulled in a step, bytes"] == server["pushed in a step, bytes"] == 2 * 32 * 32 * 4


def test_stragglers_are_those_that_are_simulated(plan: autopar.Plan, made: autopar.Report) -> None:
    shown = lines_of(made.figures["stragglers"])
    assert ([*FACTORS], [3 + 1 / c for c in FACTORS]) in shown and ([*FACTORS], [4 / c for c in FACTORS]) in shown
    rows = made.tables["stragglers"]
    assert {row["mode"] for row in rows} == {"Async()", "Average()", "Async(staleness=4)"}
    for mode, several in itertools.groupby(rows, lambda row: row["mode"]):
        speedups = [row["speed-up"] for row in several]
        assert ([*FACTORS], speedups) in shown
        assert all(a > b for a, b in itertools.pairwise(speedups)), mode
    step_s = autopar.simulate(plan, cluster=CLUSTER).step_s
    for row in rows:
        way = ways(plan)[str(row["mode"])]
        found = autopar.simulate(way, cluster=CLUSTER, slow={3: row["c"]}, step_s=step_s, steps=60)
        assert row["speed-up"] == found.speedups[0] and row["minibatches a second"] == found.times[0].minibatches_s
        assert row["speed-up"] < row["(n-1) + 1/c"]
    words = {text.get_text() for text in made.figures["stragglers"].axes[0].texts}
    assert words == {"this plan", "Average()", "Async(staleness=4)", "(n-1) + 1/c", "n/c"}
    assert "4 clients" in made.captions["stragglers"] and "This plan is Async()." in made.captions["stragglers"]


@pytest.mark.parametrize(
    ("sync", "names"),
    [
        (Average(), ["Average()", "Async(staleness=4)", "Async()"]),
        (Average(every=10), ["Average(every=10)", "Average()", "Async(staleness=4)", "Async()"]),
        (
            Average(every=10, fragments=2, delay=3),
            ["Average(every=10, fragments=2, delay=3)", "Average()", "Async(staleness=4)", "Async()"],
        ),
        (Async(staleness=4), ["Async(staleness=4)", "Average()", "Async()"]),
        (Async(staleness=1), ["Async(staleness=1)", "Average()", "Async(staleness=4)", "Async()"]),
        (Elastic(0.2), ["Elastic(interval=64)", "Average()", "Async(staleness=4)", "Async()"]),
        (Hybrid(), ["Hybrid()", "Average()", "Async(staleness=4)", "Async()"]),
        (DPSGD(), ["DPSGD()", "Average()", "Async(staleness=4)", "Async()"]),
        (ADPSGD(), ["ADPSGD()", "Average()", "Async(staleness=4)", "Async()"]),
    ],
)
def test_ways_beside_a_plans_own(sync: Any, names: list[str]) -> None:
    """Each is the plan that the step has by that way: the same bytes."""
    made = planned(sync)
    found = ways(made)
    assert list(found) == names and found[names[0]] is made
    own = planned(Async()).served
    served = found["Async()"].served
    assert own is not None and served is not None
    assert [(s.leaf_bytes, s.pull_bytes, s.push_bytes) for s in served.servers] == [
        (s.leaf_bytes, s.pull_bytes, s.push_bytes) for s in own.servers
    ]
    averaged = found["Average()"].sync
    assert averaged is not None and averaged.mean_bytes == planned(Average()).sync.mean_bytes
    shown = autopar.report(made, cluster=CLUSTER)
    assert [name for name, _ in itertools.groupby(row["mode"] for row in shown.tables["stragglers"])] == names
    assert "stragglers" in shown.figures and len(shown.tables["exchanges"]) == (2 if sync.__dict__.get("delay") else 1)


def test_ways_of_tables_by_rows() -> None:
    """Servers have a minibatch's rows pulled and pushed, means those that all clients touched."""
    served, averaged = table_plan(Async()), table_plan(Average())
    (wanted,), (found,) = served.served.servers, ways(averaged)["Async()"].served.servers
    assert (found.leaf_bytes, set(found.leaves)) == (wanted.leaf_bytes, set(wanted.leaves))
    assert found.pull_bytes == found.push_bytes == 6400 + 1024
    assert 0 < wanted.pull_bytes - found.pull_bytes <= 100 * 4 + 64, "the numbers of the rows, and one more row"
    assert ways(averaged)["Async()"].served.by_rows == served.served.by_rows
    assert ways(served)["Average()"].sync.mean_bytes == pytest.approx(averaged.sync.mean_bytes, abs=464)
    rates = [
        autopar.simulate(plan, cluster=CLUSTER, step_s=1e-3).times[0].minibatches_s
        for plan in (averaged, ways(served)["Average()"])
    ]
    assert rates[0] == pytest.approx(rates[1], rel=0.01)


def test_a_timeline_by_hand(made: autopar.Report) -> None:
    """Late: of the first server 0, 0, 2, 1, 4; of the second 0, 1, 0, 2, 1."""
    assert [(row["staleness"], row["pushes"]) for row in made.tables["staleness"]] == [(0, 4), (1, 3), (2, 2), (4, 1)]
    (axes,) = made.figures["staleness"].axes
    bars = {round(bar.get_x() + bar.get_width() / 2): bar.get_height() for bar in axes.patches}
    assert bars == pytest.approx({0: 0.4, 1: 0.3, 2: 0.2, 3: 0.0, 4: 0.1})
    assert "mean 1.10" in [text.get_text() for text in axes.texts]
    rows = [tuple(row.values()) for row in made.tables["workers"]]
    assert rows == [(0, 3, pytest.approx(3 / 6), 1), (1, 1, 1.0, 2), (2, 1, 3.0, 4)]
    (axes,) = made.figures["workers"].axes
    assert [bar.get_width() for bar in axes.patches] == [3, 1, 1]
    assert [text.get_text() for text in axes.texts] == ["3", "1", "1"]
    assert "5 in all, at least 1 and at most 3" in made.captions["workers"]
    assert "1.10 on average, at most 4" in made.captions["staleness"]


def test_long_timelines_and_many_workers(plan: autopar.Plan) -> None:
    """Staleness is drawn in groups of as many numbers; all pushes are in some bar."""
    late = 70
    events = [(w, 0, 0) for w in range(late + 1)]
    timeline = autopar.Timeline(late + 1, None, [np.array(events)])
    found = autopar.report(plan, timeline=timeline)
    bars = found.figures["staleness"].axes[0].patches
    assert len(bars) == 24 and sum(bar.get_height() for bar in bars) == pytest.approx(1)
    assert len(found.figures["workers"].axes[0].patches) == late + 1
    assert not found.figures["workers"].axes[0].texts
    empty = autopar.report(plan, timeline=autopar.Timeline(2, None, [np.zeros((0, 3), np.int64)]))
    assert list(empty.figures) == ["workers"]
    assert [tuple(row.values()) for row in empty.tables["workers"]] == [(0, 0, "", ""), (1, 0, "", "")]


def test_what_was_simulated_can_be_shown(plan: autopar.Plan) -> None:
    simulated = autopar.simulate(plan, cluster=CLUSTER, slow={3: 5.0}, variation=0.2)
    timeline = simulated.times[0].timeline
    found = autopar.report(plan, timeline=timeline)
    assert [row["minibatches"] for row in found.tables["workers"]] == list(timeline.steps)
    assert sum(row["pushes"] for row in found.tables["staleness"]) == len(timeline.staleness)


def test_minibatches_of_a_ring() -> None:
    """Own steps of passive clients, 1 and 3, and the exchanges of active ones, 0 and 2, which are one a step (figure 6
    of Zhang et al.)."""
    events = [[(0, 0, 0), (1, 0, 0), (1, 1, 2), (2, 0, 3)], [(3, 0, 0), (2, 0, 1), (0, 0, 2), (2, 1, 3)]]
    timeline = autopar.Timeline(4, None, [np.array(each) for each in events], ring=True)
    found = autopar.report(planned(ADPSGD()), timeline=timeline)
    assert list(found.figures) == ["workers"] and "minibatches of each worker: 8 in all" in found.captions["workers"]
    kinds = [(0, 2, "active"), (1, 2, "passive"), (2, 3, "active"), (3, 1, "passive")]
    assert [tuple(row.values()) for row in found.tables["workers"]] == kinds
    assert [bar.get_width() for bar in found.figures["workers"].axes[0].patches] == [2, 2, 3, 1]
    simulated = autopar.simulate(planned(ADPSGD()), cluster=CLUSTER, slow={0: 5.0})
    shown = autopar.report(planned(ADPSGD()), timeline=simulated.times[0].timeline)
    minibatches = [client.minibatches for client in simulated.times[0].clients]
    assert [row["minibatches"] for row in shown.tables["workers"]] == minibatches


@pytest.mark.parametrize("sync", [Hybrid(), DPSGD(), ADPSGD(), Average(every=10), Async()])
def test_what_a_step_is_made_of(sync: Any) -> None:
    """By the first of what is simulated of each way, where no client is slower. Bars begin where others end."""
    made = planned(sync)
    slow = dataclasses.replace(CLUSTER, between=Link(1e-4, 6e5))
    found, simulated = autopar.report(made, cluster=slow), autopar.simulate(made, cluster=slow, steps=60)
    rows = [row for row in found.tables["steps"] if row["mode"] == name_of(made)]
    clients = simulated.times[0].clients
    groups = [clients[::2], clients[1::2]] if isinstance(sync, ADPSGD) else [clients]
    assert [row["clients"] for row in rows] == (["active", "passive"] if isinstance(sync, ADPSGD) else ["all"])
    for row, some in zip(rows, groups, strict=True):
        assert row["gradients, ms"] + row["update, ms"] == pytest.approx(1e3 * simulated.step_s)
        assert (row["update, ms"] > 0) == (not isinstance(sync, Async))
        exchange_s, hidden_s = (
            sum(getattr(client, name) for client in some) / sum(client.minibatches for client in some)
            for name in ("exchange_s", "hidden_s")
        )
        assert row["communication waited for, ms"] == pytest.approx(1e3 * exchange_s)
        assert row["communication hidden, ms"] == pytest.approx(1e3 * hidden_s)
        assert row["bandwidth to break even, bytes/s"] == row["sent in a step, bytes"] / simulated.step_s
    sent = {Hybrid: 1.5, Average: 0.15}.get(type(sync), 1.0) * 2 * 32 * 32 * 4
    assert rows[0]["sent in a step, bytes"] == pytest.approx(sent)
    assert (rows[0]["communication hidden, ms"] > 0) == isinstance(sync, Hybrid | ADPSGD)
    (axes,) = found.figures["steps"].axes
    for k, row in enumerate(found.tables["steps"]):
        bars = [bar for bar in axes.patches if round(bar.get_y() + bar.get_height() / 2 - k, 6) == 0]
        total = sum(row[name] for name in row if name.endswith(", ms")) - row["communication hidden, ms"]
        assert max(bar.get_x() + bar.get_width() for bar in bars) == pytest.approx(total)
    assert axes.get_yticklabels()[0].get_text().startswith("this plan")
    legend = axes.get_legend().get_window_extent()
    assert 0 <= legend.x0 and legend.x1 <= found.figures["steps"].bbox.x1


def test_exchanges_with_a_center() -> None:
    """Each is of one pair of weights: nothing is stale."""
    found = autopar.report(planned(Elastic(0.2)), timeline=TIMELINE)
    assert list(found.figures) == ["workers"] and "exchanges" in found.tables["workers"][0]
    assert "The exchanges of each worker" in found.captions["workers"]


@pytest.mark.parametrize(
    ("cluster", "said"),
    [
        (None, "of devices that are here it isn't simulated; report(plan, cluster=...)"),
        (CLUSTER.of(1), "has devices for 1 of its clients, of 1 devices each"),
        (CLUSTER.of(21), "21 clients take long to simulate; give fewer machines"),
    ],
)
def test_what_is_left_out_is_said(plan: autopar.Plan, cluster: Any, said: str) -> None:
    found = autopar.report(plan, cluster=cluster)
    assert not found.figures and found.notes[-1].startswith("No figure of stragglers: ")
    assert said in found.notes[-1] and found.notes[-1] in found._repr_html_().replace("&#x27;", "'")


def test_an_odd_ring_is_left_out() -> None:
    found = autopar.report(planned(DPSGD()), cluster=CLUSTER.of(3))
    assert "No figure of stragglers: devices=3, sync=DPSGD(): 3 clients make an odd ring" in found.notes[-1]


def test_bad_timelines_are_told(plan: autopar.Plan) -> None:
    with pytest.raises(autopar.ArgumentsError, match="timeline is a list; give what servers did, autopar.timeline"):
        autopar.report(plan, timeline=[[0, 0, 0]])  # type: ignore[arg-type]
    for other in (planned(Average()), planned(None)):
        with pytest.raises(autopar.ArgumentsError, match=re.escape("of step has none: leave it out, or plan")):
            autopar.report(other, timeline=TIMELINE)
    with pytest.raises(autopar.ArgumentsError, match="the timeline is of servers, and the plan of step .* by a ring:"):
        autopar.report(planned(ADPSGD()), timeline=TIMELINE)
    ring = autopar.Timeline(2, None, [np.zeros((0, 3), np.int64)], ring=True)
    with pytest.raises(autopar.ArgumentsError, match="the timeline is of a ring, and the plan of step .* by servers:"):
        autopar.report(plan, timeline=ring)
    with pytest.raises(autopar.ArgumentsError, match=re.escape("of step has none: leave it out, or plan")):
        autopar.report(planned(DPSGD()), timeline=ring)
    with pytest.raises(autopar.ArgumentsError, match="cluster is a str; give a Cluster"):
        autopar.report(plan, cluster="dgx-h100")  # type: ignore[arg-type]


def test_one_page_holds_all(made: autopar.Report, tmp_path: Path) -> None:
    made.save_html(tmp_path / "report.html")
    page = Page((tmp_path / "report.html").read_text(encoding="utf-8"))
    assert page.tags.count("img") == page.tags.count("figcaption") == len(made.figures)
    assert page.tags.count("table") == sum(1 for rows in made.tables.values() if rows)
    assert all(link.startswith("data:image/png;base64,") for link in page.links)
    for figure in made.figures.values():
        (axes,) = figure.axes
        texts = [*axes.texts, axes.title, axes.xaxis.label, axes.yaxis.label, *axes.get_xticklabels()]
        assert min(text.get_fontsize() for text in texts) >= 8 and axes.get_xlabel()


def test_labels_of_long_names_leave_room() -> None:
    """The label of the horizontal axis is inside of the figure, whatever ways are beside it."""
    found = simulate_stragglers(planned(Average(every=10, fragments=2, delay=3)), CLUSTER)
    figure = straggler_figure(found)
    box = figure.axes[0].xaxis.label.get_window_extent()
    assert 0 <= box.x0 and box.x1 <= figure.bbox.x1
