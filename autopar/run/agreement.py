"""Checks that processes are about to run the same step: a difference would hang them, or worse.

Before planning, in this order: JAX's version, the options, the arguments' shapes, the traced program, and the contents
of plain arrays, which stand for the global batch or state. Afterwards: the plan. Each process sees all answers, so that
all raise the same error and none is left waiting.
"""

from __future__ import annotations

import hashlib
import itertools
import re
import zlib
from collections.abc import Mapping, Sequence

import jax
import numpy as np

from autopar import jax_compat
from autopar.backends.clients import Clients
from autopar.backends.global_arrays import is_global
from autopar.compile import Compiled
from autopar.errors import ArgumentsError, AutoparError, LoneClientWarning, StateError, StepError, warn
from autopar.ir.printer import block_text, format_program
from autopar.ir.program import Block, Program
from autopar.jax_types import Json, Leaf
from autopar.launch.group import Group, StoreGroup, odd_one, shown
from autopar.sync import Sync
from autopar.tables.kinds import is_table

#: Size in bytes of the evenly spaced sample that is compared of a larger array.
_SAMPLE = 1 << 20
_IS_GLOBAL = "A plain array means the global one, the same on all processes"
_BY_PROCESS = "autopar.shard(source, per_process=True) makes global batches of what differs by process"
_ONE_BATCH = f"{_IS_GLOBAL}. {_BY_PROCESS}"


def check_same_call(
    processes: StoreGroup, program: Program, options: Mapping[str, str], leaves: Sequence[Leaf]
) -> None:
    """Compares a call that is about to be planned. `leaves`: flat arguments, None for those that may differ.

    Raises AutoparError if versions or options differ. Raises ArgumentsError if shapes or plain arrays differ. Raises
    StepError if programs differ.
    """
    name = program.name
    text = _plain(block_text(program.block, _contents))
    mine = {
        "options": {"JAX": jax.__version__, **options},
        "arguments": [f"{input_.path} {var.type}" for var, input_ in program.named_inputs],
        "program": _digest("\n".join(text).encode()),
        "leaves": [_contents(leaf) for leaf in leaves],
    }
    all_ = processes.values(mine, f"planning {name}")
    k = _other(all_, "options")
    if k is not None:
        theirs, first = all_[k]["options"], all_[0]["options"]
        key = next(key for key in {**first, **theirs} if theirs.get(key) != first.get(key))
        there, here = shown(theirs.get(key), first.get(key)), shown(first.get(key), theirs.get(key))
        raise AutoparError(
            f"{name}: {processes.name(k)} has {key}={there}; {processes.name(0)} has "
            f"{key}={here}. All processes have to run the same script, with the same versions"
        )
    k = _other(all_, "arguments")
    if k is not None:
        pairs = itertools.zip_longest(all_[0]["arguments"], all_[k]["arguments"], fillvalue="nothing")
        a, b = next((a.strip(), b.strip()) for a, b in pairs if a != b)
        raise ArgumentsError(
            f"{name} got other arguments on {processes.name(k)} ({b}) than on "
            f"{processes.name(0)} ({a}). Arguments mean the global state and batch, the same on all processes; "
            f"{_BY_PROCESS}"
        )
    if _other(all_, "program") is not None:
        _raise_program(processes, name, text)
    k = _other(all_, "leaves")
    if k is not None:
        n = next(n for n, (a, b) in enumerate(zip(all_[0]["leaves"], all_[k]["leaves"], strict=True)) if a != b)
        path, role = program.inputs[n].path, program.inputs[n].role
        remedy = f"{_IS_GLOBAL}. Make it of the same seed, or by autopar.init" if role == "state" else _ONE_BATCH
        raise ArgumentsError(
            f"{name}: {path} isn't the same array on {processes.name(k)} as on {processes.name(0)}. {remedy}"
        )


def check_same_batch(processes: StoreGroup, name: str, number: int, leaves: Mapping[str, Leaf]) -> None:
    """Compares arguments, by path, of a call that is planned already; raises ArgumentsError if plain arrays differ.

    Collective. `number`: of the call, from 0.
    """
    all_ = processes.values([_contents(leaf) for leaf in leaves.values()], f"comparing batches of {name}")
    k = odd_one(all_)
    if k is not None:
        path = next(path for path, a, b in zip(leaves, all_[0], all_[k], strict=True) if a != b)
        raise ArgumentsError(
            f"{name}: {path} isn't the same array on {processes.name(k)} as on {processes.name(0)} in call {number}, "
            f"counted from 0. {_ONE_BATCH}"
        )


def check_same_maker(processes: StoreGroup, name: str, block: Block, leaves: Sequence[Leaf]) -> None:
    """Compares a function that makes a state, and its arguments; raises ArgumentsError if they differ."""
    mine = [_digest("\n".join(_plain(block_text(block, _contents))).encode()), [_contents(leaf) for leaf in leaves]]
    all_ = processes.values(mine, f"making a state by {name}")
    k = odd_one(all_)
    if k is not None:
        what = "isn't the same function" if all_[k][0] != all_[0][0] else "has other arguments (a key of its own?)"
        raise ArgumentsError(
            f"init: {name} {what} on {processes.name(k)} than on {processes.name(0)}: each makes "
            "some shards of one state"
        )


def check_same_plan(processes: StoreGroup, compiled: Compiled) -> None:
    """Compares plans, and the programs made of them; raises AutoparError if they differ, although everything that they
    follow from was the same."""
    name = compiled.program.name
    decided = f"{compiled.plan}, {compiled.bound.decisions}".split("TablePlan")
    text = _plain([*decided, *format_program(compiled.program).splitlines()])
    if odd_one(processes.values(_digest("\n".join(text).encode()), f"comparing plans of {name}")) is not None:
        k, a, b = _compare(processes, name, text)
        raise AutoparError(
            f"{name} was planned otherwise on {k} ({b}) than on {processes.name(0)} ({a}). "
            "This is a bug of autopar: please report it"
        )


def _raise_program(processes: StoreGroup, name: str, text: list[str]) -> None:
    k, a, b = _compare(processes, name, text)
    raise StepError(
        f"{name} isn't the same function on {k} as on {processes.name(0)}: traced, it has "
        f"'{b}' there, and '{a}' here. All processes have to run the same code; pass what varies as an argument"
    )


def _compare(processes: StoreGroup, name: str, text: list[str]) -> tuple[str, str, str]:
    """Returns the name of a process that differs, and the first line that does, on the first process and on that
    one."""
    about = f"comparing {name}"
    all_ = processes.values([_digest(line.encode())[:16] for line in text], about)
    k = odd_one(all_)
    assert k is not None, "they differ"
    number = next(n for n, (a, b) in enumerate(itertools.zip_longest(all_[0], all_[k])) if a != b)
    lines = processes.values(text[number].strip() if number < len(text) else "nothing", about)
    return processes.name(k), lines[0], lines[k]


def _other(all_: Sequence[dict[str, Json]], key: str) -> int | None:
    return odd_one([one[key] for one in all_])


def _digest(data: Leaf) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


def _plain(text: list[str]) -> list[str]:
    """Removes addresses of objects from lines."""
    return [re.sub(r" at 0x[0-9a-f]+|0x[0-9a-f]{6,}", "", line) for line in text]


@jax_compat.outside_traces()
def _contents(leaf: Leaf) -> str | None:
    """Returns the digest of a plain array, or of a sample of a large one; None for anything else."""
    if leaf is None or isinstance(leaf, jax.ShapeDtypeStruct):
        return None
    if jax_compat.is_tracer(leaf) or is_table(leaf) or is_global(leaf):
        return None
    if isinstance(leaf, jax.Array) and jax_compat.is_key(leaf.dtype):
        leaf = jax.random.key_data(leaf)
    if not hasattr(leaf, "reshape"):
        leaf = np.asarray(leaf)
    stride = -(-leaf.nbytes // _SAMPLE)
    flat = leaf.reshape(-1) if stride <= 1 else leaf.reshape(-1)[::stride]
    return _digest(np.ascontiguousarray(flat).tobytes())


def check_same_arrays(processes: Group, name: str, arrays: Mapping[str, Leaf]) -> None:
    """Checks that all processes have the same arrays (by path) to begin with, or raises StateError. Collective."""
    all_ = processes.values([_array_digest(x) for x in arrays.values()], f"the state that {name} begins with")
    k = odd_one(all_)
    if k is not None:
        path = next(path for path, a, b in zip(arrays, all_[0], all_[k], strict=True) if a != b)
        raise StateError(
            f"{name}: {path} isn't the same array on {processes.name(k)} as on {processes.name(0)}. All begin with the "
            "same state: make it of the same seed. If they are replicas that became ordinary arrays (by "
            "autopar.materialize, or arithmetic), take autopar.average(state), or go on with the state as returned"
        )


def _array_digest(array: Leaf) -> int:
    data = jax.random.key_data(array) if jax_compat.is_key(getattr(array, "dtype", None)) else array
    return zlib.crc32(np.ascontiguousarray(data).reshape(-1).view(np.uint8).tobytes())


def warn_if_alone(name: str, sync: Sync, clients: Clients) -> None:
    """Warns that a lone client exchanges nothing, unless the user said that there is one client."""
    if clients.processes.size == 1 and sync.clients is None:
        way = type(sync).__name__
        warn(
            f"{name}: this process is the only one, so that sync={way}(...) has nobody to exchange with: it trains as "
            f"without sync=. Start several (python -m autopar launch -n 4 ..., or mpiexec), or say {way}(clients=1)",
            LoneClientWarning,
        )
