"""Reports: curves by hand and against the cost model, crossings where curves cross, one page that needs no other."""

from __future__ import annotations

import base64
import dataclasses
import doctest
import importlib
import io
import math
import re
import struct
import subprocess
import sys
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from IPython.core.formatters import DisplayFormatter

import autopar
from autopar import Plan
from autopar.cost.exchange import sent_bytes, transfer_bytes
from autopar.ir.plan import TablePlan
from autopar.measure.cluster import Cluster
from autopar.report.tables import (
    alpha_at,
    by_alpha,
    by_devices,
    by_table_3,
    crossings,
    largest,
    least,
    local_alpha,
    sent_at,
    spaced,
    timings,
)

pytest.importorskip("matplotlib", reason="reports need matplotlib: pip install 'autopar[report]'")

CLUSTER = Cluster.named("parallax-8x6")
FIGURES = ["bytes_by_alpha", "bytes_by_devices", "table_3", "parts", "methods", "speedup", "measured"]
MEASURED = {"ps": (1.0e-3, 1.1e-3), "allreduce": (60e-3, 90e-3)}


def step(state: Any, batch: Any) -> Any:
    def loss_fn(p: Any) -> jax.Array:
        return jnp.mean((p["items"][batch["items"]] @ p["w"]) ** 2) + jnp.mean(p["kinds"][batch["kinds"]] ** 2)

    loss, grads = jax.value_and_grad(loss_fn)(state)
    return jax.tree.map(lambda p, g: p - 0.1 * g, state, grads), loss


def planned(examples: int = 48 * 64, cluster: Cluster | None = CLUSTER, real: bool = True) -> Plan:
    """Tables of 200,000 and 5,000 rows; ids by Zipf's law, or only their shapes."""
    shapes = {"items": (200_000, 32), "kinds": (5000, 32), "w": (32, 32)}
    state = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    drawn = np.random.default_rng(0).zipf(1.3, (2, examples, 10))
    batch: Any = {"items": drawn[0].clip(max=200_000) - 1, "kinds": drawn[1].clip(max=5000) - 1}
    batch = {name: ids.astype(np.int32) for name, ids in batch.items()}
    if not real:
        batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), batch)
    return autopar.plan(autopar.parallelize(step), state, batch, cluster=cluster)


@pytest.fixture(scope="module")
def plan() -> Plan:
    return planned()


@pytest.fixture(scope="module")
def made(plan: Plan) -> autopar.Report:
    return autopar.report(plan, measured=MEASURED)


@pytest.fixture(scope="module")
def items(plan: Plan) -> TablePlan:
    return plan.table("items")


def test_bytes_by_hand(items: TablePlan) -> None:
    """640 ids and a row of 128 bytes: on 10 devices each sends to 9 others, in arrays as long as the ids."""
    sent = sent_at(items, 10)
    assert sent["allgather"] == 9 * 640 * (4 + 128)
    assert sent["allreduce"] == 2 * 9 * 200_000 * 128 // 10
    assert sent["allreduce_rows"] == 9 * 640 * 4 + 2 * 9 * (10 * 640 + 1) * 128 // 10
    assert sent["ps"] % (9 * (4 + 128 + 128)) == 0  # whole rows for each of the others
    fewer = sent_at(items, 10, 64)
    assert fewer["allgather"] == 9 * 64 * (4 + 128) and fewer["allreduce"] == sent["allreduce"]


def test_tables_on_hosts_by_hand(items: TablePlan) -> None:
    """Messages of ranks are as long as they must be: ids, rows and gradients of the distinct rows that one asks for."""
    hosted = dataclasses.replace(items, where="hosts")
    requested = math.ceil(alpha_at(items, 640) * 200_000)
    sent = sent_at(hosted, 10)
    assert sent["ps on hosts"] == sum(9 * requested * size // 10 for size in (4, 128, 128))
    assert sent["allgather"] == sent_at(items, 10)["allgather"] == 9 * 640 * (4 + 128), "arrays of devices are static"


@pytest.mark.parametrize("real", [True, False], ids=["ids", "shapes"])
def test_curves_go_through_the_plan(real: bool) -> None:
    made = planned(real=real)
    for table in made.families:
        assert table.sizes is not None
        wanted, found = sent_bytes(table.sizes), sent_at(table, made.devices)
        # How long the longest message is, is estimated; without ids it has a bound.
        assert found["ps"] == pytest.approx(wanted["ps"], rel=0.2 if real else 1e-9)
        assert {**found, "ps": 0} == {**wanted, "ps": 0}
        curves = by_devices(table)
        assert (curves.own, curves.method, curves.own_sent) == (48, table.method, wanted[table.method])
        assert by_alpha(table).own == local_alpha(table) == pytest.approx(alpha_at(table, table.sizes.ids), rel=0.05)


def test_curves_are_the_cost_model(items: TablePlan) -> None:
    devices, theirs = by_table_3(items)
    assert (devices.x[0], devices.x[-1]) == (2, 10_000)
    for k in (0, 20, -1):
        n = round(devices.x[k])
        assert {m: row[k] for m, row in devices.sent.items()} == sent_at(items, n)
        kinds = {"ps": "sparse", "allgather": "sparse", "allreduce": "dense"}
        told = {m: transfer_bytes(m, kind, b=200_000 * 128, n=n, alpha=local_alpha(items)) for m, kind in kinds.items()}
        assert {m: row[k] for m, row in theirs.items()} == pytest.approx(told)
    alpha = by_alpha(items)
    assert list(alpha.x) == sorted(alpha.x) and alpha.x[0] < alpha.own < alpha.x[-1] <= 1


def test_crossings_by_hand() -> None:
    def at(k: int) -> dict[str, float]:
        return {"square": k * k, "line": 10 * k + 1, "flat": 500}

    # k^2 < 10 k + 1 up to 10; 10 k + 1 < 500 up to 49.
    assert crossings(at, [1, 100]) == [(11, "square", "line"), (50, "line", "flat")]
    assert crossings(at, [1, 5, 10, 11, 49, 50, 1000]) == [(11, "square", "line"), (50, "line", "flat")]
    assert crossings(at, [60, 1000]) == []


@pytest.mark.parametrize("curve", [by_alpha, by_devices])
def test_curves_cross_where_they_say(plan: Plan, curve: Any) -> None:
    count = 0
    for table in plan.families:
        assert table.sizes is not None
        for found in curve(table).crossings:
            near = [
                sent_at(table, k) if curve is by_devices else sent_at(table, 48, k) for k in (found.at - 1, found.at)
            ]
            assert [least(sent) for sent in near] == [found.old, found.new]
            assert found.sent == near[1][found.new]
            count += 1
    assert count, "some curves cross"


def test_points_are_spread() -> None:
    assert spaced(1, 1000, 4) == [1, 10, 100, 1000]
    assert spaced(3, 3) == [3]
    points = spaced(2, 10_000)
    assert (points[0], points[-1]) == (2, 10_000) and points == sorted(set(points))


def test_the_largest_table_is_drawn(plan: Plan, items: TablePlan) -> None:
    assert largest(plan) == items
    other = next(t.path for t in plan.families if t != items)
    assert other in autopar.report(plan, table=other).captions["bytes_by_alpha"]
    with pytest.raises(autopar.ArgumentsError, match="'w' is no table of the plan of step"):
        autopar.report(plan, table="w")
    with pytest.raises(autopar.ArgumentsError, match="report takes a plan: "):
        autopar.report(autopar.parallelize(step))  # type: ignore[arg-type]


def test_tables_say_what_the_plan_says(plan: Plan, made: autopar.Report, items: TablePlan) -> None:
    rows = {row["method"]: row for row in made.tables["methods"] if row["table"] == items.path}
    assert items.sizes is not None
    assert {m: row["bytes a device sends"] for m, row in rows.items()} == sent_bytes(items.sizes)
    assert {m: row["predicted ms"] for m, row in rows.items()} == {m: 1e3 * s for m, s in items.seconds.items()}
    assert [m for m, row in rows.items() if row["chosen"]] == [items.method]
    assert sum(float(row["predicted ms"]) for row in made.tables["parts"]) == pytest.approx(1e3 * plan.seconds)
    simulated = autopar.simulate(plan)
    assert [row["speed-up"] for row in made.tables["scaling"]] == list(simulated.speedups)
    first, last = simulated.times[0], simulated.times[-1]
    assert f"Most of a step is {first.limit}" in made.captions["speedup"]
    assert f"items goes by {first.methods['items']} on one device, " in made.captions["speedup"]
    assert f"{last.methods['items']} from " in made.captions["speedup"]
    assert [row["off by 20% at most"] for row in made.tables["measured"]] == ["yes", "no"]


def lines_of(figure: Any) -> list[tuple[list[float], list[float]]]:
    return [(list(line.get_xdata()), list(line.get_ydata())) for line in figure.axes[0].lines]


def test_figures_show_the_curves(made: autopar.Report, items: TablePlan) -> None:
    assert list(made.figures) == list(made.captions) == FIGURES
    for name, curves in (("bytes_by_alpha", by_alpha(items)), ("bytes_by_devices", by_devices(items))):
        shown = lines_of(made.figures[name])
        assert all((list(curves.x), list(sent)) in shown for sent in curves.sent.values())
        words = {text.get_text() for text in made.figures[name].axes[0].texts}
        assert words >= {"this plan", *curves.sent}
    assert [figure.get_figwidth() for figure in made.figures.values()] == [3.5] * len(FIGURES)


def test_text_can_be_read(made: autopar.Report) -> None:
    """8 points at least, in words of the figure and at its axes."""
    for figure in made.figures.values():
        for axes in figure.axes:
            texts = [*axes.texts, axes.title, axes.xaxis.label, axes.yaxis.label]
            texts += [*axes.get_xticklabels(), *axes.get_yticklabels()]
            assert min(text.get_fontsize() for text in texts) >= 8
            assert "" not in (axes.get_xlabel(),)


class Page(HTMLParser):
    """What a page refers to, and its texts."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.tags: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.links += [value or "" for name, value in attrs if name in ("src", "href", "srcset", "data", "action")]


def test_one_page_holds_all(made: autopar.Report, tmp_path: Path) -> None:
    made.save_html(tmp_path / "report.html")
    text = (tmp_path / "report.html").read_text(encoding="utf-8")
    page = Page(text)
    assert page.tags.count("img") == page.tags.count("figcaption") == len(FIGURES)
    images = [link for link in page.links if link.startswith("data:image/png;base64,")]
    assert page.links == images, "nothing is loaded from elsewhere"
    assert not re.search(r"https?:|@import|url\(|<script|<link", text)
    assert all(base64.b64decode(link.split(",")[1]).startswith(b"\x89PNG") for link in images)
    assert page.tags.count("table") == sum(1 for rows in made.tables.values() if rows)
    assert made._repr_html_() in text


def test_figures_are_small_pictures_in_a_notebook(made: autopar.Report) -> None:
    for figure in made.figures.values():
        data, shown = DisplayFormatter().format(figure)
        assert data["image/png"] == figure.png() and len(figure.png()) < 30_000
        assert shown["image/png"]["width"] == figure.get_figwidth() * 100


def test_names_are_escaped(plan: Plan) -> None:
    text = autopar.report(dataclasses.replace(plan, step="<script>step & co"))._repr_html_()
    assert "&lt;script&gt;step &amp; co" in text and "<script>" not in text


def test_images_are_written(made: autopar.Report, tmp_path: Path) -> None:
    files = made.save_png(tmp_path / "new" / "figures")
    assert [file.name for file in files] == [f"{name}.png" for name in FIGURES]
    for file, figure in zip(files, made.figures.values(), strict=True):
        content = file.read_bytes()
        size = struct.unpack(">II", content[16:24])
        assert size == tuple(int(200 * inches) for inches in figure.get_size_inches())
    with pytest.raises(autopar.ArgumentsError, match="the figures can't be written: "):
        made.save_png(files[0])
    with pytest.raises(autopar.ArgumentsError, match="the report can't be written: No such file"):
        made.save_html(tmp_path / "none" / "report.html")


def test_what_is_left_out_is_said() -> None:
    alone = autopar.report(planned(cluster=None), measured=[("here", 1.0, 1.0)])
    assert list(alone.figures) == ["updates", "measured"]
    assert list(alone.tables) == ["parameters", "updates", "measured"]
    items, _, others = autopar.report(planned(examples=48, cluster=None)).tables["updates"]
    assert items["bytes of a plain step"] == 4 * 200_000 * 32 * 4 and others["bytes of this plan"] == 2 * 32 * 32 * 4
    assert 0 < items["bytes of this plan"] <= items["bytes of a plain step"] * 480 / 200_000, "sparse: 480 ids"
    assert "No figure of bytes: the plan of step is of one device" in alone.notes[0]
    assert "No speed-up: " in alone.notes[1] and alone.notes[1] in alone._repr_html_()
    without = dataclasses.replace(planned(), cluster=None, parts={})
    found = autopar.report(without)
    assert "report(plan, cluster=...)" in found.notes[-1] and "without rates" in found.notes[0]
    assert list(autopar.report(without, cluster=CLUSTER).figures)[-1] == "speedup"


def test_what_a_step_only_reads_has_no_update() -> None:
    def adapted(state: Any, ids: jax.Array) -> Any:
        loss = lambda rows, w: ((state["frozen"][ids] @ state["mix"] + rows[ids] @ w) ** 2).mean()  # noqa: E731
        grads = jax.grad(loss, argnums=(0, 1))(state["rows"], state["w"])
        return {**state, "rows": state["rows"] - grads[0], "w": state["w"] - grads[1]}

    shapes = {"frozen": (5000, 4), "mix": (4, 4), "rows": (5000, 2), "w": (2, 4)}
    state = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}
    ids = jax.ShapeDtypeStruct((8,), jnp.int32)
    rows = autopar.report(autopar.plan(autopar.parallelize(adapted), state, ids)).tables["updates"]
    assert [row["leaves"] for row in rows] == ["rows", "all others"]
    assert rows[1]["bytes of a plain step"] == 2 * 2 * 4 * 4, "w alone"


def changed(plan: Plan, **sizes: Any) -> Plan:
    """The plan with other sizes of its tables."""
    tables = [dataclasses.replace(t, sizes=dataclasses.replace(t.sizes, **sizes)) for t in plan.tables if t.sizes]
    return dataclasses.replace(plan, tables=tuple(tables))


def test_methods_that_send_nothing_are_not_drawn(plan: Plan) -> None:
    """Where every device has the whole batch, only "ps" sends something; nothing has no place on a log axis."""
    for method, words in {"allgather": ["ps"], "ps": ["this plan", "ps"]}.items():
        tables = tuple(dataclasses.replace(t, method=method) for t in plan.tables)
        found = autopar.report(changed(dataclasses.replace(plan, tables=tables), spread=False))
        assert [text.get_text() for text in found.figures["bytes_by_devices"].axes[0].texts] == words
    assert {row["method"]: row["bytes a device sends"] for row in found.tables["methods"]}["allgather"] == 0


def test_tables_on_hosts_are_drawn_and_said(plan: Plan) -> None:
    tables = tuple(dataclasses.replace(t, where="hosts", method="ps", terms={}) for t in plan.tables)
    found = autopar.report(dataclasses.replace(plan, tables=tables))
    assert "methods" not in found.figures and found.notes == ()
    assert "items goes by ps on hosts." in found.captions["speedup"]
    assert {"ps on hosts", "this plan"} <= {t.get_text() for t in found.figures["bytes_by_alpha"].axes[0].texts}


@pytest.mark.parametrize(("count", "shown"), [(2, ["far", "near 0", "near 1"]), (20, ["far"])])
def test_of_many_times_those_outside_the_band_are_labelled(plan: Plan, count: int, shown: list[str]) -> None:
    told = {f"near {k}": (1.0 + k, 1.1 * (1.0 + k)) for k in range(count)} | {"far": (9.0, 4.0)}
    (axes,) = autopar.report(plan, measured=told).figures["measured"].axes
    assert sorted(text.get_text() for text in axes.texts) == shown
    points = {(x[0], y[0]) for x, y in lines_of(axes.figure) if len(x) == 1}
    assert points == {(measured, predicted) for predicted, measured in told.values()}


def test_docstring_examples() -> None:
    for name, examples in (("autopar.report.build", 5), ("autopar.report.style", 2)):
        found = doctest.testmod(importlib.import_module(name))
        assert found.attempted >= examples and found.failed == 0


def test_labels_of_points_do_not_lie_on_each_other(plan: Plan) -> None:
    told = {f"allreduce_rows, V={k}": (1e-3 * (1 + k / 30), 1e-3) for k in range(8)}
    (axes,) = autopar.report(plan, measured=told).figures["measured"].axes
    texts = [text for text in axes.texts if text.get_text()]
    boxes = [text.get_window_extent() for text in texts]
    assert texts and texts[0].get_text() == "allreduce_rows, V=7", "one outside of the band comes first"
    assert not any(a.overlaps(b) for k, a in enumerate(boxes) for b in boxes[:k])


@pytest.mark.parametrize(
    ("measured", "said"),
    [
        ([("a", 1.0)], r"measured: \('a', 1.0\) isn't \(label, predicted seconds, measured seconds\)"),
        ({"a": 1.0}, r"measured: \('a', 1.0\) isn't \(label, "),
        ([3], r"measured: \(3,\) isn't"),
        ({"a": (1.0, 0.0)}, "measured: 'a' has times 1.0, 0.0; give seconds, more than 0"),
        ({"a": (float("nan"), 1.0)}, "measured: 'a' has times nan, 1.0"),
        ({"a": ("fast", 1.0)}, "measured: 'a' has times 'fast', 1.0"),
    ],
)
def test_wrong_times_are_told(measured: Any, said: str) -> None:
    with pytest.raises(autopar.ArgumentsError, match=said):
        timings(measured)


def test_times_of_numpy_and_jax() -> None:
    (found,) = timings({"a": [np.float32(0.5), jnp.float32(0.4)]})
    assert found.ratio == pytest.approx(1.25) and not found.near
    assert timings([("b", 1.2, 1.0)])[0].near


def test_matplotlib_is_imported_when_it_is_needed() -> None:
    """Not by autopar; and where it isn't installed, the extra is named."""
    program = (
        "import sys, autopar\n"
        "assert 'matplotlib' not in sys.modules\n"
        "sys.modules['matplotlib'] = None\n"
        "try:\n    autopar.report(None)\n"
        "except autopar.ArgumentsError as error:\n    print(error)\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True).stdout
    assert "reports need matplotlib" in told and "pip install 'autopar[report]'" in told


def test_nothing_of_matplotlib_is_set(plan: Plan, uninstalled: Callable[[str], None]) -> None:
    """Nor is pyplot needed, which keeps every figure."""
    import matplotlib

    before = dict(matplotlib.rcParams)
    uninstalled("matplotlib.pyplot")
    autopar.report(plan, measured=MEASURED).figures["parts"].savefig(io.BytesIO())
    assert dict(matplotlib.rcParams) == before
