"""`python -m benchmarks [NAME[.PART] ...]`: the benchmarks or parts that are named, or all parts of all.

A name alone runs a benchmark's first part: `hosts` the comparison with other systems, `hosts.binding` that of bound
ranks.
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator

#: Modules -> their parts, which are functions of that name.
BENCHMARKS = {
    "first_week": ("first_week",),
    "one_device": ("lookup", "adamw", "dispatch", "planning", "crossover", "microbatches"),
    "devices": ("devices", "border", "shards", "whole"),
    "choice": ("choice",),
    "hosts": ("hosts", "binding"),
    "torchrec": ("torchrec", "one_table", "one_device"),
    "exchange": ("exchange", "rings", "overlap", "hot"),
    "bags": ("bags",),
    "prefetch": ("prefetch", "deferred", "accelerators", "one_machine", "one_process"),
    "pipelines": ("pipelines", "network", "auto", "systems", "bubbles"),
    "spectrain": ("spectrain", "prediction"),
    "replicas": ("replicas", "hybrid", "clients", "stragglers"),
    "memories": ("memories", "gpt", "accelerator"),
    "ablation": ("ablation", "table4"),
    "scaling": ("scaling",),
    "soak": ("soak",),
}


def chosen(names: list[str]) -> Iterator[tuple[str, str]]:
    """Yields (module, part) of each name; of none, of all benchmarks.

    Raises:
      SystemExit: there is no such benchmark or part.
    """
    for name in names or [f"{module}.{part}" for module, parts in BENCHMARKS.items() for part in parts]:
        module, _, part = name.partition(".")
        parts = BENCHMARKS.get(module, ())
        if not parts or (part and part not in parts):
            known = "; ".join(f"{module} ({', '.join(parts)})" for module, parts in BENCHMARKS.items())
            raise SystemExit(f"no benchmark {name}; there are {known}, named as in hosts or hosts.binding")
        yield module, part or parts[0]


def main(names: list[str]) -> None:
    """Runs benchmarks by name, each as `NAME` or `NAME.PART`."""
    for module, part in list(chosen(names)):
        print(f"== {module}" + (f".{part}" if part != module else ""), flush=True)
        getattr(importlib.import_module(f"benchmarks.{module}"), part)()


if __name__ == "__main__":
    main(sys.argv[1:])
