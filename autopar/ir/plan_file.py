"""Plans as files: nested dataclasses of plain data as JSON, and back, exactly.

A file holds `{"format": ..., "version": ..., "plan": {...}}`. What is read is checked against the types of the
dataclass, field by field, so that a damaged file is told where it is damaged. Fields that have a default may be
missing; one that was renamed is read by its old name, too (`formerly` in its metadata).
"""

from __future__ import annotations

import collections.abc
import dataclasses
import json
import operator
import os
import re
import types
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from autopar.errors import ArgumentsError, PlanError

FORMAT, VERSION = "autopar plan", 1
#: What to do about a file that can't be used.
AGAIN = "Make it again: autopar.plan(step, state, batch).save(...)"
#: Lists and objects without others, or with lists of one line, are written on one line, if they fit.
_FLAT = re.compile(r"(?P<open>[\[{])\n\s+(?P<inside>(?:[^\[\]{}]|\[[^\[\]{}\n]*\])*?)\n\s+(?P<close>[\]}])")
_LINE = 100

T = TypeVar("T")


def plan_text(made: Any) -> str:
    """Returns what a dataclass's file holds."""
    text = json.dumps({"format": FORMAT, "version": VERSION, "plan": _plain(made)}, indent=2, ensure_ascii=False)
    return _FLAT.sub(_on_one_line, _FLAT.sub(_on_one_line, text)) + "\n"


def write_plan(path: str | Path, made: Any) -> None:
    """Write a dataclass to a file, all or nothing.

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
    """The dataclass in a file.

    Raises:
      PlanError: the file can't be read, or is no plan, of another version, or damaged.
    """
    if not isinstance(path, (str, os.PathLike)):
        raise PlanError(f"{path!r} is no path of a plan: give a string or a pathlib.Path")
    try:
        place: Any = path if hasattr(path, "read_text") else Path(path)
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
        return _read(kind, contents.get("plan"), "plan")
    except _Damaged as error:
        raise PlanError(f"{path}: the plan is damaged: {error}. {AGAIN}") from error


class _Damaged(Exception):
    """What is wrong, and where in the file."""


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        kept = (f for f in dataclasses.fields(value) if f.metadata.get("saved", True))
        return {f.name: _plain(getattr(value, f.name)) for f in kept}
    if isinstance(value, Mapping):
        return {key: _plain(x) for key, x in value.items()}
    if isinstance(value, tuple):
        return [_plain(x) for x in value]
    if value is None or isinstance(value, (bool, str, float)):
        return value
    return operator.index(value)


def _read(kind: Any, value: Any, where: str) -> Any:
    """A value of a type, of what JSON made of it."""
    if dataclasses.is_dataclass(kind):
        return _read_fields(kind, value, where)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):  # with None
        return None if value is None else _read(next(k for k in parts if k is not types.NoneType), value, where)
    if origin is typing.Literal:
        return value if value in parts else _fail(f"one of {parts}", value, where)
    if origin is tuple:
        items = value if isinstance(value, list) else _fail("a list", value, where)
        kinds = parts[:1] * len(items) if parts[1:] == (...,) else parts
        if len(kinds) != len(items):
            _fail(f"a list of {len(kinds)}", value, where)
        return tuple(_read(k, x, f"{where}[{n}]") for n, (k, x) in enumerate(zip(kinds, items, strict=True)))
    if origin is collections.abc.Mapping:
        items = value if isinstance(value, dict) else _fail("an object", value, where)
        return {key: _read(parts[1], x, f"{where}.{key}") for key, x in items.items()}
    assert kind in (bool, int, float, str), f"{where}: no file holds a {kind}"
    accepted = (int, float) if kind is float else (kind,)
    if type(value) not in accepted:
        _fail({bool: "true or false", int: "a whole number", float: "a number", str: "a text"}[kind], value, where)
    return value


def _read_fields(kind: Any, value: Any, where: str) -> Any:
    values = value if isinstance(value, dict) else _fail("an object", value, where)
    hints, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
    names: dict[str, str] = {f.metadata["formerly"]: f.name for f in fields if "formerly" in f.metadata}
    values = {names.get(str(key), str(key)): x for key, x in values.items()}
    for key in values:
        if key not in hints:
            raise _Damaged(f"there is no {where}.{key}")
    missing = dataclasses.MISSING
    for field in fields:
        if field.name not in values and field.default is missing and field.default_factory is missing:
            raise _Damaged(f"{where}.{field.name} is missing")
    try:
        return kind(**{key: _read(hints[key], x, f"{where}.{key}") for key, x in values.items()})
    except (ValueError, TypeError, ArgumentsError) as error:  # of the dataclass itself
        raise _Damaged(f"{where}: {error}") from error


def _fail(wanted: str, value: Any, where: str) -> typing.NoReturn:
    raise _Damaged(f"{where} is {wanted}, not {json.dumps(value)[:40]}")


def _on_one_line(match: re.Match[str]) -> str:
    inside = re.sub(r",\n\s+", ", ", match["inside"])
    line = f"{match['open']}{inside}{match['close']}"
    return line if len(line) <= _LINE else match[0]
