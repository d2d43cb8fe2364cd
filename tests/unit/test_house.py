"""Rules of the house that no other tool checks."""

from __future__ import annotations

import ast
import importlib
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import autopar
from benchmarks.__main__ import chosen

ROOT = Path(__file__).parents[2]


def imported(path: Path) -> Iterator[str]:
    """Yields the modules that a file imports, those in functions included."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.module or ""


@pytest.mark.parametrize("folder", ["autopar", "benchmarks", "docs", "examples", "notebooks"])
def test_nothing_outside_of_tests_imports_tests(folder: str) -> None:
    files = list((ROOT / folder).rglob("*.py"))
    named = [path for path in files if "tests" in path.read_text()]  # the others needn't be parsed
    found = [str(path) for path in named for name in imported(path) if name.split(".")[0] == "tests"]
    assert files and not found


def test_benchmarks_that_pages_name_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    text = "\n".join(page.read_text() for page in pages)
    names = re.findall(r"python -m\s+benchmarks\s+([\w.]*\w)", text)
    assert len(names) > 20 and len(list(chosen(names))) == len(names)


def loaded(*codes: str) -> list[set[str]]:
    """Returns the modules of autopar that are loaded after each of some lines, which one process runs."""
    listing = "; import sys; print(*[name for name in sys.modules if name.startswith('autopar.')])\n"
    code = "".join(line + listing for line in codes)
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    return [set(line.split()) for line in run.stdout.splitlines()]


#: Rooms that `import autopar` leaves for later.
LATER = (
    *("batches", "integrations", "kvstore", "learning_rates", "planning", "report", "retrieval", "servers", "state"),
    "testing",
)


def test_importing_autopar_leaves_rooms_for_later_and_a_step_loads_its_own_way_alone() -> None:
    found, stepped = loaded(
        "import autopar",
        "import jax.numpy as jnp; step = autopar.parallelize(lambda w, x: (w - x.mean(), x.sum())); "
        "step(jnp.ones(3), jnp.ones(3))",
    )
    assert "autopar.api" in found
    assert [name for name in found if name.split(".")[1] in LATER] == ["autopar.report"]  # the empty package
    assert not any(name.startswith("autopar.launch.start") for name in found)
    assert {name for name in found if name.startswith("autopar.ways.")} == {"autopar.ways.table", "autopar.ways.way"}
    ways = {name.split(".")[2] for name in stepped if name.startswith("autopar.ways.")}
    assert ways == {"table", "way", "devices"} and not any(name.startswith("autopar.servers.") for name in stepped)


def test_public_names_are_loaded_when_they_are_used() -> None:
    stub = ast.parse((ROOT / "autopar" / "__init__.pyi").read_text())
    stubs = {a.name: node.module for node in stub.body if isinstance(node, ast.ImportFrom) for a in node.names}
    assert sorted(stubs) == autopar.__all__ and set(stubs) <= set(dir(autopar))
    for name, module in stubs.items():
        expected = f"autopar.{name}" if module == "autopar" else name
        found = getattr(autopar, name)
        assert (found.__name__ if module == "autopar" else name) == expected
        assert module == "autopar" or found is getattr(importlib.import_module(module or ""), name)
    (found,) = loaded("import autopar.report.build; import autopar; assert callable(autopar.report)")
    assert "autopar.report.build" in found
    with pytest.raises(AttributeError, match="module 'autopar' has no attribute 'parallelise'"):
        _ = autopar.parallelise  # type: ignore[attr-defined]


#: Words with which a docstring would begin in the middle of a sentence.
HALF_SENTENCES = re.compile(r"(What|Whether|Of|As|Those|The same|By|Where|Which|How|When|If)\b")

#: Words that begin a noun phrase, and end in "s" as verbs do.
PLURALS = set(
    "Arguments Arrays Batches Branches Bytes Cores Devices Elements Equations Events Examples Gradients Inputs Lines "
    "Outputs Paths Positions Ranks Results Rows Seconds Sizes Tables This Values Weights".split()
)


def begins_badly(code: str) -> Iterator[str]:
    """Yields docstrings that begin with half a sentence, and those of functions that begin with no verb ("Returns")."""
    for node in ast.walk(ast.parse(code)):
        if not isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        text = ast.get_docstring(node) or ""
        does = isinstance(node, ast.FunctionDef) and not any("property" in ast.unparse(d) for d in node.decorator_list)
        first = text.split(maxsplit=1)[0].rstrip(",:;.") if text else ""
        is_verb = re.fullmatch(r"[A-Z][a-z]+s", first) and first not in PLURALS
        if HALF_SENTENCES.match(text) or (text and does and not is_verb):
            yield text.splitlines()[0]


def test_docstrings_begin_with_a_verb() -> None:
    planted = {
        "Whether it is there.": False,
        "The sum.": False,
        "Rows of a table.": False,
        "Return it.": False,
        "Returns the sum.": True,
    }
    for text, is_good in planted.items():
        assert (not list(begins_badly(f'def f():\n    """{text}"""'))) is is_good, text
    assert list(begins_badly('class A:\n    """What it knows."""')) == ["What it knows."]
    assert not list(begins_badly('class A:\n    @property\n    def size(self):\n        """The number of rows."""'))
    files = list((ROOT / "autopar").rglob("*.py"))
    assert len(files) > 100
    assert not [(path.name, line) for path in files for line in begins_badly(path.read_text())]
