"""Whether a program's planned session shows the user what its plain one does, up to what rounding makes of it."""

from __future__ import annotations

import re
import traceback
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import numpy as np

import autopar
from tests.fuzz.program import Program
from tests.fuzz.script import COMMON, DRAWN, text_of

#: Error allowed as a share of a leaf's largest change, and in terms of the program's coarsest rounding.
RELATIVE, ROUNDINGS = 1e-9, 32
#: Roundings by which inputs are disturbed; how often; a difference is wrong if it is so many times what that makes.
SHAKE, SHAKES, TIMES_SHAKEN = 8.0, 5, 20.0
#: Statuses that are faults.
FAULTS = ("wrong", "crash", "died", "hang")


@dataclass(frozen=True)
class Outcome:
    """What became of a program.

    Attributes:
      status: "ok"; "dense": no table lifts, and it wasn't run; "invalid": plain JAX refuses it; "refused" by an error
        of autopar's; "sensitive": its plain numbers differ as much where its inputs are off by a rounding; "wrong";
        "crash": another error. ("died" and "hang" are found by who started the process.)
      told: The leaves that differ, or the error.
      place: The last line of autopar in the error's traceback.
    """

    status: str
    told: tuple[str, ...] = ()
    place: str = ""

    @property
    def signature(self) -> tuple[str, str]:
        """Tells faults of one kind."""
        return self.status, self.place


class _Taken(Exception):
    pass


def _load(program: Program, folder: Path) -> SimpleNamespace:
    """The script as a module; its file is there for tracebacks."""
    text, path = text_of(program), folder / f"program_{program.seed}.py"
    path.write_text(text)
    module = SimpleNamespace(__name__="program", __file__=str(path))
    exec(compile(text, str(path), "exec"), module.__dict__)
    return module


def _arguments(session: Any, batch: Any) -> tuple[Any, ...]:
    """What the session's step is called with."""
    taken: list[tuple[Any, ...]] = []

    def take(*arguments: Any) -> Any:
        taken.append(arguments)
        raise _Taken

    try:
        session.call(take, session.state, batch)
    except _Taken:
        pass
    return taken[0]


def outcome(program: Program, folder: Path, *, dense: bool = False) -> Outcome:
    """Run a program plain and planned.

    Args:
      program: What was drawn.
      folder: For its text; one for all ranks, whose plans name its lines.
      dense: Run it even if no table lifts.
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        module = _load(program, folder)
        try:
            session = module.Session(True)
            plan = session.step.planned_for(*_arguments(session, module.batch(0))).compiled.plan
            failed: Exception | None = None
        except Exception as error:
            plan, failed = None, error
        if plan is not None and not plan.lifts and not dense and not program.pipeline:
            return Outcome("dense", tuple(str(p.reason) for p in plan.parameters if "table" in p.path))
        finite: list[bool] = []
        try:
            theirs = _plain(module, finite)
        except Exception as error:
            return Outcome("invalid", (_first_line(error),))
        try:
            if failed is not None:
                raise failed
            mine = module.run(session)
            if program.pipeline and program.pipeline[2] is not None:  # minibatches that follow one another: a replay
                autopar.verify(session.step, *_arguments(session, module.batch(0)), steps=5)
        except Exception as error:
            refused = isinstance(error, autopar.AutoparError) and not isinstance(error, autopar.VerificationError)
            return Outcome("refused" if refused else "crash", (_first_line(error),), _place(error))
        counted = finite.index(False) + 1 if False in finite else len(finite)
        start = jax.tree.map(np.asarray, module.start())
        found = _differing(mine[:counted], theirs[:counted], start, _precision(module, program))
        if not found:
            return Outcome("ok")
        shaken = [_shaken(module, k, theirs[:counted]) for k in range(SHAKES)]
    worst = [max(errors) for errors in zip(*shaken, strict=True)]
    faults = [told for leaf, error, told in found if not error <= TIMES_SHAKEN * worst[leaf]]
    return Outcome("wrong", tuple(faults)) if faults else Outcome("sensitive", tuple(told for *_, told in found))


def _plain(module: Any, finite: list[bool] | None = None) -> list[Any]:
    """Everything that the plain session shows, and whether the state was finite each time something was seen."""
    session = module.Session(False)
    see = session.see

    def seen(tree: Any) -> None:
        see(tree)
        if finite is not None:
            finite.append(all(np.isfinite(np.asarray(x)).all() for x in _floats(session.state)))

    session.see = seen
    return module.run(session)


def _floats(tree: Any) -> list[Any]:
    return [x for x in jax.tree.leaves(tree) if jax.numpy.issubdtype(x.dtype, jax.numpy.floating)]


def _first_line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).strip()[:400]}"


def _place(error: Exception) -> str:
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "/autopar/" in f.filename]
    return f"{frames[-1].filename.split('/autopar/')[-1]}:{frames[-1].lineno}" if frames else type(error).__name__


def _precision(module: Any, program: Program) -> float:
    """The coarsest rounding in the program's text."""
    text = text_of(program).split(DRAWN)[1].split(COMMON)[0]
    names = {"float64", *re.findall(r"\b(bfloat16|float16|float32)\b", text)}
    return max(float(jax.numpy.finfo(name).eps) for name in names)


def _leaves(seen: Sequence[Any]) -> list[tuple[str, np.ndarray]]:
    return [
        (f"seen {k}{jax.tree_util.keystr(path)}", np.asarray(x))
        for k, tree in enumerate(seen)
        for path, x in jax.tree_util.tree_leaves_with_path(tree)
    ]


def _error(a: np.ndarray, b: np.ndarray) -> float:
    """The largest difference; infinite where other values aren't finite."""
    a, b = a.astype(np.float64), b.astype(np.float64)
    same = (a == b) | (np.isnan(a) & np.isnan(b))
    with np.errstate(invalid="ignore"):
        off = np.where(same, 0.0, np.abs(a - b))
    return float(np.max(np.nan_to_num(off, nan=np.inf), initial=0.0))


def _differing(mine: Sequence[Any], theirs: Sequence[Any], start: Any, eps: float) -> list[tuple[int, float, str]]:
    """(number of the leaf, error, what is said of it) of leaves that are off by more than rounding."""
    found = []
    before = {jax.tree_util.keystr(path): x for path, x in jax.tree_util.tree_leaves_with_path(start)}
    for k, ((path, a), (_, b)) in enumerate(zip(_leaves(mine), _leaves(theirs), strict=True)):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            found.append((k, np.inf, f"{path}: {a.dtype}{a.shape}, plain {b.dtype}{b.shape}"))
            continue
        old = before.get(path.partition("[")[1] + path.partition("[")[2])
        size = float(np.max(np.abs(np.nan_to_num(b.astype(np.float64), posinf=0, neginf=0)), initial=0.0))
        moved = size
        if old is not None and old.shape == b.shape:
            change = np.nan_to_num(b.astype(np.float64) - old.astype(np.float64), posinf=0, neginf=0)
            moved = float(np.max(np.abs(change), initial=0.0))
        exact = not jax.numpy.issubdtype(b.dtype, jax.numpy.floating)
        allowed = 0.0 if exact else max(RELATIVE, ROUNDINGS * eps) * moved + ROUNDINGS * eps * size
        error = _error(a, b)
        if error > allowed:
            other = int(np.sum(a != b))
            found.append((k, error, f"{path}: off by {error:.3g} of {size:.3g}, {other} of {b.size} differ"))
    return found


def _shaken(module: Any, seed: int, theirs: Sequence[Any]) -> list[float]:
    """How far the plain program's leaves move where its inputs are off by some roundings."""
    module.SHAKE, module.SHAKEN = SHAKE, seed
    seen = _plain(module)[: len(theirs)]
    module.SHAKE = 0.0
    return [_error(a, b) for (_, a), (_, b) in zip(_leaves(seen), _leaves(theirs), strict=True)]
