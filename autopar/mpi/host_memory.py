"""Whether the tables of all ranks fit into the memory of their machines, before any of it is taken.

Ranks on one machine share its memory: each by itself would find memory for its own tables, and the system would then
end one of them. So they ask together, and where there is too little, every rank raises the same error.
"""

from __future__ import annotations

import collections
import json
import math
import os
from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from autopar.mpi.buffers import RESERVE, memory_refusal
from autopar.mpi.exchange import Exchange
from autopar.mpi.limits import memory_levels


def require_memory(exchange: Exchange, tables: Mapping[str, tuple[tuple[int, ...], npt.DTypeLike]]) -> None:
    """Raises on every rank where the tables of all ranks together don't fit somewhere. Collective.

    `tables`: path -> shape and dtype of what this rank is about to allocate. The error names the host, and the largest
    table there.
    """
    wanted = {path: math.prod(shape) * np.dtype(dtype).itemsize for path, (shape, dtype) in tables.items()}
    message = json.dumps({"host": os.uname().nodename, "levels": memory_levels(), "wanted": wanted}).encode()
    ranks = [json.loads(text.tobytes()) for text in exchange.gather(np.frombuffer(message, np.uint8))]
    for level in dict.fromkeys(name for rank in ranks for name in rank["levels"]):
        sharing = {r: rank for r, rank in enumerate(ranks) if level in rank["levels"]}
        available = min(rank["levels"][level] for rank in sharing.values()) - RESERVE
        sums: collections.Counter[str] = collections.Counter()
        for rank in sharing.values():
            sums.update(rank["wanted"])
        total = sum(sums.values())
        if total > max(available, 0):
            largest = max(sums, key=lambda path: sums[path])
            hosts = " and ".join(sorted({rank["host"] for rank in sharing.values()}))
            where = f"on {hosts} for rank{'s' if len(sharing) > 1 else ''} {', '.join(map(str, sharing))}"
            what = "it"
            if len(sums) > 1:
                what = f"with {len(sums) - 1} more (it alone {sums[largest] / 1e9:.2f} GB)"
            raise memory_refusal(largest, what, total, max(available, 0), where)
