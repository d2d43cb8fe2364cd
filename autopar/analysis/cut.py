"""Cuts a graph of values in two, so that the values that one side must send take the fewest bytes."""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np


def cheapest_cut(
    costs: Sequence[int], reads: Sequence[tuple[int, int]], given: Collection[int], needed: Collection[int]
) -> frozenset[int]:
    """Returns the values that the first side computes, of the cheapest cuts that with the fewest.

    A value is computed where all that it reads is: the second side computes from what it is sent, and sends nothing
    back.

    Args:
      costs: For each value the cost of sending it.
      reads: Pairs of values: the second is computed from the first.
      given: Values that the first side has.
      needed: Values that the second side needs.
    """
    from scipy.sparse import csr_array  # which takes a tenth of a second to import, and JAX needs it, too
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    count, endless = len(costs), sum(costs) + 1
    source, sink = 2 * count, 2 * count + 1  # k: where a value is computed; count + k: where it is after sending
    edges = {(k, count + k): cost for k, cost in enumerate(costs)}
    edges |= {(source, k): endless for k in given} | {(count + k, sink): endless for k in needed}
    for k, reader in reads:
        edges |= {(count + k, reader): endless, (reader, k): endless}
    ends, capacities = np.array([*edges]).T, np.array([*edges.values()], np.int32)
    graph = csr_array((capacities, (ends[0], ends[1])), shape=(sink + 1, sink + 1))
    rest = csr_array(graph - maximum_flow(graph, source, sink).flow)
    rest.eliminate_zeros()
    reached = breadth_first_order(rest, source, return_predecessors=False)
    return frozenset(int(k) for k in reached if k < count)
