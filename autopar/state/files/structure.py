"""The structure of a state as JSON: dicts, lists, tuples and None as such, other nodes by their names.

Other nodes (named tuples of optimizers, Flax's classes) are not made again from a file: that would run whatever code
the file names. Their state is restored into a template.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from autopar.errors import CheckpointError

Node = dict[str, Any]


def describe_tree(tree: Any, numbers: Iterator[int] | None = None) -> Node:
    """The structure, leaves numbered as `jax.tree.leaves` has them: by `numbers` in a part of a tree."""
    numbers = itertools.count() if numbers is None else numbers
    children = jax.tree_util.tree_flatten_with_path(tree, is_leaf=lambda node: node is not tree)[0]
    if tree is None:
        return {"none": True}
    if len(children) == 1 and not children[0][0]:
        return {"leaf": next(numbers)}
    nodes = [describe_tree(child, numbers) for _, child in children]
    kind = type(tree)
    if kind in (list, tuple):
        return {kind.__name__: nodes}
    if kind is dict:
        keys = [path[0].key for path, _ in children]
        if all(type(key) in (str, int) for key in keys):
            return {"dict": [[key, node] for key, node in zip(keys, nodes, strict=True)]}
    return {"other": f"{kind.__module__}.{kind.__qualname__}", "children": nodes}


def leaf_numbers(node: Node) -> Iterator[int]:
    """Yields the leaves of a structure, in its order; a ValueError if it is none."""
    match node:
        case {"leaf": int(number)}:
            yield number
        case {"none": True}:
            return
        case {"list": list(nodes)} | {"tuple": list(nodes)} | {"other": str(), "children": list(nodes)}:
            for child in nodes:
                yield from leaf_numbers(child)
        case {"dict": list(pairs)}:
            for pair in pairs:
                match pair:
                    case [str() | int(), child]:
                        yield from leaf_numbers(child)
                    case _:
                        raise ValueError(f"{str(pair)[:80]} is no entry of a dict")
        case _:
            raise ValueError(f"{str(node)[:80]} is no structure")


def rebuild(node: Node, leaves: Sequence[Any]) -> Any:
    """The tree of a structure that was described; a CheckpointError for other nodes than those above."""
    if "leaf" in node:
        return leaves[node["leaf"]]
    if "none" in node:
        return None
    if "list" in node:
        return [rebuild(child, leaves) for child in node["list"]]
    if "tuple" in node:
        return tuple(rebuild(child, leaves) for child in node["tuple"])
    if "dict" in node:
        return {key: rebuild(child, leaves) for key, child in node["dict"]}
    raise CheckpointError(
        f"the checkpoint holds a {node['other']}, which can't be made from a file. Give a state of the same structure, "
        "of arrays or of shapes: restore(path, like=jax.eval_shape(make_state, key))"
    )
