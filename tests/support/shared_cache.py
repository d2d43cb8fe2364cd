"""Compilations that the ranks of tests share on one machine."""

from __future__ import annotations

from typing import Any

from jax._src import cache_key, compiler, distributed


def share_cache() -> None:
    """Lets processes of this machine share compilations, by JAX's persistent cache with keys made as on GPUs, without
    device numbers.

    JAX lets the first process alone write to it, for the sake of slow filesystems, and on CPUs a key has the numbers of
    a process's own devices, so that each rank compiles what the others have compiled.
    """
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
