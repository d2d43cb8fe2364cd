"""What the documentation says is so: its examples, its names, its length."""

from __future__ import annotations

import ast
import doctest
import importlib
import inspect
import re
import runpy
from pathlib import Path
from typing import Any

import jax
import pytest

import autopar.api


def test_docstring_examples() -> None:
    for module, examples in ((autopar.api, 4), (importlib.import_module("autopar.state.init"), 4)):
        found = doctest.testmod(module)
        assert found.attempted >= examples and found.failed == 0


PAGES = ["README.md", "docs/options.md", "docs/devices.md", "docs/accuracy.md"]


def test_the_readme_is_short() -> None:
    assert len((Path(__file__).parents[2] / "README.md").read_text().splitlines()) <= 150


def test_the_readme_s_example_runs(capsys: pytest.CaptureFixture[str]) -> None:
    page = (Path(__file__).parents[2] / "README.md").read_text()
    example = re.search(r"```python\n(.*?)```", page, re.DOTALL)
    assert example is not None
    found: dict[str, Any] = {"__name__": "readme"}
    smaller = example[1].replace("200_000, 64", "100_000, 64").replace("range(100)", "range(10)")
    assert len(smaller) == len(example[1]) - 1
    exec(compile(smaller, "README.md", "exec"), found)
    assert "params/words: sparse" in capsys.readouterr().out and 0 < float(found["metrics"]["loss"]) < 1


def test_the_picture_of_results_has_the_numbers_of_their_page() -> None:
    found = runpy.run_path(str(Path(__file__).parents[2] / "docs" / "speedups.py"))
    stored = (Path(__file__).parents[2] / "docs" / "speedups.svg").read_text(encoding="utf-8")
    assert stored == found["draw"]((Path(__file__).parents[2] / "docs" / "results.md").read_text(encoding="utf-8")), (
        "run python docs/speedups.py"
    )


def test_pages_are_valid_python_and_name_real_options() -> None:
    text = "\n".join((Path(__file__).parents[2] / page).read_text() for page in PAGES)
    blocks = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    assert blocks
    for block in blocks:
        for node in ast.walk(ast.parse(block)):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "autopar.parallelize":
                for keyword in node.keywords:
                    assert keyword.arg in autopar.parallelize.__kwdefaults__
    for name in re.findall(r"autopar\.([a-z_]+)\(", text):
        assert hasattr(autopar, name)


def test_the_page_of_options_has_the_signature() -> None:
    """All options with their defaults; what `parallelize` makes of None is shown in its place."""
    page = (Path(__file__).parents[2] / "docs" / "options.md").read_text()
    call = ast.parse(re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]).body[0]
    assert isinstance(call, ast.Assign) and isinstance(call.value, ast.Call)
    shown = {keyword.arg: ast.literal_eval(keyword.value) for keyword in call.value.keywords}
    jax.devices()  # what is made later has options
    made = autopar.parallelize(lambda x: x).planner.options
    parameters = inspect.signature(autopar.parallelize).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.kind is p.KEYWORD_ONLY}
    assert shown == {k: getattr(made, k, None) if default is None else default for k, default in defaults.items()}
    assert set(re.findall(r"[*`](\w+)[*`]", page)) >= set(defaults), "each one is described"


def test_the_api_reference_has_every_public_name() -> None:
    page = (Path(__file__).parents[2] / "docs" / "api.md").read_text()
    names = re.findall(r":: autopar\.(\w+)$", page, re.MULTILINE)
    modules = {*re.findall(r":: autopar\.(\w+)\.\w+$", page, re.MULTILINE)}
    assert sorted([*names, *modules]) == sorted(autopar.__all__)


def test_pages_name_modules_that_exist() -> None:
    root = Path(__file__).parents[2]
    for page in (*(root / "docs").glob("*.md"), root / "CONTRIBUTING.md"):
        for module in re.findall(r"`([a-z_/]+\.py)\b", page.read_text()):
            known = module == "train.py" or (root / module).exists() or (root / "autopar" / module).exists()
            assert known, f"{page.name} names {module}, which isn't there"
