"""Say in the plan what servers keep of a step that `split_servers` has cut, and what workers exchange with them."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.bound_plan import BoundPlan
from autopar.ir.program import Program
from autopar.ir.served import ServedStep, ServerPart
from autopar.ir.sync_plan import ServedPlan, ServerPlan
from autopar.sync import Async


def served_plan(
    program: Program, bound: BoundPlan, served: ServedStep, sync: Async, clients: int, ranks: Sequence[int] = ()
) -> ServedPlan:
    """Returns what is decided of a step that `split_servers` has cut, as the plan has it. `ranks`: of the servers that
    are processes of their own."""
    paths = [input_.path for input_ in program.inputs]
    lifted = {k for space in program.facts.spaces if bound.family(space.family) is not None for k in space.leaves}
    kept = [pair for part in served.servers for pair in zip(part.leaves, part.pull.inputs, strict=False)]
    pulled = {v: served.leaf_of(k) for k, v in kept}
    lookups = (e for part in served.servers for e in part.pull.equations if e.op == "ap.pull")
    looked_up = {pulled[e.inputs[0]] for e in lookups if e.inputs[0] in pulled}
    along = [axis for k, axis in enumerate(bound.placements) if axis is not None and program.inputs[k].role == "batch"]
    sizes = [v.shape[a] for v, a in zip(program.block.inputs, bound.placements, strict=False) if a is not None]
    return ServedPlan(
        name=sync.name,
        clients=clients,
        staleness=sync.staleness,
        servers=tuple(_server_plan(program, served, part) for part in served.servers),
        by_rows=tuple(paths[k] for k in sorted(lifted & looked_up - served.whole)),
        clocks=tuple(paths[k] for k in served.clocks),
        examples=max(sizes, default=0) if along else 0,
        ranks=tuple(ranks[: len(served.servers)]),
    )


def _server_plan(program: Program, served: ServedStep, part: ServerPart) -> ServerPlan:
    pieces: dict[str, float] = {}
    for piece in (served.pieces[k] for k in part.leaves if k in served.pieces):
        path = program.inputs[piece.leaf].path
        share = (piece.stop - piece.start) / program.block.inputs[piece.leaf].shape[piece.axis]
        pieces[path] = pieces.get(path, 0.0) + share
    return ServerPlan(
        leaves=tuple(f"{program.inputs[served.leaf_of(k)].path}{served.pieces.get(k, '')}" for k in part.leaves),
        leaf_bytes=part.leaf_bytes,
        pull_bytes=part.pull_bytes,
        push_bytes=part.push_bytes,
        pieces=pieces,
    )
