"""Converts dataclasses of plain data to JSON and exactly back, checked field by field against their types.

Fields that have a default may be missing.
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
from typing import Protocol, TypeVar, runtime_checkable

from autopar.errors import ArgumentsError, PlanError
from autopar.jax_types import Json, Pytree

#: Scalar types, and their names in messages.
_KINDS: Mapping[object, str] = {bool: "true or false", int: "a whole number", float: "a number", str: "a text"}


class MalformedError(ValueError):
    """Raised with what is wrong, and where in the data."""


def to_json(value: Json) -> Json:
    """Returns a value as JSON has it, without fields whose metadata says `saved: False`."""
    if dataclasses.is_dataclass(value):
        kept = (f for f in dataclasses.fields(value) if f.metadata.get("saved", True))
        return {f.name: to_json(getattr(value, f.name)) for f in kept}
    if isinstance(value, Mapping):
        return {key: to_json(x) for key, x in value.items()}
    if isinstance(value, (tuple, list)):
        return [to_json(x) for x in value]
    if value is None or isinstance(value, (bool, str, float)):
        return value
    return operator.index(value)


def from_json(kind: object, value: Json, where: str) -> Json:
    """Returns JSON's `value` as a value of type `kind`; messages call it `where`. Raises MalformedError if it is no
    value of that type."""
    if kind is Json:
        return value
    if isinstance(kind, type) and dataclasses.is_dataclass(kind):
        return _fields(kind, value, where)
    origin, parts = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):  # with None
        return None if value is None else from_json(next(k for k in parts if k is not types.NoneType), value, where)
    if origin is typing.Literal:
        return value if value in parts else _fail(f"one of {parts}", value, where)
    if origin is tuple:
        items = value if isinstance(value, list) else _fail("a list", value, where)
        kinds = parts[:1] * len(items) if parts[1:] == (...,) else parts
        if len(kinds) != len(items):
            _fail(f"a list of {len(kinds)}", value, where)
        return tuple(from_json(k, x, f"{where}[{n}]") for n, (k, x) in enumerate(zip(kinds, items, strict=True)))
    if origin in (collections.abc.Mapping, dict):
        items = value if isinstance(value, dict) else _fail("an object", value, where)
        return {key: from_json(parts[1], x, f"{where}.{key}") for key, x in items.items()}
    assert kind in _KINDS, f"{where}: no file holds a {kind}"
    accepted = (int, float) if kind is float else (kind,)
    if type(value) not in accepted:
        _fail(_KINDS[kind], value, where)
    return value


def _fields(kind: type[Json], value: Json, where: str) -> Json:
    values = value if isinstance(value, dict) else _fail("an object", value, where)
    hints, fields = typing.get_type_hints(kind), dataclasses.fields(kind)
    for key in values:
        if key not in hints:
            raise MalformedError(f"there is no {where}.{key}; there are {', '.join(hints)}")
    missing = dataclasses.MISSING
    for field in fields:
        if field.name not in values and field.default is missing and field.default_factory is missing:
            raise MalformedError(f"{where}.{field.name} is missing")
    read = {key: from_json(hints[key], x, f"{where}.{key}") for key, x in values.items()}
    try:
        return kind(**read)
    except (ValueError, TypeError, ArgumentsError) as error:  # of the dataclass itself
        raise MalformedError(f"{where}: {error}") from error


def _fail(wanted: str, value: Json, where: str) -> typing.NoReturn:
    raise MalformedError(f"{where} is {wanted}, not {json.dumps(value, default=str)[:40]}")


# --- plans as files: `{"format": ..., "version": ..., "plan": {...}}`, exactly ---


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
    """Writes a dataclass to a file atomically. Raises PlanError if the file can't be written."""
    path = Path(path)
    new = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        new.write_text(plan_text(made), encoding="utf-8")
        os.replace(new, path)
    except OSError as error:
        raise PlanError(f"{path}: the plan can't be written: {error.strerror}") from error


def read_plan(path: str | os.PathLike[str], kind: type[T]) -> T:
    """Returns the dataclass in a file. Raises PlanError if the file can't be read, or holds no undamaged plan of this
    version."""
    if not isinstance(path, (str, os.PathLike)):
        raise PlanError(f"{path!r} is no path of a plan: give a string or a pathlib.Path")
    try:
        file = path if isinstance(path, Readable) else Path(path)
        contents = json.loads(file.read_text(encoding="utf-8"))
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
