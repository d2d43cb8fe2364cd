"""What every rank runs in `test_worlds.py`: steps with optimisations switched off (`optimize=`)."""

from __future__ import annotations

import re
from typing import Any
from unittest import mock

import autopar  # first: it makes the ranks JAX's processes

# isort: split
import jax
import jax.numpy as jnp
import numpy as np
import optax

from autopar.backends.host.ranks import Ranks
from autopar.ir.strategy import OPTIMIZATIONS
from autopar.mpi.buffers import ALIGNMENT
from autopar.mpi.machines import exchange
from tests.support import entry_steps as by_rows
from tests.support.mpi.host_cases import HOSTS, RANK, RANKS, make, numbers_agree
from tests.support.pairs import pairwise

ROWS, WIDTH, READ, OUT = 61, 8, 4, 96
AXES = {
    **dict.fromkeys(OPTIMIZATIONS, ("on", "off")),
    "model": ("averaged", "lstm_lm", "multi_hot"),
    "optimizer": ("clipped", "adamw"),
}


def check_numbers() -> None:
    """Pairwise: switches x models x optimizers, against the oracle; each number of ranks has some of the rows."""
    for row in pairwise(AXES)[3::4] if RANKS == 4 else pairwise(AXES)[RANKS % 2 :: 2]:
        case = make(row["model"], row["optimizer"])
        on = [name for name in OPTIMIZATIONS if row[name] == "on"]
        step = autopar.parallelize(case.step, strategy=HOSTS, donate=False, optimize=on)
        entry = step.planned_for(case.state, case.batches(0))
        served = [t.path for t in entry.compiled.plan.tables if t.pulled]
        assert bool(served) == (row["hybrid"] == "off"), (row, served)
        numbers_agree(entry, case, str(row), steps=3)


def _step(state: Any, ids: Any) -> Any:
    def loss_of(params: Any) -> Any:
        return jnp.mean((jnp.tanh(params["emb"][ids][..., :READ]).sum(1) @ params["w"] - 1) ** 2)

    loss, grads = jax.value_and_grad(loss_of)(state)
    updates, _ = TX.update(grads, TX.init(state))
    return optax.apply_updates(state, updates), loss


TX = optax.chain(optax.clip_by_global_norm(0.01), optax.sgd(0.3))


def _ids(k: int) -> np.ndarray:
    return np.random.default_rng(k).integers(0, ROWS, (24, 3)).astype(np.int32)


def _ran(optimize: Any) -> tuple[Any, dict[str, int], Any]:
    """Returns the trained state, what this rank sent in the last step, and the planned step."""
    step = autopar.parallelize(_step, strategy=HOSTS, optimize=optimize)
    rng = np.random.default_rng(3)
    shapes = {"emb": (ROWS, WIDTH), "w": (READ, OUT)}
    state: Any = {name: jnp.asarray(rng.normal(size=shape), jnp.float32) for name, shape in shapes.items()}
    before: dict[str, int] = {}
    for k in range(3):
        before = {**exchange().sent_bytes}
        state, _ = step(state, _ids(k))
    sent = {kind: n - before[kind] for kind, n in exchange().sent_bytes.items()}
    return jax.tree.map(np.asarray, autopar.materialize(state)), sent, step


def check_a_first_rank_that_owns_no_row() -> None:
    """Sums of rows go by way of the first rank, which adds none of its own."""
    batch = _ids(0) // RANKS * RANKS + RANKS - 1  # rows are distributed cyclically
    state = {"emb": jnp.ones((ROWS + RANKS, WIDTH)) / 8, "w": jnp.ones((READ, OUT))}
    mine, told = autopar.parallelize(_step, strategy={"emb": HOSTS}, optimize="none", donate=False)(state, batch)
    theirs, wanted = jax.jit(_step)(state, batch)
    for a, b in zip(jax.tree.leaves((mine, told)), jax.tree.leaves((theirs, wanted)), strict=True):
        np.testing.assert_allclose(np.asarray(a), b, rtol=1e-5, atol=1e-6)


def check_bytes() -> None:
    """Exact, against sets counted from the ids: what each switch adds by itself."""
    parts = [np.unique(part) for part in np.split(_ids(2), RANKS)]
    others = [r for r in range(RANKS) if r != RANK]
    told, wanted = (sum((parts[of] % RANKS == r).sum() for of, r in some) for some in _pairs(others))
    owned = [int(np.sum(np.unique(_ids(2)) % RANKS == r)) for r in range(RANKS)]
    columns = [len(range(r, OUT, RANKS)) for r in range(RANKS)]
    first = owned[RANK] if RANK else sum(owned[1:])
    row, dense = 4 * READ, 4 * READ * OUT
    base = {"rows": row * told, "gradients": row * wanted}
    added = {
        "hybrid": {
            "rows": row * columns[RANK] * len(others),
            "gradients": row * sum(columns[r] for r in others),
            "reduce": (ALIGNMENT - dense) * (RANKS > 1),  # each owner's part of its norm, in place of its gradient
        },
        "owner": {"gradients": row * first, "gather": 8 * len(others)},
        "border": {"rows": (4 * WIDTH - row) * told, "gradients": (4 * WIDTH - row) * wanted},
    }
    theirs, sent, step = _ran("all")
    assert {kind: sent[kind] for kind in base} == base, (sent, base)
    for name in OPTIMIZATIONS:  # the others send what they sent
        mine, sent_without, naive = _ran(_without(name))
        more = {kind: n - sent[kind] for kind, n in sent_without.items() if n != sent[kind]}
        assert more == {kind: n for kind, n in added.get(name, {}).items() if n}, (name, more, added)
        exact = name in ("local", "owner", "prefetch")
        for leaf, table in mine.items():
            np.testing.assert_allclose(table, theirs[leaf], rtol=0 if exact else 1e-5, atol=0 if exact else 1e-6)
        said = SAID.get(name, NOTHING) if RANKS > 1 else NOTHING
        assert _said(naive, name).startswith(said), (name, _said(naive, name))
        changes = str(autopar.plan(step, *_shapes()).diff(autopar.plan(naive, *_shapes())))
        assert "the step: optimize all -> " in changes and (name != "owner" or "optimize" in changes)
    _, sent_without, _ = _ran("none")
    # Of wide rows, and of the dense parameter as well, sums go by way of the first rank.
    served = row * (columns[RANK] if RANK else sum(columns[1:]))
    expected = 4 * WIDTH * (wanted + first) + row * sum(columns[r] for r in others) + served
    assert sent_without["gradients"] == expected * (RANKS > 1), (sent_without, expected)


def check_what_is_told() -> None:
    """Of "once" and "prefetch", where they would do something: what, and nothing is said where they are on."""
    batch, ran = by_rows.batch_of(0, np.float32, examples=24), _without("once")
    on, naive = (autopar.parallelize(by_rows.step_of(by_rows.whole), strategy=HOSTS, optimize=o) for o in ("all", ran))
    distinct = max(np.unique(part).size for part in np.split(batch["ids"], RANKS))
    said, lookups = _said(naive, "once", by_rows.make_state(np.float32), batch), batch["ids"].size // RANKS
    begins = "with it functions of a row are computed once for each distinct row: "
    found = re.fullmatch(rf"{begins}(\d+) rows for {lookups} lookups; \d+% of the products' operations are left", said)
    assert found and distinct < int(found[1]) < lookups, (said, distinct)
    text = str(autopar.explain(on, by_rows.make_state(np.float32), batch))
    assert "leaves out" not in text and said.removeprefix(begins) in " ".join(text.split())
    with mock.patch.object(Ranks, "hides_exchanges", staticmethod(lambda exchange: True)):
        _, _, naive = _ran(_without("prefetch"))
        what = "and fetched" if RANKS > 1 else "and copied to the devices"
        rows = "of emb rows of the next batch are asked for beside a step, by ids as shard gives it"
        assert _said(naive, "prefetch") == f"with it {rows}, {what} as far as it doesn't write them", _said(
            naive, "prefetch"
        )


NOTHING = "nothing is at stake here"
#: How it begins what `explain` says of a switch that is off; of the others nothing is at stake on ranks of one machine.
SAID = {
    "hybrid": "with it w are on every rank, and gradients are reduced: a rank sends ",
    "owner": "with it sums of gradients of emb stay with their owners: the first rank sends ",
    "border": "with it of emb slice (",
}


def _without(name: str) -> list[str]:
    return [other for other in OPTIMIZATIONS if other != name]


def _said(naive: Any, name: str, *args: Any) -> str:
    """Returns what `explain` says of an optimisation that is left out."""
    lines = re.sub(r"\n +", " ", str(autopar.explain(naive, *args))).splitlines()
    (said,) = (line for line in lines if line.startswith(f"optimize= leaves out {name!r}: "))
    return said.removeprefix(f"optimize= leaves out {name!r}: ").removesuffix(".")


def _pairs(others: list[int]) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """Returns (asking rank, owner) of rows that this rank sends, and of gradients."""
    return [(of, RANK) for of in others], [(RANK, r) for r in others]


def _shapes() -> tuple[Any, Any]:
    shapes = {"emb": (ROWS, WIDTH), "w": (READ, OUT)}
    return {k: jax.ShapeDtypeStruct(s, jnp.float32) for k, s in shapes.items()}, _ids(2)
