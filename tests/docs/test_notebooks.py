"""Notebooks run from top to bottom, and what they show is stored with them and is what they would show now."""

from __future__ import annotations

import copy
import re
from pathlib import Path

import nbclient
import nbformat
import pytest

from notebooks.execute import NOTEBOOKS, code_cells, differences, digest, execute, kinds, read, texts

AGAIN = "run `make notebooks`"


each = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def image_sizes(path: Path) -> list[int]:
    """Bytes of each PNG, those in pages of a report among them."""
    return [len(data) * 3 // 4 for data in re.findall("iVBORw0KGgo[A-Za-z0-9+/=]*", path.read_text())]


def test_there_are_notebooks() -> None:
    assert {"01_first_plan.ipynb", "02_cost_model.ipynb"} <= {path.name for path in NOTEBOOKS}


@each
def test_a_notebook_is_stored_with_what_it_shows(path: Path) -> None:
    stored = read(path)
    nbformat.validate(stored)
    cells = code_cells(stored)
    assert stored.metadata.get("autopar", {}).get("code") == digest(stored), (
        f"its code is newer than its outputs: {AGAIN}"
    )
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    assert "stderr" not in [kind for cell in cells for kind in kinds(cell)], "warnings are for readers, too"
    assert 0 < max(image_sizes(path)) < 100_000 and path.stat().st_size < 400_000
    shown = "\n".join(text for cell in cells for text in texts(cell))
    assert not re.search(r"(^|[\s(\"'])(/\w+/|[A-Z]:\\)", shown), "paths of the machine that ran it"


@pytest.mark.long
@each
def test_a_notebook_shows_what_is_stored(path: Path) -> None:
    stored = read(path)
    assert differences(stored, execute(copy.deepcopy(stored))) == [], AGAIN


def test_what_is_older_than_the_code_is_found() -> None:
    notice = "import sys; print('autopar: step: compiling, 2 s', file=sys.stderr)\nprint('12.0 kB, 14 ms')"
    codes = (notice, "6 * 7", "print('deprecated', file=sys.stderr)")
    ran = execute(nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code) for code in codes]))
    assert [kinds(cell) for cell in ran.cells] == [["stdout"], ["text/plain"], ["stderr"]]
    assert ran.cells[0].outputs[0]["text"] == "12.0 kB, 14 ms\n" and ran.metadata["autopar"]["code"] == digest(ran)

    def found(first: str, second: str) -> list[str]:
        other = copy.deepcopy(ran)
        other.cells[0].outputs[0]["text"], other.cells[1].outputs[0]["data"]["text/plain"] = first, second
        return differences(ran, other)

    assert found("12.1 kB,  9 ms\n", "42") == []
    assert found("13.0 kB, 14 ms", "42") == [f"{ran.cells[0].id}: '12.0' is stored, '13.0' is shown"]
    assert found("12.0 kB, 14 ms or so", "42") == [
        f"{ran.cells[0].id}: None is stored, 'or' is shown",
        f"{ran.cells[0].id}: None is stored, 'so' is shown",
    ]
    older = copy.deepcopy(ran)
    older.metadata["autopar"]["jax"], older.cells[1].outputs[0]["data"]["text/plain"] = "0.4", "43"
    assert differences(older, ran) == [], "another JAX traces other equations"
    ran.cells[0].source += "  "
    assert ran.metadata["autopar"]["code"] != digest(ran)
    silent = copy.deepcopy(ran)
    silent.cells[1].outputs.clear()
    assert differences(silent, ran) == [f"{ran.cells[1].id}: [] is stored, ['text/plain'] is shown"]


def test_a_cell_that_raises_ends_a_run() -> None:
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        execute(made)
