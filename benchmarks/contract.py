"""The contract over the whole product of models and optimizers, 20 steps each (`make test` runs a pairwise cover), and
over every optimizer of Optax whose rows are deferred."""

from __future__ import annotations

import itertools

import jax

import autopar
from autopar.planning.verify import compare_runs
from tests.support.deferred_optimizers import DEFERRED, check
from tests.zoo import MODELS, OPTIMIZERS


def product(steps: int = 20) -> None:
    """Prints a line per case; raises at the end if any differs."""
    wrong = []
    for model, optimizer in itertools.product(MODELS, OPTIMIZERS):
        chosen = OPTIMIZERS[optimizer]
        case = MODELS[model].make(chosen.make())
        step = autopar.parallelize(case.step, strategy="ps", donate=False)
        entry = step.entry(case.state, case.batches(0))
        lifted = {p.path for p in entry.compiled.plan.parameters if p.lifted}
        expected = set(case.tables) if chosen.lifts else set()
        found = compare_runs(entry, [jax.tree.leaves((case.state, case.batches(i))) for i in range(steps)])
        ok = found.ok and lifted == expected
        print(f"{'ok   ' if ok else 'WRONG'} {model} x {optimizer}: {len(lifted)} tables lifted", flush=True)
        if not ok:
            wrong.append(f"{model} x {optimizer}\nlifted {lifted}, expected {expected}\n{found}")
        jax.clear_caches()
    if wrong:
        raise SystemExit("\n".join(wrong))


def optimizers() -> None:
    """Every optimizer of Optax that ends deferred: 12 steps in float32, 300 in float64; raises where one differs."""
    wrong = []
    for name in DEFERRED:
        try:
            check(name)
        except AssertionError as error:
            wrong.append(f"{name}: {error}")
        print(f"{'WRONG' if wrong and wrong[-1].startswith(name + ':') else 'ok   '} {name}", flush=True)
        jax.clear_caches()
    if wrong:
        raise SystemExit("\n".join(wrong))
