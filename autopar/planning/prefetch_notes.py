"""Notes of `explain` on rows of tables on hosts that are fetched beside the step before (`analysis.prefix`)."""

from __future__ import annotations

from collections.abc import Sequence

from autopar.analysis.prefix import prefix_of
from autopar.backends.host.ranks import Ranks
from autopar.ir.optimizations import is_on
from autopar.ir.program import family_of, known
from autopar.ir.segments import ExchangeSegment
from autopar.launch.group import everyone
from autopar.mpi.machines import exchange
from autopar.run.planned_step import PlannedStep


def prefetch_note(planned: PlannedStep) -> str:
    """Returns a line on what ranks ask for and fetch of the next batch; "" if nobody asks."""
    lines = prefetches(planned) if planned.options.optimizes("prefetch") else []
    name = planned.compiled.analysed.name
    return f"\nBatches of autopar.shard(source, step={name}): {'; '.join(lines)}." if lines else ""


def prefetches(planned: PlannedStep) -> Sequence[str]:
    """Returns for tables on hosts of several ranks what of the next batch is asked for and fetched beside a step."""
    compiled, ran = planned.compiled, planned.compiled.as_run
    hosted = {f.family for f in ran.bound.families if f.on_hosts and not f.table.pulled}
    if ran.bound.devices == 1 or not hosted or not compiled.analysed.new_states:
        return []
    usual, is_here = exchange(by_leaders=is_on(compiled.plan.optimize, "local")), everyone().size == ran.bound.devices
    if is_here and not Ranks.hides_exchanges(usual):
        return ["nothing is fetched ahead, as all ranks are on one machine, whose cores compute and exchange"]
    if compiled.plan.reduction_backend != "mpi":
        return ["nothing is fetched ahead, as the devices of all ranks run their programs together"]
    items = known(compiled.program.segments).items
    exchanges = [e for item in items if isinstance(item, ExchangeSegment) for e in item.equations]
    pooled = {family_of(e) for e in exchanges if e.op == "ap.pool"}
    prefix = prefix_of(compiled.program, items, hosted)
    fetched, asked = (set(map(family_of, of)) for of in ((prefix.fetches, prefix.routes) if prefix else ((), ())))
    if is_here and not usual.knows_lists:
        return ["nothing is fetched ahead, as node leaders fetch for several ranks"]
    paths: dict[str, list[str]] = {}
    for space in ran.analysed.facts.spaces:
        text = "rows of the next batch are asked for beside a step, and fetched as far as it doesn't write them"
        if space.family not in asked:
            text = "nothing is asked for ahead, as ids depend on the state"
        elif space.family not in fetched:
            reason = "what is sent depends on other values than rows of tables"
            reason = "rows that a step doesn't touch move, too" if space.deferred else reason
            reason = "owners add up bags of them" if space.family in pooled else reason
            text = f"rows of the next batch are asked for beside a step, but not fetched, as {reason}"
            text = text if fetched else f"nothing is fetched ahead, as {reason}"
        if space.family in hosted:
            paths.setdefault(text, []).append(ran.analysed.inputs[space.tables[0]].path)
    return [f"of {', '.join(of)} {text}" for text, of in paths.items()]
