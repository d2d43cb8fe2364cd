"""Operations behind lookups in tables on hosts, which the rows' owners run: the bytes that travel, and the numbers."""

from __future__ import annotations

from typing import Any

import autopar  # first: it makes the ranks JAX's processes

# isort: split
import jax
import jax.numpy as jnp
import numpy as np

from autopar.mpi.machines import exchange
from tests.support.borders import KEPT, MOVED, ROWS, WIDTH, ids_of

RANK, RANKS = jax.process_index(), jax.process_count()
FORMS = {
    **{
        name: MOVED[name]
        for name in ("slice", "halves", "slice, cast", "kept sum", "reshaped, slice", "filled with 2", "widened ahead")
    },
    "all columns": (KEPT["all columns"], 128, 128),
}
#: Of these XLA rounds a product before it is subtracted in one program, and doesn't in the other (to the bit with
#: `--xla_cpu_max_isa=AVX`, which has no such instruction).
CONTRACTED = ("halves", "kept sum")


def _step(state: Any, ids: Any) -> Any:
    def loss_of(tables: Any) -> Any:
        return sum(jnp.mean(jnp.tanh(look(tables[name], ids)) ** 2) for name, (look, *_) in FORMS.items())

    loss, grads = jax.value_and_grad(loss_of)(state)
    return jax.tree.map(lambda t, g: t - 0.3 * g, state, grads), loss


def _trained(steps: int = 3, **options: Any) -> tuple[Any, dict[str, int], Any]:
    """Returns the trained tables, what this rank sent in the last step, and the planned step."""
    step = autopar.parallelize(_step, strategy=("ps", "hosts"), **options)
    rng = np.random.default_rng(4)
    state: Any = {name: jnp.asarray(rng.normal(size=(ROWS, WIDTH)), jnp.float32) for name in FORMS}
    before = dict(exchange().sent_bytes)
    for k in range(steps):
        before = dict(exchange().sent_bytes)
        state, _ = step(state, ids_of(k))
    sent = {kind: exchange().sent_bytes[kind] - before[kind] for kind in ("rows", "gradients")}
    return jax.tree.map(np.asarray, autopar.materialize(state)), sent, step


def check_bytes_and_numbers() -> None:
    """Exact, by what each rank's ids are; and the numbers of a step that moves nothing."""
    mine, sent, step = _trained()
    theirs, sent_whole, _ = _trained(optimize=["once"])
    for name, table in mine.items():
        if name in CONTRACTED:
            np.testing.assert_allclose(table, theirs[name], rtol=1e-5, atol=1e-6, err_msg=name)
        else:
            np.testing.assert_array_equal(table, theirs[name], err_msg=name)
    parts = {name: np.split(3 * ids_of(2) if "filled" in name else ids_of(2), RANKS) for name in FORMS}
    rows = gradients = 0
    for name, (_, looked_up, gradient) in FORMS.items():
        asked = [[np.unique(p[(p < ROWS) & (p % RANKS == owner)]).size for owner in range(RANKS)] for p in parts[name]]
        rows += looked_up * sum(asked[other][RANK] for other in range(RANKS) if other != RANK)
        gradients += gradient * sum(asked[RANK][owner] for owner in range(RANKS) if owner != RANK)
    assert sent == {"rows": rows, "gradients": gradients}, (sent, rows, gradients)
    assert all(sent_whole[kind] > 2 * sent[kind] for kind in sent), (sent_whole, sent)
    text = " ".join(str(autopar.explain(step)).split())
    assert text.count("at the rows' owners, who send") == len(FORMS) - 2
    assert "runs behind the lookup, and the rows' owners send 64 B a row in place of 128 B" in text
    assert "the owners of" in text and "nothing crosses between them" in text
    assert "reduce_sum (" in text and "who send 4 B a row in place of 128 B" in text
