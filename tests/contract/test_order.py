"""Ranks plan the same, each for itself: nothing may depend on the order of a set, which is another in each process."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

#: Prints the programs of steps whose variables have other hashes for another SALT.
SCRIPT = """
import os, re
import jax
jax.config.update("jax_num_cpu_devices", 4)
import optax
import autopar
from autopar.ir import program
from autopar.ir.printer import format_block, format_program

SALT = int(os.environ["SALT"])
program.Var.__hash__ = program.Equation.__hash__ = lambda self: (id(self) >> 4) * (2 * SALT + 1) % ((1 << 61) - 1)
from tests.support.microbatched import batch, language_model
from tests.zoo import MODELS, OPTIMIZERS

for name, model in MODELS.items():
    case = model.make(OPTIMIZERS["adam"].make())
    planned = autopar.parallelize(case.step, strategy="ps", donate=False)
    print(name, format_program(planned.planned_for(case.state, case.batches(0)).compiled.program), sep="\\n")
layers = [["params/words", "params/layers/**[0:2]"], ["params/layers/**[2:4]", "params/out"]]
for stages in layers, [["params/words", "params/layers/0"], [*(f"params/layers/{k}" for k in (1, 2, 3)), "params/out"]]:
    step, make = language_model(optax.adam(0.1), dropout=0.1, stacked=stages is layers)
    planned = autopar.parallelize(step, pipeline=autopar.Pipeline(stages, microbatches=4))
    for each in planned.planned_for(make(), batch(0)).compiled.program.staged.programs:
        print(each.phase, each.stage, *format_block(each.block), sep="\\n")
step, make = language_model(optax.adam(0.1), stacked=True)
beyond = [["params/words", "params/layers/**[0:2]"], ["params/layers/**[2:9]", "params/out"]]
try:
    autopar.parallelize(step, pipeline=autopar.Pipeline(beyond))(make(), batch(0))
except autopar.StrategyError as error:
    print(error)
"""


@pytest.mark.long
def test_programs_do_not_depend_on_hashes() -> None:
    texts = []
    for salt in "0123":
        environment = {**os.environ, "SALT": salt, "PYTHONHASHSEED": salt}
        done = subprocess.run(
            [sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, timeout=300
        )
        assert done.returncode == 0, done.stderr
        texts.append(done.stdout)
    assert len(texts[0].splitlines()) > 1000
    assert all(text == texts[0] for text in texts)
