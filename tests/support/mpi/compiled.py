"""One compilation of a program for all ranks of the tests: JAX's persistent cache, as its keys are on GPUs.

JAX lets the first process alone write to its cache, and on CPUs a key has the numbers of a process's own devices, so
that each rank compiles all that the others have compiled, once a test. Nothing of it is JAX's public interface.
"""

from __future__ import annotations

from typing import Any

from jax._src import cache_key, compiler, distributed  # noqa: TID251


def share_compilations() -> None:
    """Let all processes write to the cache, under keys without devices' numbers."""
    hash_options, write = cache_key._hash_serialized_compile_options, compiler._cache_write

    def hash_without_numbers(hash_: Any, options: Any, **_: Any) -> Any:
        return hash_options(hash_, options, strip_device_assignment=True)

    def written(*args: Any) -> None:
        state = distributed.global_state
        own, state.process_id = state.process_id, 0
        try:
            write(*args)
        finally:
            state.process_id = own

    cache_key._hash_serialized_compile_options = hash_without_numbers
    cache_key._hash_accelerator_config = cache_key._hash_devices
    compiler._cache_write = written
