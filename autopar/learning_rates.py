"""Learning rates for batches that grow with the number of devices. Optax, which they are made of, is imported on
use."""

from __future__ import annotations

import math
from typing import Any

from autopar.errors import ArgumentsError, check_whole, is_number


def large_batch_schedule(
    base_batch: int,
    batch: int,
    *,
    learning_rate: float,
    steps_per_epoch: int,
    warmup_epochs: float = 10,
    constant_epochs: float = 0,
    decay: float = 1 / math.sqrt(2),
) -> Any:
    """Makes a schedule that warms up linearly to a rate scaled by the batch, and then decays once an epoch.

    The schedule is that of Zhang et al., "Distributed deep learning strategies for automatic speech recognition"
    (section 4): a rate of 0.1 for batches of 256 becomes 1 for batches of 2,560, linearly over 10 epochs, and is
    multiplied by 1/sqrt(2) at the beginning of the 11th epoch and of each later one.

    `batch` and `steps_per_epoch` follow what one update of the optimizer stands for. Where clients have replicas
    (`sync=` `Average`, `Hybrid`, `DPSGD`, `ADPSGD`), and in data parallelism, `batch` is the examples of all clients,
    clients times minibatch, and a client counts its own steps, examples / `batch` in an epoch of all examples. With
    `Async` each push is an update: `batch` is one worker's minibatch, and servers count the pushes of all workers,
    examples / minibatch in an epoch. Steps of its `warmup`, and all with `staleness=0`, are one update of all workers.

    Args:
      base_batch: Examples of a batch for which `learning_rate` is right.
      batch: Examples of a batch now; it may be smaller than `base_batch`, and then the rate falls during the warm-up.
      learning_rate: The rate for `base_batch`, with which the warm-up begins. The warm-up goes to
        `learning_rate * batch / base_batch`.
      steps_per_epoch: Updates in an epoch.
      warmup_epochs: Epochs of the warm-up. 0: training begins with the scaled rate.
      constant_epochs: Epochs at the scaled rate between the warm-up and the first decay.
      decay: The factor of each epoch behind these, above 0 and up to 1.

    Returns:
      An Optax schedule: a function from the number of updates to the learning rate, a scalar.

    Raises:
      ArgumentsError: a batch or number of steps that is no whole number above 0, a rate or number of epochs that is
        negative or not finite, or another decay.

    Example:
      >>> import optax
      >>> rate = large_batch_schedule(256, 2560, learning_rate=0.1, steps_per_epoch=100)
      >>> [round(float(rate(epoch * 100)), 3) for epoch in (0, 5, 10, 11, 12)]
      [0.1, 0.55, 0.707, 0.5, 0.354]
      >>> tx = optax.sgd(rate, momentum=0.9)
    """
    for name, count in (("base_batch", base_batch), ("batch", batch), ("steps_per_epoch", steps_per_epoch)):
        check_whole(f"large_batch_schedule({name}=%r)", count)
    if not is_number(learning_rate) or learning_rate <= 0:
        raise ArgumentsError(f"large_batch_schedule(learning_rate={learning_rate!r}): give a number above 0")
    for name, epochs in (("warmup_epochs", warmup_epochs), ("constant_epochs", constant_epochs)):
        if not is_number(epochs) or epochs < 0:
            raise ArgumentsError(f"large_batch_schedule({name}={epochs!r}): give a number of epochs, 0 or more")
    if not is_number(decay) or not 0 < decay <= 1:
        raise ArgumentsError(f"large_batch_schedule(decay={decay!r}): give a factor above 0 and up to 1")
    import optax

    scaled = learning_rate * batch / base_batch
    warm = round(warmup_epochs * steps_per_epoch)
    steady = round((warmup_epochs + constant_epochs) * steps_per_epoch)
    schedules = [
        optax.linear_schedule(learning_rate, scaled, max(warm, 1)),
        optax.constant_schedule(scaled),
        optax.exponential_decay(scaled * decay, steps_per_epoch, decay, staircase=True),
    ]
    return optax.join_schedules(schedules, [warm, steady])
