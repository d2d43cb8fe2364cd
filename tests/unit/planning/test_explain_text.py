"""What `explain` prints: nothing is wider than where it is printed, and nothing is cut."""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from autopar.ir.figures import format_bytes
from autopar.ir.plan import DensePlan, PipelinePlan, StagePlan, TablePlan
from autopar.measure.alpha import Alpha
from autopar.planning.explain import ExplainedLeaf, Explanation
from autopar.planning.text import fold_numbers, fold_paths, ranged, without_numbers

METHODS: tuple[str, ...] = ("ps", "allgather", "allreduce_rows", "allreduce")
LONG = "params/a_rather_long_name_of_a_module/another_long_name/item_embedding_of_the_catalogue/embedding"


def dense(path: str, size: int = 4096, **plan: Any) -> ExplainedLeaf:
    leaf = DensePlan(path, (16, size // 64), "float32", size, **plan)
    action = "dense, in shards, ps" if leaf.sharded else "dense"
    return ExplainedLeaf(leaf, size, 0, None, action, 2 * size, 2 * size, sent=leaf.sent)


def table(path: str, action: str, **plan: Any) -> ExplainedLeaf:
    fields = {"method": "ps", "where": "devices", "lifted": True, "line": f"/home/user/{path}/train.py:12"} | plan
    told = TablePlan(path, (800_000, 256), "float32", 0, ("opt/0/mu",), 640, **fields)
    sent = {method: 1 << 10 * k for k, method in enumerate(METHODS)}
    times = dict.fromkeys(METHODS, 0.12345)
    alpha = Alpha(600, 800_000, 640, measured=False, local_rows=200)
    return ExplainedLeaf(
        told, 1 << 30, 2, alpha, action, 3 << 30, 1 << 20, sent=sent, seconds=times, table_3={"ps": 1, "allreduce": 2}
    )


def layers(root: str, **plan: Any) -> Iterator[ExplainedLeaf]:
    for k in range(12):
        for name in ("attention/query/kernel", "attention/query/bias", "mlp/up/kernel", "mlp/up/bias"):
            yield dense(f"{root}/layer_{k}/{name}", **plan)


TABLES = (
    table(LONG, "sparse, others deferred, ps on hosts", reason="rows " * 40 + "end", where="hosts"),
    table("params/users", "dense, in shards", reason="a full softmax; " * 9, remedy="use a sampled one " * 5),
)
STAGES = tuple(
    StagePlan((2 * k, 2 * k + 1), tuple(row.path for row in layers(f"params/stage_{k}")), dict.fromkeys("FBW", 0.01234))
    for k in range(4)
)
EXPLAINED = {
    "tables": Explanation("train_step", (*TABLES, dense("params/w")), (), 0.1, "exact", 8),
    "many dense leaves": Explanation(
        "train_step", (*layers("params/encoder"), *layers("opt/0/mu/encoder"), dense("params/out")), (), 0.1, "exact"
    ),
    "dense shards": Explanation(
        "train_step",
        (*layers("params/encoder", sharded=True, reason="too large " * 20, sent={"ps": 3, "allreduce": 5}), *TABLES),
        (),
        0.1,
        "exact",
        8,
    ),
    "hosts": Explanation("train_step", TABLES, (), 0.1, "lazy", 8, hosted=f"Reduced: {'why ' * 50}.\nStages: a, b."),
    "stages": Explanation(
        "train_step",
        tuple(layers("params")),
        (("analyze_rows", "note " * 30, 0.1),),
        0.1,
        "exact",
        notes=("first", f"  {'indented ' * 30}", f"no_spaces_in_{'it' * 90}"),
        pipeline=PipelinePlan("zero-bubble", 8, STAGES, tensor=2, candidates=(("1 stage of 8 devices, 1f1b", 0.12),)),
        tensor=2,
        verbose=True,
    ),
    "an evaluation": Explanation("evaluate", (), (), 0.1, "exact", notes=("note " * 40,)),
}


@pytest.mark.parametrize("width", [80, 100, 120, 200])
@pytest.mark.parametrize("name", EXPLAINED)
def test_lines_fit_and_nothing_is_cut(name: str, width: int, environment: Callable[..., None]) -> None:
    told = EXPLAINED[name]
    environment(COLUMNS=str(width))
    text = str(told)
    assert all(len(line) <= width for line in text.splitlines()), text
    assert "…" not in text
    said = [*told.notes, *told.hosted.splitlines(), *(note for _, note, _ in told.passes if told.verbose)]
    for row in told.rows:
        said += [row.reason, row.path if len(told.rows) < 8 else ""]
        if isinstance(row.plan, TablePlan):
            said += [f"{row.path}: {row.action}", row.plan.line, row.plan.remedy, *map(format_bytes, row.sent.values())]
    # Blanks and ends of lines are where something is wrapped.
    written = re.sub(r"\s", "", text)
    assert not [what for what in said if re.sub(r"\s", "", what) not in written]


def test_as_wide_as_the_terminal_when_it_is_printed(environment: Callable[..., None]) -> None:
    told = EXPLAINED["tables"]
    widths = []
    for columns in ("80", "120"):
        environment(COLUMNS=columns)
        widths.append(max(map(len, str(told).splitlines())))
    assert 60 < widths[0] <= 80 < widths[1] <= 120
    environment(COLUMNS=None)  # nothing is known: pytest has taken the terminal
    assert max(map(len, str(told).splitlines())) == widths[0]
    assert "touched" in told._repr_html_()


def test_what_a_wide_terminal_has_room_for(environment: Callable[..., None]) -> None:
    told = EXPLAINED["many dense leaves"]
    for columns, shown in (("80", False), ("160", True)):
        environment(COLUMNS=columns)
        assert ("shape" in str(told)) == shown == ("plain step" in str(told))


def test_every_dense_parameter_is_in_one_line_with_its_slots(environment: Callable[..., None]) -> None:
    told = EXPLAINED["many dense leaves"]
    environment(COLUMNS="100")
    text = str(told)
    body = text.split("─\n")[1].split("\n\n")[0]
    assert "params/encoder/layer_{0..11}/mlp/up/kernel (12) " in body and "\nparams/out " in body
    assert not re.search("^opt", body, re.MULTILINE), "Adam's moments are counted with their parameters"
    counts = [int(count) for count in re.findall(r"\((\d+)\)", body)]
    lines = len(re.findall("^params/", body, re.MULTILINE))
    parameters = sum(row.path.startswith("params/") for row in told.rows)
    assert lines <= 8 and parameters == sum(counts) + lines - len(counts)
    environment(COLUMNS="160")
    wide = str(told)
    assert re.search(r"mlp/up/kernel \(12\) .* 1  \[", wide), "the number of slots of each"
    assert format_bytes(sum(row.nbytes for row in told.rows if "mlp/up/kernel" in row.path)) in wide


def test_many_tables_that_differ_in_their_sizes_share_a_line(environment: Callable[..., None]) -> None:
    environment(COLUMNS="120")

    def told(count: int) -> str:
        reasons = [f"at most 5 of {1000 * (k + 1)} rows; {k + 1:.1f} MiB for the log" for k in range(count)]
        tables = [table(f"params/table_{k}/embedding", "ps", reason=r, line="a.py:12") for k, r in enumerate(reasons)]
        other = table("params/table_99/embedding", "dense", reason="a full softmax", method="allreduce")
        return str(Explanation("step", (*tables, other, dense("params/w")), (), 0.1, "exact", 8))

    many = told(26)
    assert re.search(r"^params/table_\{0\.\.25\}/embedding \(26\) +26\.0 GiB", many, re.MULTILINE)
    assert (
        "table_{0..25}/embedding: ps: at most 5 of 1000 to 26000 rows; 1.0 MiB to 26.0 MiB for the log (alpha 0.03% on "
        "each device; a.py:12)" in " ".join(many.split())
    )
    taken = [("ps", "26 B", "3209.70"), ("allreduce", "1.0 GiB", "123.45")]
    assert re.findall(r"> (\w+) +([\d.]+ \w+) +\d+ B +([\d.]+) ms", many) == taken
    few = told(7)
    assert all(f"params/table_{k}/embedding: ps: at most 5 of {k + 1}000 rows" in few for k in range(7))


def test_texts_that_differ_in_numbers() -> None:
    texts = ["2 of 9 rows, 1.5 GiB (x2.py:4, 3.00%)", "2 of 11 rows, 20.0 KiB (x2.py:4, 0.50%)"]
    assert {*map(without_numbers, texts)} == {"# of # rows, # (x2.py:4, #)"}
    assert ranged(texts) == "2 of 9 to 11 rows, 20.0 KiB to 1.5 GiB (x2.py:4, 0.50% to 3.00%)"
    assert ranged(texts[:1]) == texts[0] and ranged(["none", "none"]) == "none"


@pytest.mark.parametrize(
    ("names", "folded"),
    [
        (["a/0/w", "a/1/w", "a/2/w"], ["a/{0..2}/w"]),
        (["a/0/w", "a/2/w"], ["a/{0,2}/w"]),
        (["l1", "l2", "l3", "l7", "l9", "l10"], ["l{1..3,7,9,10}"]),
        (["a/0/b/0", "a/0/b/1", "a/1/b/0", "a/1/b/1"], ["a/{0,1}/b/{0,1}"]),
        (["a/0/b/0", "a/0/b/1", "a/1/b/0"], ["a/{0,1}/b/0", "a/0/b/1"]),
        (["w", "w1"], ["w", "w1"]),
        (["a/01", "a/02", "a/03"], ["a/{01..03}"]),
        ([], []),
    ],
)
def test_numbers(names: list[str], folded: list[str]) -> None:
    assert list(fold_numbers(names)) == folded
    assert sorted(name for merged in fold_numbers(names).values() for name in merged) == sorted(names)


def test_what_is_decided_otherwise_is_named_apart() -> None:
    paths = [f"{root}/layer_{k}/{leaf}" for root in ("params", "opt/mu") for k in range(9) for leaf in "ab"]
    decided = {path: path.startswith("params") and "/a" in path for path in paths}
    folded = fold_paths(decided, 3)
    assert list(folded) == ["params/layer_{0..8}/a", "params/layer_{0..8}/b", "opt/mu/layer_{0..8}/**"]
    for name, among in folded.items():
        pattern = re.sub(r"\{.*\}", "*", name).replace("**", "*")
        assert set(among) == {path for path in decided if fnmatch.fnmatch(path, pattern)}
        assert len({decided[path] for path in among}) == 1
    assert list(fold_paths(decided, 99)) == paths
    assert list(fold_paths(dict.fromkeys(paths), 1)) == ["**"]
    assert fold_paths({}, 1) == {}
    assert list(fold_paths(dict.fromkeys(["a/b/c", "a/b/d"], 0), 1, others=["a/e"])) == ["a/b/**"]


def test_stacked_weights_of_a_stage() -> None:
    """Rows of a stack are said of the folded name, and a name stands for the weights of its stage alone."""
    stacked = [f"params/layers/{name}" for name in ("up", "down", "query", "key", "value", "out")]
    stages = (
        StagePlan((0,), ("params/embed", *(f"{path}[0:3]" for path in stacked))),
        StagePlan((1,), (*(f"{path}[3:6]" for path in stacked), "params/head")),
    )
    text = str(Explanation("step", (dense("a"),), (), 0.0, "exact", pipeline=PipelinePlan("1f1b", 2, stages)))
    assert "stage 0: params/embed, params/layers/**[0:3]" in text
    assert "stage 1: params/head, params/layers/**[3:6]" in text
