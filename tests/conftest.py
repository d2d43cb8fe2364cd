"""Shared by all tests. XLA's optimizer is turned down: tests compile hundreds of tiny programs, and run each a few
times. What depends on it (memory, HLO) asks for the default in a process of its own."""

import os

os.environ.setdefault("XLA_FLAGS", "")
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
