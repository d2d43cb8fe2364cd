"""Notebooks run from top to bottom, and are kept without what they printed."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

_REASON = "notebooks need nbclient: pip install 'autopar[notebooks]'"
nbformat = pytest.importorskip("nbformat", reason=_REASON)
nbclient = pytest.importorskip("nbclient", reason=_REASON)
kernelspec = pytest.importorskip("ipykernel.kernelspec", reason=_REASON)
jupyter_client = pytest.importorskip("jupyter_client", reason=_REASON)

FOLDER = Path(__file__).parents[2] / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
#: Seconds of a cell.
LIMIT_S = 120


class ThisPython(jupyter_client.kernelspec.KernelSpecManager):
    """Kernels are the Python that runs the tests, whatever else is installed."""

    def get_kernel_spec(self, kernel_name: str) -> Any:
        return jupyter_client.kernelspec.KernelSpec(**kernelspec.get_kernel_dict())


@pytest.fixture(autouse=True)
def own_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("IPYTHONDIR", "JUPYTER_RUNTIME_DIR", "JUPYTER_CONFIG_DIR"):
        monkeypatch.setenv(name, str(tmp_path / name))


def execute(notebook: Any, folder: Path) -> Any:
    """Run all cells in a kernel of their own, in a folder.

    Raises:
      CellExecutionError: a cell raises.
    """
    manager = jupyter_client.AsyncKernelManager(kernel_spec_manager=ThisPython())
    client = nbclient.NotebookClient(
        notebook, km=manager, timeout=LIMIT_S, resources={"metadata": {"path": str(folder)}}
    )
    asyncio.run(client.async_execute(cleanup_kc=True))  # its sockets are closed, too
    return notebook


def unstripped(notebook: Any) -> list[str]:
    """The cells that hold what they printed, or how often they were run."""
    return [
        cell["id"]
        for cell in notebook.cells
        if cell.cell_type == "code" and (cell.outputs or cell.execution_count is not None)
    ]


def test_there_are_notebooks() -> None:
    assert {"01_first_plan.ipynb", "02_cost_model.ipynb"} <= {path.name for path in NOTEBOOKS}


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs(path: Path, tmp_path: Path) -> None:
    ran = execute(nbformat.read(path, as_version=4), tmp_path)
    cells = [cell for cell in ran.cells if cell.cell_type == "code"]
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    printed = [output for cell in cells for output in cell.outputs]
    assert not [output for output in printed if output.get("name") == "stderr"], "warnings are for readers, too"
    assert printed


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_kept_stripped(path: Path) -> None:
    found = nbformat.read(path, as_version=4)
    nbformat.validate(found)
    assert unstripped(found) == []


def test_what_a_cell_printed_is_found(tmp_path: Path) -> None:
    """So that the tests above can fail: a run notebook isn't stripped, and a cell that raises ends a run."""
    made = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("print(6 * 7)"), nbformat.v4.new_code_cell("")])
    ran = execute(made, tmp_path)
    assert ran.cells[0].outputs[0]["text"] == "42\n" and unstripped(ran) == [ran.cells[0]["id"]]
    ran.cells.append(nbformat.v4.new_code_cell("1 / 0"))
    with pytest.raises(nbclient.exceptions.CellExecutionError, match="ZeroDivisionError"):
        execute(ran, tmp_path)
