"""`docs/optimizers.md`: how every optimizer of the installed Optax ends, as a page that is generated.

python -m tests.support.optimizers_page > docs/optimizers.md
"""

from __future__ import annotations

import collections
import itertools
import re
from dataclasses import dataclass

import optax

import autopar
from autopar.ir.rowspace import Const, Row
from autopar.run.planned_step import PlannedStep
from tests.zoo.every_optimizer import NOT_MADE, names, optimizer_case

_HEAD = """\
# Optimizers

How every public optimizer and transformation of Optax {version} ends, applied to a table that is looked up by ids, on
one device. `python -m tests.support.optimizers_page` generates the page by applying each of them. autopar knows no
optimizer: it reads the step's program, so one of your own is treated alike.

| it ends as | rows that the batch doesn't touch | a step works on |
|---|---|---|
| identity | stay as they are, in the table and in its slots | the touched rows |
| constant | keep their values, but for a slot that becomes the same constant in each step | the touched rows |
| deferred | change in each step, each by itself: autopar replays their updates when they are read | the touched rows |
| dense | depend on other rows | all rows |

The last column says which leaves move, what else reads the whole table (*read whole*: once a step, all rows), or why
the table is dense. A transformation that changes gradients only is followed by a learning rate; wrappers hold Adam. *At
once*: one multiplication brings scale-only rows (never touched, or long ago) up to date, however many steps they
missed; all other rows are replayed step by step ([deferred.md](deferred.md)).

"""


@dataclass(frozen=True)
class End:
    """One row of the page."""

    name: str
    how: str
    why: str

    @property
    def module(self) -> str:
        return self.name.rsplit(".", 1)[0]


def end_of(name: str) -> End:
    """How one of `names()` ends."""
    case = optimizer_case(name)
    step = autopar.parallelize(case.step, strategy="ps")
    entry = step.planned_for(case.state, case.batches(0))
    (table,) = (p for p in entry.compiled.plan.parameters if p.path in ("params/emb", "params/fast/emb"))
    if not table.lifted:
        return End(name, "dense", _plain(table.reason))
    moving, constant = _moved(entry)
    if entry.compiled.plan.defers:
        return End(name, "deferred", f"{moving}{_at_rest(entry)}")
    reads, _, _ = table.reason.partition("; to change that")
    notes = dict.fromkeys(_plain(note) for note in reads.split("; ")[1:])
    told = [f"constant: {constant}"] if constant else []
    return End(name, "constant" if constant else "identity", "; ".join([*told, *notes]))


def _moved(entry: PlannedStep) -> tuple[str, str]:
    """Leaves of deferred families that move off the touched rows, and those that become constant there."""
    program = entry.compiled.analysed
    moving, constant = [], []
    for space in program.rows.spaces:
        for k in space.leaves if space.refusal is None else ():
            value = program.rows.value(program.block.outputs[program.new_states[k]])
            assert isinstance(value, Row), "a lifted leaf is in row space"
            if isinstance(value.untouched, Const):
                constant.append(_leaf(program.inputs[k].path))
            elif program.block.outputs[program.new_states[k]] is not program.block.inputs[k]:
                moving.append(_leaf(program.inputs[k].path))
    return tuple(", ".join(dict.fromkeys(leaves)) for leaves in (moving, constant))


def _plain(reason: str) -> str:
    """Without lines, which are those of the test."""
    return re.sub(r" \(/[^)]*\)", "", reason)


def _leaf(path: str) -> str:
    """`opt/0/mu/emb` is its `mu`."""
    if path.startswith("params"):
        return "the table"
    words = [word for word in path.split("/")[:-1] if not word.isdigit()]
    return f"`{words[-1]}`"


def _at_rest(entry: PlannedStep) -> str:
    flushes = [e for e in entry.compiled.program.block.equations if e.op == "ap.flush"]
    return "; at once" if all(e.params["replay"].scale_only is not None for e in flushes) else ""


def page() -> str:
    """The whole page."""
    ends = [end_of(name) for name in names()]
    counts = collections.Counter(end.how for end in ends)
    lines = [_HEAD.format(version=optax.__version__)]
    told = ", ".join(f"{counts[how]} {how}" for how in ("identity", "constant", "deferred", "dense"))
    lines.append(f"{len(ends)} in all: {told}.\n")
    for module, group in itertools.groupby(ends, key=lambda end: end.module):
        lines.append(f"\n## {module}\n\n| | ends as | moves, or why |\n|---|---|---|\n")
        lines += [f"| `{end.name}` | {end.how} | {end.why} |\n" for end in group]
    lines.append("\n## Left out\n\n| | |\n|---|---|\n")
    lines += [f"| `{name}` | {why} |\n" for name, why in NOT_MADE.items()]
    return "".join(lines)


if __name__ == "__main__":
    print(page(), end="")
