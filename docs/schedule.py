"""`python docs/schedule.py`: draws docs/schedule.png, a pipeline's schedule as `autopar.report` draws it."""

from __future__ import annotations

from pathlib import Path

import jax
import jax.numpy as jnp

import autopar
from autopar.report.devices import schedule_figure

STAGES, MICROBATCHES, WIDTH = 4, 8, 64


def train_step(params: list[jax.Array], batch: jax.Array) -> tuple[list[jax.Array], jax.Array]:
    def loss_fn(params: list[jax.Array]) -> jax.Array:
        x = batch
        for w in params:
            x = jnp.tanh(x @ w)
        return jnp.mean(x**2)

    loss, grads = jax.value_and_grad(loss_fn)(params)
    return [w - 0.1 * g for w, g in zip(params, grads, strict=True)], loss


def main() -> None:
    jax.config.update("jax_num_cpu_devices", STAGES)
    pipeline = autopar.Pipeline(stages=STAGES, microbatches=MICROBATCHES, schedule="zero-bubble")
    step = autopar.parallelize(train_step, pipeline=pipeline)
    params, batch = [jnp.eye(WIDTH)] * (2 * STAGES), jnp.ones((8 * MICROBATCHES, WIDTH))
    plan = step.planned_for(params, batch).compiled.plan.pipeline
    assert plan is not None, "the step has stages"
    figure = schedule_figure(plan)
    figure.savefig(Path(__file__).with_suffix(".png"), dpi=110)


if __name__ == "__main__":
    main()
