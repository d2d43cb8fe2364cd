"""Eight CPU devices in one process. These tests run by themselves: `pytest tests/devices` (`make test` does so)."""

import jax

jax.config.update("jax_num_cpu_devices", 8)
