"""Reads and writes plans as JSON files, `{"format": ..., "version": ..., "plan": {...}}`, exactly.

An error says where a damaged file is damaged.
"""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Protocol, TypeVar, runtime_checkable

from autopar.errors import PlanError
from autopar.ir.typed_json import MalformedError, from_json, to_json
from autopar.jax_types import Pytree

FORMAT, VERSION = "autopar plan", 1
#: Fields of older plans, which are ignored.
_GONE = frozenset({"emit"})
#: The remedy for a file that can't be used.
AGAIN = "Make it again: autopar.plan(step, state, batch).save(...)"
#: Matches a list or object of scalars, or of one-line lists, which is written on one line if it fits.
_FLAT = re.compile(r"(?P<open>[\[{])\n\s+(?P<inside>(?:[^\[\]{}]|\[[^\[\]{}\n]*\])*?)\n\s+(?P<close>[\]}])")
_LINE = 100

T = TypeVar("T")


@runtime_checkable
class Readable(Protocol):
    """A path on a disk or in an object store."""

    def read_text(self, encoding: str | None = None) -> str: ...


def plan_text(made: Pytree) -> str:
    text = json.dumps({"format": FORMAT, "version": VERSION, "plan": to_json(made)}, indent=2, ensure_ascii=False)
    return _FLAT.sub(_on_one_line, _FLAT.sub(_on_one_line, text)) + "\n"


def write_plan(path: str | Path, made: Pytree) -> None:
    """Writes a dataclass to a file atomically.

    Raises:
      PlanError: the file can't be written.
    """
    path = Path(path)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(plan_text(made), encoding="utf-8")
        os.replace(new, path)
    except OSError as error:
        raise PlanError(f"{path}: the plan can't be written: {error.strerror}") from error


def read_plan(path: str | os.PathLike[str], kind: type[T]) -> T:
    """Returns the dataclass in a file.

    Raises:
      PlanError: the file can't be read, or holds no undamaged plan of this version.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise PlanError(f"{path!r} is no path of a plan: give a string or a pathlib.Path")
    try:
        place = path if isinstance(path, Readable) else Path(path)
        contents = json.loads(place.read_text(encoding="utf-8"))
    except OSError as error:
        raise PlanError(f"{path}: the plan can't be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        raise PlanError(f"{path} is no plan: it is no text") from error
    except json.JSONDecodeError as error:
        raise PlanError(f"{path}:{error.lineno}: this is no plan, or a damaged one: {error.msg}. {AGAIN}") from error
    if not isinstance(contents, dict) or contents.get("format") != FORMAT:
        raise PlanError(f"{path} is no plan: it doesn't say {{'format': {FORMAT!r}}}")
    if contents.get("version") != VERSION:
        version = contents.get("version")
        raise PlanError(f"{path} is a plan of version {version!r}; this autopar reads version {VERSION}. {AGAIN}")
    try:
        made = contents.get("plan")
        kept = {key: x for key, x in made.items() if key not in _GONE} if isinstance(made, dict) else made
        return from_json(kind, kept, "plan")
    except MalformedError as error:
        raise PlanError(f"{path}: the plan is damaged, or of an older autopar: {error}. {AGAIN}") from error


def _on_one_line(match: re.Match[str]) -> str:
    inside = re.sub(r",\n\s+", ", ", match["inside"])
    line = f"{match['open']}{inside}{match['close']}"
    return line if len(line) <= _LINE else match[0]
