"""Rules of the house that no other tool checks."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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
    found = [str(path) for path in files for name in imported(path) if name.split(".")[0] == "tests"]
    assert files and not found


def test_benchmarks_that_pages_name_exist() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md"), *(ROOT / "notebooks").glob("*.ipynb")]
    text = "\n".join(page.read_text() for page in pages)
    names = re.findall(r"python -m\s+benchmarks\s+([\w.]*\w)", text)
    assert len(names) > 20 and len(list(chosen(names))) == len(names)
