"""The tree of predictions of a plan: a step and its parts, each with bytes sent, predicted time, and lower bound.

`predict` makes it from the figures in a plan; `explain`, `why` and `report` print views of it. Each way to run a step
has one builder here. Lower bounds are by bandwidths alone (`Rates.bound`): bytes over the bandwidth of the wire or the
memory, operations at the devices' full rate.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from autopar.cost.exchange import method_terms
from autopar.cost.rates import EFFICIENCY
from autopar.cost.stage_time import pipeline_seconds, simulate_pipeline
from autopar.ir.cluster import ClusterSpec
from autopar.ir.figures import Term
from autopar.ir.plan import PipelinePlan, Plan, StagePlan, TablePlan
from autopar.ir.strategy import HOSTED


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction of a step or of a part."""

    name: str
    parts: tuple[Prediction | Term, ...] = ()  #: The parts in order; a `Term` isn't divided further.
    #: Whether times are known, and from where.
    timed: bool = True
    source: str = ""
    #: Seconds of parts that run at the same time, on devices of their own; None: parts follow one another.
    simulated_s: float | None = None

    @property
    def terms(self) -> tuple[Term, ...]:
        return tuple(t for part in self.parts for t in (part.terms if isinstance(part, Prediction) else (part,)))

    @property
    def sent(self) -> int:
        """Bytes that each device (each client, if clients train) sends in a step; of parts that run at the same time
        those of the busiest device."""
        sent = [part.sent for part in self.parts]
        return sum(sent) if self.simulated_s is None else max(sent, default=0)

    @property
    def seconds(self) -> float | None:
        """Predicted seconds, or None if they aren't known."""
        if not self.timed:
            return None
        return sum(part.seconds or 0.0 for part in self.parts) if self.simulated_s is None else self.simulated_s

    @property
    def bound_s(self) -> float | None:
        """Lower bound in seconds, over all parts whose bandwidths are known; None if none are."""
        bounds = [part.bound_s for part in self.parts if part.bound_s is not None]
        if not bounds:
            return None
        return sum(bounds) if self.simulated_s is None else max(bounds)


def predict(plan: Plan) -> Prediction:
    source = "measured here" if plan.cluster is None else f"figures of {plan.cluster.name}"
    if plan.pipeline is not None:
        step = predict_stages(plan.pipeline, plan.cluster)
    elif plan.clients_plan is not None:
        exchange = Term("exchange", 0.0, round(plan.clients_plan.sent_bytes))
        step = Prediction("step", (_of_devices(plan), exchange), timed=False)
    else:
        step = _of_devices(plan)
    return replace(step, name=plan.step, source=source if step.timed else "")


def predict_method(table: TablePlan, method: str) -> Prediction | None:
    """Predicts a family's step by a method, as in `TablePlan.taken`. Without times only exchanges count; None: nothing
    is known."""
    if method in table.terms:
        return Prediction(method, tuple(table.terms[method]))
    if table.sizes is None:
        return None
    terms = method_terms(table.sizes, "hosts" if method == HOSTED else table.where)[method]
    return Prediction(method, tuple(t for t in terms if t.sent), timed=False)


def sources_text(cluster: ClusterSpec) -> str:
    """Names the origins of the figures by which a device's own step, and its bus to the host, are predicted."""
    device = cluster.device
    sources = {
        device.name: device.source,
        "products": f"at {EFFICIENCY:.0%} of that rate, assumed",
        "host memory": cluster.host_source,
        "bus": cluster.to_host.source,
    }
    told = "; ".join(f"{name}: {source or 'as given'}" for name, source in sources.items())
    return f"Figures: {told}. Calls, launches of kernels, and rows that wait and are brought up to date aren't counted."


def _of_devices(plan: Plan) -> Prediction:
    if plan.parts:
        return Prediction("step", tuple(Prediction(name, tuple(terms)) for name, terms in plan.parts.items()))
    tables = (predict_method(table, table.taken) for table in plan.families)
    dense = [leaf.sent[leaf.taken] for leaf in plan.dense if leaf.sent]
    sums = Term("sums of dense gradients", 0.0, sum(dense))
    return Prediction("step", (*(table for table in tables if table is not None), *[sums] * bool(dense)), timed=False)


def predict_stages(plan: PipelinePlan, cluster: ClusterSpec | None) -> Prediction:
    """Predicts stages at work at the same time: a step's microbatches, or one minibatch without a flush."""
    seconds, simulated = pipeline_seconds(plan), simulate_pipeline(plan)
    stages = tuple(_of_stage(k, plan, stage, cluster) for k, stage in enumerate(plan.stages))
    at_once = simulated.period if plan.updates else simulated.seconds
    parts: tuple[Prediction | Term, ...] = (Prediction("stages", stages, plan.is_timed, simulated_s=at_once),)
    if not plan.updates:
        tied_s = plan.tied_bytes * plan.send_byte_s
        parts += (
            Term("slowest update", max(0.0, seconds - at_once - tied_s)),
            Term("tied weights", tied_s, plan.tied_bytes),
        )
    return Prediction("step", parts, plan.is_timed)


def _of_stage(number: int, plan: PipelinePlan, stage: StagePlan, cluster: ClusterSpec | None) -> Prediction:
    """Predicts a device of a stage with its share of the microbatches."""
    count = (1 if plan.updates else plan.microbatches) / len(stage.devices)
    flops_s = None if cluster is None else cluster.device.flops_s
    sends = {"ahead": stage.ahead_bytes, "back": stage.back_bytes, "within": stage.exchanged_bytes}
    seconds = {name: count * nbytes * plan.send_byte_s for name, nbytes in sends.items()}
    return Prediction(
        f"stage {number}",
        (
            Term("tasks", count * sum(stage.seconds.values()), bound_s=flops_s and count * stage.flops / flops_s),
            *(Term(f"send {k}", s, round(count * sends[k]), bound_s=flops_s and s) for k, s in seconds.items()),
        ),
        plan.is_timed,
    )
