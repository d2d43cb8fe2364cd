"""Finds the arguments of a step that options of `parallelize` name, by position or by keyword."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from autopar import jax_compat
from autopar.errors import ArgumentsError
from autopar.jax_types import Leaf, Pytree


@dataclass(frozen=True, slots=True)
class NamedArguments:
    """Arguments that are named by position or by keyword, as by `static_argnums` and `static_argnames`. False if there
    are none."""

    argnums: tuple[int, ...] = ()
    argnames: tuple[str, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.argnums or self.argnames)

    def __contains__(self, place: int | str) -> bool:
        return place in self.argnums or place in self.argnames

    def __or__(self, other: NamedArguments) -> NamedArguments:
        return NamedArguments(
            tuple(sorted({*self.argnums, *other.argnums})), tuple(sorted({*self.argnames, *other.argnames}))
        )

    @property
    def static_options(self) -> Mapping[str, Any]:
        """The options of `jax.jit` for static arguments."""
        return {"static_argnums": self.argnums, "static_argnames": self.argnames}

    def of_call(self, args: Sequence[Pytree], kwargs: Mapping[str, Pytree]) -> dict[int | str, Pytree]:
        """Returns a call's named arguments, by position or name."""
        return {k: v for k, v in (*enumerate(args), *sorted(kwargs.items())) if k in self}

    def others(self, args: Sequence[Pytree], kwargs: Mapping[str, Pytree]) -> tuple[list[Pytree], dict[str, Pytree]]:
        return [a for k, a in enumerate(args) if k not in self], {k: v for k, v in kwargs.items() if k not in self}


def static_arguments(
    step: Callable[..., Pytree], argnums: int | Sequence[int] | None, argnames: str | Sequence[str] | None
) -> NamedArguments:
    """Returns the static arguments: those of `parallelize`, and of a `jax.jit` around the step."""
    return _named(step, "static", argnums, argnames) | _jitted(step, "static")


def donated_arguments(
    step: Callable[..., Pytree],
    argnums: int | Sequence[int] | None,
    argnames: str | Sequence[str] | None,
    static: NamedArguments,
    donate: bool,
) -> NamedArguments | None:
    """Returns the donated arguments: those that the user names, or else those of a `jax.jit` around the step. None if
    nobody names any; then `donate` decides. Raises ArgumentsError if one of them is static, or `donate` is False."""
    if argnums is None and argnames is None:
        return _jitted(step, "donate") or None
    donated = _named(step, "donate", argnums, argnames)
    both = [k for k in (*donated.argnums, *donated.argnames) if k in static]
    if both:
        raise ArgumentsError(f"argument {both[0]!r} is static and donated: only arrays can be donated")
    if donated and not donate:
        raise ArgumentsError("donate=False, and donate_argnums or donate_argnames name arguments: leave one out")
    return donated


def positions_of(
    step: Callable[..., Pytree], option: str, positions: int | Sequence[int] | None
) -> tuple[int, ...] | None:
    """Returns positions of arguments; negative ones count from the last parameter."""
    if positions is None:
        return None
    several = isinstance(positions, Iterable) and not isinstance(positions, (str, bytes))
    numbers: tuple[Leaf, ...] = tuple(cast(Any, positions)) if several else (positions,)
    if not all(isinstance(k, (int, np.integer)) and not isinstance(k, bool) for k in numbers):
        raise ArgumentsError(f"{option}={positions!r}: give positions of the step's arguments, whole numbers from 0")
    parameters = _parameters(step)
    if parameters is None:
        return numbers
    count = sum(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD) for p in parameters)
    open_ended = any(p.kind is p.VAR_POSITIONAL for p in parameters)
    for k in numbers:
        if k < -count or (k >= count and not open_ended):
            by_keyword = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
            names = option.replace("argnums", "argnames")
            hint = f". Name what is passed by keyword: {names}={by_keyword[0]!r}" if by_keyword else ""
            raise ArgumentsError(f"{option} names argument {k}; {_name(step)} takes {count}, numbered from 0{hint}")
    return tuple(int(k) + count if k < 0 else int(k) for k in numbers)


def _named(
    step: Callable[..., Pytree], kind: str, argnums: int | Sequence[int] | None, argnames: str | Sequence[str] | None
) -> NamedArguments:
    """Returns the arguments that an option and its sibling name. As in `jax.jit`, one follows from the other if it
    isn't given."""
    numbers, names = positions_of(step, f"{kind}_argnums", argnums), _names_of(step, f"{kind}_argnames", argnames)
    either = {k: p.name for k, p in enumerate(_parameters(step) or ()) if p.kind is p.POSITIONAL_OR_KEYWORD}
    if numbers is None:
        numbers = tuple(k for k, name in either.items() if name in (names or ()))
    elif names is None:
        names = tuple(name for k, name in either.items() if k in numbers)
    return NamedArguments(numbers, names or ())


def _names_of(step: Callable[..., Pytree], option: str, given: str | Sequence[str] | None) -> tuple[str, ...] | None:
    if given is None:
        return None
    names: tuple[Any, ...] = (given,) if isinstance(given, str) or not isinstance(given, Iterable) else tuple(given)
    if not all(isinstance(name, str) for name in names):
        raise ArgumentsError(f"{option}={given!r}: give names of the step's arguments, strings")
    parameters = _parameters(step)
    if parameters is None or any(p.kind is p.VAR_KEYWORD for p in parameters):
        return names
    known = [p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    for name in names:
        if name not in known:
            raise ArgumentsError(f"{option} names {name!r}; {_name(step)} takes {', '.join(known)} by keyword")
    return names


def _jitted(step: Callable[..., Pytree], kind: str) -> NamedArguments:
    argnums, argnames = jax_compat.jit_arguments(step, kind)
    return NamedArguments(positions_of(step, f"{kind}_argnums", argnums) or (), argnames)


def _parameters(step: Callable[..., Pytree]) -> Sequence[inspect.Parameter] | None:
    try:
        return tuple(inspect.signature(step).parameters.values())
    except (TypeError, ValueError):  # some builtins have no signature
        return None


def _name(step: Callable[..., Pytree]) -> str:
    return getattr(step, "__name__", type(step).__name__)
