"""Leaves of a state that can't be ordinary arrays, of whatever kind, and what makes ordinary arrays of them."""

from __future__ import annotations

from typing import Any

import jax

from autopar.deferred_table import DeferredTable
from autopar.host_table import HostTable
from autopar.ir.layout import RowLayout
from autopar.spread_table import Table
from autopar.table_leaf import TableLeaf


def is_table(leaf: Any) -> bool:
    """For `jax.tree` functions."""
    return isinstance(leaf, TableLeaf)


def layout_of(leaf: Any) -> tuple[RowLayout, int] | None:
    """Layout and row axis of a table that has one, None of anything else."""
    if isinstance(leaf, (Table, HostTable, DeferredTable)) and leaf.layout is not None:
        return leaf.layout, leaf.axis
    return None


def materialize(tree: Any) -> Any:
    """The same tree with ordinary arrays in place of Tables: for other JAX functions, for evaluation, for saving."""
    return jax.tree.map(lambda leaf: leaf.materialize() if is_table(leaf) else leaf, tree)
