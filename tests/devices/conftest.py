"""Eight CPU devices in one process. These tests run by themselves: `pytest tests/devices` (`make test` does so)."""

import os
import tempfile

import jax

# Rates are measured for the tests, and kept for them alone.
os.environ["XDG_CACHE_HOME"] = tempfile.mkdtemp(prefix="autopar-tests-")
jax.config.update("jax_num_cpu_devices", 8)
