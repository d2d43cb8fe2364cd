"""`make notebooks`: runs the notebooks, stores what they show, and tells when that is older than what they would show.

Each runs in a kernel of its own, whose home is an empty folder: nothing was measured or set there before. The tag
"measured" is for cells whose text depends on the machine.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
import math
import os
import re
import sys
import tempfile
from collections.abc import Iterator
from importlib.metadata import version
from itertools import zip_longest
from pathlib import Path
from typing import Any

import jupyter_client
import matplotlib
import nbclient
import nbformat
from ipykernel import kernelspec

FOLDER = Path(__file__).parent
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
#: Seconds of a cell.
_LIMIT_S = 300
#: What a stored number may be off from one that is computed elsewhere.
_CLOSE = 0.02
#: A time, which no two runs have in common, or another number.
_NUMBER = re.compile(r"(\d[\d.]* (?:s|ms|us|µs)\b)|(\d[\d,]*(?:\.\d+)?(?:e[+-]?\d+)?)")


class _ThisPython(jupyter_client.kernelspec.KernelSpecManager):
    """Kernels are the Python that runs this, whatever else is installed."""

    def get_kernel_spec(self, kernel_name: str) -> Any:
        return jupyter_client.kernelspec.KernelSpec(**kernelspec.get_kernel_dict())


def read(path: Path) -> Any:
    """A notebook as it is stored."""
    return nbformat.read(path, as_version=4)


def execute(notebook: Any) -> Any:
    """Run all cells, and note by which code and which JAX their outputs were made.

    Raises:
      CellExecutionError: a cell raises.
    """
    with tempfile.TemporaryDirectory() as home:
        manager = jupyter_client.AsyncKernelManager(
            kernel_spec_manager=_ThisPython(), transport="ipc", connection_file=f"{home}/kernel.json"
        )
        own = {"HOME": home, "IPYTHONDIR": home, "MPLCONFIGDIR": matplotlib.get_configdir(), "JAX_PLATFORMS": "cpu"}
        paths = [str(FOLDER.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
        env = {name: value for name, value in os.environ.items() if name != "XDG_CACHE_HOME"}
        env |= {**own, "PYTHONPATH": os.pathsep.join(paths)}
        client = nbclient.NotebookClient(
            notebook,
            km=manager,
            timeout=_LIMIT_S,
            record_timing=False,
            coalesce_streams=True,
            resources={"metadata": {"path": home}},
        )
        asyncio.run(client.async_execute(cleanup_kc=True, env=env))  # its sockets are closed, too
    for cell in code_cells(notebook):
        cell.outputs = [output for output in cell.outputs if not _is_notice(output)]
    notebook.metadata["language_info"] = {"name": "python"}
    notebook.metadata["autopar"] = {"code": digest(notebook), "jax": version("jax").rpartition(".")[0]}
    return notebook


def _is_notice(output: Any) -> bool:
    """Whether it says no more than what takes long: that is of this run, and not of what a notebook shows."""
    lines = map(str.strip, re.split("[\r\n]", output.get("text", "")))
    return output.get("name") == "stderr" and all(not line or line.startswith("autopar: ") for line in lines)


def code_cells(notebook: Any) -> list[Any]:
    """Those that are run."""
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def digest(notebook: Any) -> str:
    """Changes when the code does that a notebook's outputs are of."""
    text = json.dumps([cell.source for cell in code_cells(notebook)])
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def kinds(cell: Any) -> list[str]:
    """Kinds of a cell's outputs: names of streams, and MIME types."""
    return [kind for output in cell.outputs for kind in sorted(output.get("data", [output.get("name")]))]


def texts(cell: Any) -> Iterator[str]:
    """The texts that a cell shows, without the data of images."""
    for output in cell.outputs:
        shown = output.get("data", {"text/plain": output.get("text", "")})
        yield from (
            re.sub('base64,[^"]+', "", text) for kind, text in sorted(shown.items()) if kind.startswith("text/")
        )


def differences(stored: Any, fresh: Any) -> list[str]:
    """Lists in what two runs of a notebook differ: kinds of outputs; with one JAX also words, and numbers but times."""
    traced_alike = stored.metadata["autopar"]["jax"] == fresh.metadata["autopar"]["jax"]
    found = []
    for old, new in zip(code_cells(stored), code_cells(fresh), strict=True):
        if kinds(old) != kinds(new):
            found.append(f"{old.id}: {kinds(old)} is stored, {kinds(new)} is shown")
        elif traced_alike and "measured" not in old.metadata.get("tags", ()):
            for a, b in zip(texts(old), texts(new), strict=True):
                found += [f"{old.id}: {x!r} is stored, {y!r} is shown" for x, y in _other_words(a, b)][:5]
    return found


def _other_words(old: str, new: str) -> Iterator[tuple[str | None, str | None]]:
    for a, b in zip_longest(_words(old), _words(new)):
        if a != b and not (_is_number(a) and _is_number(b) and math.isclose(float(a), float(b), rel_tol=_CLOSE)):
            yield a, b


def _words(text: str) -> list[str]:
    """Words and numbers in their order, without a table's lines, which are as long as its numbers."""
    marked = _NUMBER.sub(lambda m: " time " if m[1] else f" {m[2].replace(',', '')} ", text)
    return re.findall(r"[^\s\u2500-\u257f]+", marked)


def _is_number(word: str | None) -> bool:
    return word is not None and word[:1].isdigit()


def main(names: list[str]) -> None:
    for path in NOTEBOOKS:
        if not names or path.stem in names:
            print(path.name, flush=True)
            nbformat.write(execute(read(path)), path)


if __name__ == "__main__":
    main(sys.argv[1:])
