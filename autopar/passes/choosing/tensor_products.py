"""Which products are divided over the devices of a tensor axis: those that a strategy names, and those where it pays.

By a strategy of "tensor" all weights that can be divided are; "auto" divides a group where that is predicted to save
more than its exchanges take, or where the state doesn't fit the devices otherwise.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from autopar.analysis.tensor import TensorGroup, divide_products
from autopar.cost.rates import StageRates
from autopar.errors import StrategyError
from autopar.ir.program import Program
from autopar.ir.tensor_plan import TensorGroupPlan, TensorPlan


def choose_tensor(
    program: Program,
    asked: Mapping[int, str],
    eligible: Collection[int],
    devices: tuple[int, int],
    rates: StageRates | None,
    *,
    is_needed: bool,
) -> tuple[dict[int, int], TensorPlan]:
    """Leaf -> the axis along which it is divided; and the plan that says why.

    Args:
      program: An analysed program.
      asked: Leaf -> the pattern that gives it to "tensor".
      eligible: Leaves that may be divided, those of `asked` among them.
      devices: N, over which examples are spread, and T.
      rates: What products and sends take; None: nothing is known, and only what is asked for is divided.
      is_needed: Whether the state doesn't fit the devices as it is.

    Raises:
      StrategyError: a pattern names weights of which none can be divided.
    """
    count, parts = devices
    groups = divide_products(program, eligible, parts, count)
    _check_asked(program, asked, groups, parts)
    axes: dict[int, int] = {}
    plans = []
    for group in groups:
        plan = _decided(program, group, asked, devices, rates, is_needed=is_needed)
        plans.append(plan)
        if plan.taken:
            axes |= group.axes
    return axes, TensorPlan(parts, tuple(plans))


def _decided(
    program: Program,
    group: TensorGroup,
    asked: Mapping[int, str],
    devices: tuple[int, int],
    rates: StageRates | None,
    *,
    is_needed: bool,
) -> TensorGroupPlan:
    count, parts = devices
    sent = sum(e.sent(parts) for e in group.exchanges)
    times = {name: sum(e.times for e in group.exchanges if e.collective == name) for name in _COLLECTIVES}
    saved_s = sent_s = 0.0
    if rates is not None:
        saved_s = group.flops * rates.flop_s * (1 - 1 / parts) / count
        sent_s = sent * rates.send_byte_s + sum(times.values()) * rates.call_s
    pattern = next((asked[k] for k in group.weights if k in asked), None)
    predicted = f"saves {saved_s * 1e3:.2f} ms of products, and takes {sent_s * 1e3:.2f} ms"
    if pattern is not None:
        taken, reason = True, f"strategy {pattern!r}"
    elif is_needed:
        taken, reason = True, "the state doesn't fit the devices otherwise"
    elif rates is None:
        taken, reason = False, "nothing is known of the devices"
    else:
        taken, reason = saved_s > sent_s, predicted
    return TensorGroupPlan(
        axes={program.inputs[k].path: axis for k, axis in group.axes.items()},
        weights=tuple(program.inputs[k].path for k in group.weights),
        taken=taken,
        reason=reason,
        reduces=times["all-reduce"],
        gathers=times["all-gather"],
        sent=round(sent),
        flops=group.flops,
        saved_s=saved_s,
        sent_s=sent_s,
    )


_COLLECTIVES = ("all-reduce", "all-gather")


def _check_asked(program: Program, asked: Mapping[int, str], groups: Collection[TensorGroup], parts: int) -> None:
    """Raises StrategyError for a pattern of which nothing can be divided."""
    divided = {k for group in groups for k in group.axes}
    named = {program.inputs[k].path for k in divided}
    for pattern in dict.fromkeys(asked.values()):
        leaves = [k for k, own in asked.items() if own == pattern]
        if divided.isdisjoint(leaves):
            shown = ", ".join(sorted(named)[:8]) or "none"
            sizes = ", ".join(f"{program.inputs[k].path} {program.block.inputs[k].type}" for k in leaves[:4])
            raise StrategyError(
                f"strategy: {pattern!r} gives {sizes} to 'tensor', and no product can be divided over {parts} devices "
                f"along an axis of theirs: it must be read by a matrix product, and {parts} must divide the axis. "
                f"Leaves that can be divided: {shown}"
            )
