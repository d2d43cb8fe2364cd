"""Reads and writes TOML: errors name the line, which tomllib doesn't say of what it has read."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from autopar.errors import LaunchError


class TomlTable:
    """A table of a TOML file, and where its keys are.

    Attributes:
      values: What tomllib found.
      name: As in its head: "host", "link.inside"; empty for the top of the file.
    """

    def __init__(
        self, path: Path, lines: Sequence[str], values: Mapping[str, Any], name: str = "", number: int | None = None
    ) -> None:
        """`number`: of a table of an array, from 0."""
        self.values, self.name = values, name
        self._path, self._lines, self._number = path, lines, number

    def where(self, key: str | None = None) -> str:
        """file:line of a key (or of the table that it is), or of the table's own head.

        Where that is written in an unusual way, the file and the table."""
        heads = _heads(self._lines, self.name) if self.name else [0]
        number = self._number or 0
        if number >= len(heads):
            return f"{self._path}, {self.name}{'' if self._number is None else f' {number + 1}'}"
        line = heads[number]
        if key is not None:
            rest = self._lines[line:]
            start = re.compile(rf"\s*{_quoted(key)}\s*[=.]")
            end = next((i for i, text in enumerate(rest) if text.lstrip().startswith("[")), len(rest))
            inner = _heads(self._lines, f"{self.name}.{key}" if self.name else key)
            line = next((line + i for i, text in enumerate(rest[:end], 1) if start.match(text)), (inner or [line])[0])
        return f"{self._path}:{line}" if line else f"{self._path}"

    def fail(self, key: str | None, message: str) -> NoReturn:
        """Raise a LaunchError about a key, or about the table."""
        raise LaunchError(f"{self.where(key)}: {message}")

    def table(self, name: str) -> TomlTable:
        """A table in this one."""
        path = f"{self.name}.{name}" if self.name else name
        values = self.values[name]
        if not isinstance(values, Mapping):
            self.fail(name, f"{path} is a table: write [{path}], and its keys below")
        return TomlTable(self._path, self._lines, values, path)

    def tables(self, name: str) -> list[TomlTable]:
        """The tables of an array of them; empty if there is none."""
        tables = self.values.get(name, [])
        if not isinstance(tables, list) or not all(isinstance(values, Mapping) for values in tables):
            self.fail(name, f"{name} is written as [[{name}]], once for each")
        return [TomlTable(self._path, self._lines, values, name, k) for k, values in enumerate(tables)]


def _heads(lines: Sequence[str], name: str) -> list[int]:
    """Lines of the heads of tables of this name, or of tables in it, from 1."""
    dots = r"\s*\.\s*".join(map(_quoted, name.split(".")))
    head = re.compile(rf"\s*\[+\s*{dots}\s*[.\]]")
    return [i for i, line in enumerate(lines, 1) if head.match(line)]


def _quoted(key: str) -> str:
    return rf"""["']?{re.escape(key)}["']?"""


def parse_toml(path: Path, text: str) -> TomlTable:
    """The top of a TOML file; a LaunchError with the line if it is none."""
    try:
        parsed = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        at = re.search(r"\s*\(at line (\d+), column \d+\)", str(error))
        line, message = (f":{at[1]}", str(error)[: at.start()]) if at else ("", str(error))
        raise LaunchError(f"{path}{line}: {message}") from error
    return TomlTable(path, text.splitlines(), parsed)


def format_toml(values: Mapping[str, Any], name: str = "") -> str:
    """The text of nested mappings of texts and finite or infinite numbers; read again it is the same.

    Keys are made of letters, digits and underscores. Empty tables are left out. `name`: of the table that they are.
    """
    plain = [f"{k} = {_format_value(v)}\n" for k, v in values.items() if not isinstance(v, Mapping)]
    inner = [format_toml(v, f"{name}.{k}" if name else k) for k, v in values.items() if isinstance(v, Mapping)]
    head = f"[{name}]\n" if name and plain else ""
    return "\n".join(filter(None, [head + "".join(plain), *inner]))


def _format_value(value: str | int | float) -> str:
    # JSON's escapes are TOML's; of what TOML wants escaped, JSON leaves only "delete".
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f") if isinstance(value, str) else repr(value)
