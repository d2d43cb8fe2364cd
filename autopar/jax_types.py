"""Names for types that JAX has no class for: a type checker takes them for anything, a reader doesn't."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeAlias

#: A leaf of a pytree: an array of JAX or NumPy, a tracer, a number, a shape, or one of autopar's own (`tables.leaf`).
Leaf: TypeAlias = Any
#: An array of JAX or NumPy, or a tracer: operators mean the same of all, which `jax.Array` doesn't say.
Array: TypeAlias = Any
#: A tree of leaves, as `jax.tree` has it: a state, a batch, a step's result, one of its arguments.
Pytree: TypeAlias = Any
#: Static parameters of an equation, by name, as a primitive's `bind` takes them.
Params: TypeAlias = Mapping[str, Any]
#: Plain data, as JSON has it: numbers, texts, lists and dicts of such.
Json: TypeAlias = Any
#: A dtype of NumPy's, or JAX's own of random keys.
Dtype: TypeAlias = Any
#: The type of a value of the IR, `ir.program.Type`: whoever works on arrays doesn't ask which it is.
ValueType: TypeAlias = Any
#: A jaxpr or a closed one, which are one class since jax 0.11.
Jaxpr: TypeAlias = Any
#: The structure of a tree: `jax.tree_util.PyTreeDef`, which type checkers take for a variable.
PyTreeDef: TypeAlias = Any
#: A device: `jax.Device`, which type checkers take for a variable.
Device: TypeAlias = Any
#: A sharding of any class.
Sharding: TypeAlias = Any
#: An index of arrays: an integer, a slice, an array, or a tuple of such.
Index: TypeAlias = Any
#: A communicator or request of mpi4py, which need not be installed.
Comm: TypeAlias = Any
Request: TypeAlias = Any
#: A message of workers, servers and processes: plain data, and arrays of NumPy.
Sent: TypeAlias = Any
