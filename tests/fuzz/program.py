"""`Program`: everything that was drawn for a random program, by name; and the programs that are a little plainer."""

from __future__ import annotations

import dataclasses
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np

from tests.fuzz import pieces, sessions, updates
from tests.fuzz.modes import Mode, Pipeline

T = TypeVar("T")


@dataclass(frozen=True)
class Program:
    """Names in the tables of `pieces`, `updates` and `sessions`, and figures. The defaults are the plainest program."""

    seed: int = 0
    devices: int = 1
    strategy: str | tuple[Any, ...] = "ps"
    options: tuple[tuple[str, Any], ...] = ()
    pipeline: Pipeline = ()
    tables: int = 1
    rows: int = 11
    ids: int = 4
    dtype: str = "float"
    stored: str = "rows"
    numpy: bool = False
    chain: tuple[str, ...] = ()
    lookups: tuple[tuple[str, str], ...] = (("index", "as they are"),)
    bags: bool = False
    after: str = "nothing"
    loss: str = "square"
    gradient: str = "direct"
    where: str = "nowhere"
    number: float = 1.0
    transforms: tuple[str, ...] = ()
    optimizer: str = "sgd"
    writes: tuple[str, ...] = ()
    results: tuple[str, ...] = ()
    kept: tuple[str, ...] = ()
    closed: str = "nothing"
    guard: str = "none"
    around: str = "nothing"
    call: str = "state, batch"
    donate: bool = False
    events: tuple[str, ...] = ("step",)

    @classmethod
    def read(cls, plain: Mapping[str, Any]) -> Program:
        """Returns the program that `dataclasses.asdict` gave, after it went through JSON."""

        def frozen(x: Any) -> Any:
            return tuple(map(frozen, x)) if isinstance(x, list) else x

        return cls(**{name: frozen(value) for name, value in plain.items()})

    def __str__(self) -> str:
        """Tells what isn't as in the plainest program."""
        told = [(f.name, getattr(self, f.name)) for f in dataclasses.fields(self) if getattr(self, f.name) != f.default]
        return ", ".join(f"{name}={value!r}" for name, value in told) or "the plainest"


class _Draws:
    """Draws by name: another option in one table changes no other draw."""

    def __init__(self, seed: int) -> None:
        self.seed = seed

    def _rng(self, name: str) -> np.random.Generator:
        return np.random.default_rng([self.seed, zlib.crc32(name.encode())])

    def one(self, name: str, options: Sequence[T], first: float = 0.0) -> T:
        """One of them; the first one with this probability at least."""
        rng = self._rng(name)
        return options[0 if rng.random() < first else int(rng.integers(len(options)))]

    def some(self, name: str, options: Sequence[T], shares: Sequence[float]) -> tuple[T, ...]:
        """As many as the shares say: of one, two, ..."""
        rng = self._rng(name)
        count = 1 + int(rng.choice(len(shares), p=shares))
        return tuple(options[int(rng.integers(len(options)))] for _ in range(count))

    def groups(self) -> set[str]:
        """Groups of fields, a few of all of them."""
        rng = self._rng("groups")
        count = int(rng.choice([3, 4, 5, 7, 10, len(_GROUPS)], p=[0.2, 0.25, 0.25, 0.15, 0.1, 0.05]))
        return set(rng.choice(sorted(_GROUPS), count, replace=False, p=[_GROUPS[g] for g in sorted(_GROUPS)]))


#: What is varied together -> how often. A program in which all is varied has seldom a table that lifts.
_OFTEN = {"writes": 3, "results": 3, "optimizer": 3, "events": 3, "lookups": 2, "gradient": 2, "kept": 2}
_RARE = (
    "chain",
    "after",
    "loss",
    "where",
    "transforms",
    "closed",
    "guard",
    "around",
    "call",
    "sizes",
    "state",
    "options",
)
_TOTAL = sum(_OFTEN.values()) + len(_RARE)
_GROUPS = {name: _OFTEN.get(name, 1) / _TOTAL for name in (*_OFTEN, *_RARE)}


def draw(seed: int, mode: Mode) -> Program:
    """The program of this seed: a few of its fields are drawn, and the others as in the plainest program."""
    d = _Draws(seed)
    donate = d.one("donate", (False, True))
    events = [name for name in sessions.EVENTS if not (donate and name in sessions.KEEPING)]
    more = d.some("events", events, (0.25, 0.25, 0.25, 0.25))
    where = d.one("where", list(pieces.WHERE)[1:])
    optimizers = [name for name in updates.OPTIMIZERS if name != "poisoned"]  # its infinities are its own
    fields = {
        "writes": {"writes": d.some("writes", list(updates.WRITES), (0.75, 0.25))},
        "results": {"results": _distinct(d.some("results", list(updates.RESULTS), (0.6, 0.3, 0.1)))},
        "optimizer": {"optimizer": d.one("optimizer", optimizers)},
        "events": {"events": ("step", *(e for event in more for e in (event, "step")), "step")},
        "lookups": {
            "lookups": tuple(
                (
                    d.one(f"lookup {k}", list(pieces.BAGS if mode.bags else pieces.LOOKUPS)),
                    d.one(f"ids {k}", list(pieces.ID_KINDS), 0.3),
                )
                for k in range(d.one("lookups", (1, 2, 3), 0.5))
            )
        },
        "gradient": {"gradient": d.one("gradient", list(pieces.GRADIENTS))},
        "kept": {"kept": _distinct(d.some("kept", list(updates.KEPT), (0.7, 0.3)))},
        "chain": {"chain": d.some("chain", list(pieces.CHAIN), (0.7, 0.3))},
        "after": {"after": d.one("after", list(pieces.AFTER))},
        "loss": {"loss": d.one("loss", list(pieces.LOSSES))},
        "where": {"where": where, "number": d.one("number", (0.5, 0.0, float("nan"), float("inf")))},
        "transforms": {"transforms": d.some("transforms", list(pieces.TRANSFORMS), (0.7, 0.3))},
        "closed": {
            "closed": d.one("closed", list(updates.CLOSED)[1:]),
            "events": ("step", *("step, other constants", "step") * 2, *more, "step, other constants"),
        },
        "guard": {"guard": d.one("guard", list(updates.GUARDS))},
        "around": {"around": d.one("around", list(sessions.AROUND))},
        "call": {"call": d.one("call", list(sessions.CALLS))},
        "sizes": {
            "tables": d.one("tables", (1, 2)),
            "rows": d.one("rows", (11, 40, 300, 7, 3, 1)),
            "ids": d.one("ids", (4, 8, 0)) if mode.devices > 1 else d.one("ids", (4, 8, 2, 1, 0)),
        },
        "state": {
            "dtype": d.one("dtype", ("float", "jnp.float32", "jnp.bfloat16", "jnp.float16"), 0.4),
            "stored": d.one("stored", list(pieces.STORED)),
            "numpy": d.one("numpy", (False, True)),
        },
        "options": {"options": d.one("options", mode.options)},
    }
    drawn: dict[str, Any] = {"events": ("step", "step")}
    drawn |= {"rows": 40, "ids": 8} if mode.bags else {}  # a device's own program has several bags
    # With more beside them, owners would seldom add up bags.
    groups = {"lookups", *d.some("beside bags", sorted(_GROUPS), (0.6, 0.4))} if mode.bags else d.groups()
    # Two of them may have one field: the last of `fields` has it, whatever the order of a set is.
    drawn |= {name: value for group in fields if group in groups for name, value in fields[group].items()}
    strategy = d.one("strategy", mode.strategies)
    pipeline = d.one("pipeline", mode.pipelines)
    figures = {"seed": seed, "devices": mode.devices, "donate": donate, "bags": mode.bags}
    return Program(**figures, strategy=strategy, pipeline=pipeline, **drawn)


def _distinct(names: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(names))


def shrunk(program: Program, fails: Callable[[Program], bool]) -> Iterator[Program]:
    """Take back one choice after the other as long as the program fails; each smaller one is yielded."""
    needed: set[tuple[str, Any]] = set()
    while True:
        for change in _changes(program):
            smaller = dataclasses.replace(program, **dict([change]))
            if change not in needed and fails(smaller):
                break
            needed.add(change)
        else:
            return
        program = smaller
        yield program


def _changes(program: Program) -> Iterator[tuple[str, Any]]:
    """Choices that can be taken back, as (field, value in its place): the largest steps first."""
    fields = sorted(dataclasses.fields(program), key=lambda field: field.name != "events")  # they cost the most time
    for field in fields:
        if getattr(program, field.name) != field.default and field.name not in ("seed", "bags"):
            yield field.name, field.default
    for field in fields:
        value = getattr(program, field.name)
        if isinstance(value, tuple) and len(value) > 1 and field.name != "strategy":
            yield from ((field.name, value[:k] + value[k + 1 :]) for k in range(len(value)))
    yield from (("events", _replaced(program.events, k, "step")) for k, e in enumerate(program.events) if e != "step")
    for k, (look, ids) in enumerate(program.lookups):
        pairs = ((look, "as they are"), ("index", ids))
        yield from (("lookups", _replaced(program.lookups, k, pair)) for pair in pairs if pair != (look, ids))


def _replaced(values: tuple[T, ...], k: int, value: T) -> tuple[T, ...]:
    return (*values[:k], value, *values[k + 1 :])
