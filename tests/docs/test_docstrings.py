"""Docstrings name the parameters that there are."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import autopar

ROOT = Path(autopar.__file__).parent
FILES = sorted(ROOT.rglob("*.py"))

#: An entry of a section `Args:`: names, with stars where the parameter has them, a colon, a text.
_ENTRY = re.compile(r"^(\*{0,2}\w+(?:, \*{0,2}\w+)*):\s")


def documented(docstring: str) -> Iterator[str]:
    """Lists the names of a docstring's section `Args`."""
    lines = iter(docstring.splitlines())
    if not any(line.strip() == "Args:" for line in lines):
        return
    indent = 0
    for line in lines:
        own = len(line) - len(line.lstrip())
        if not line.strip() or (indent and own < indent):
            return
        indent = indent or own
        entry = _ENTRY.match(line[indent:])
        if entry and own == indent:
            yield from (name.lstrip("*") for name in entry[1].split(", "))


def parameters(node: ast.AST) -> set[str]:
    """The parameters of a function; of a class, those of its `__init__` and its fields."""
    if isinstance(node, ast.ClassDef):
        found = {n.target.id for n in node.body if isinstance(n, ast.AnnAssign) and isinstance(n.target, ast.Name)}
        return found.union(*(parameters(n) for n in node.body if getattr(n, "name", "") == "__init__"))
    assert isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef))
    arguments = node.args
    stars = [a for a in (arguments.vararg, arguments.kwarg) if a is not None]
    return {a.arg for a in (*arguments.posonlyargs, *arguments.args, *arguments.kwonlyargs, *stars)}


def stale(source: str) -> list[tuple[int, str, str]]:
    """Lists (line, function, name) of what docstrings document and nothing takes."""
    nodes = [
        n for n in ast.walk(ast.parse(source)) if isinstance(n, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    ]
    return [
        (node.lineno, node.name, name)
        for node in nodes
        for name in documented(ast.get_docstring(node) or "")
        if name not in parameters(node)
    ]


def test_args_are_parameters() -> None:
    found = [(str(file.relative_to(ROOT)), *name) for file in FILES for name in stale(file.read_text(encoding="utf-8"))]
    assert found == [] and len(FILES) > 200


def test_what_is_stale_is_found() -> None:
    source = '''
def f(a, *rest, key=1):
    """Something.

    Args:
      a, b: Two
        lines: of text.
      *rest: The rest.
      keys: Of which one is key.

    Returns:
      other: Nothing.
    """
'''
    assert stale(source) == [(2, "f", "b"), (2, "f", "keys")]
