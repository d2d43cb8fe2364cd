"""Plain against planned: everything that compares `parallelize` with `jax.jit` on one device
(hosts too, in one process)."""
