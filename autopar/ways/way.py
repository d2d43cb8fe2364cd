"""`Way`: one way to run a step, and all that differs from other ways. Shared code asks it and names no way.

A way is bound to its options. Ways compose: replicas wrap the way that runs one replica's step (`inner`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from autopar.compile import Analysed, Analysis, Pass
from autopar.cost.rates import UNMEASURED, Measurements
from autopar.errors import ArgumentsError, StrategyError
from autopar.ir.options import Options
from autopar.ir.program import Program
from autopar.ir.program_plan import ProgramPlan
from autopar.ir.stacked import StackedProgram
from autopar.jax_types import Leaf
from autopar.measure.alpha import example_value
from autopar.measure.figures import looked_up
from autopar.passes.analyze_batch import analyze_batch
from autopar.passes.analyze_rows import analyze_rows
from autopar.passes.choose import compares_methods
from autopar.passes.classify import classify
from autopar.passes.lift_rows import lift_rows
from autopar.passes.merge_pushes import merge_pushes
from autopar.passes.normalize import normalize
from autopar.passes.place_border import Kept, Moved, place_border
from autopar.passes.share_logs import share_logs
from autopar.passes.split_update import split_update
from autopar.tables.leaf import Home

if TYPE_CHECKING:  # names of those who ask
    from jax.stages import Traced

    from autopar.backends.clients import Clients
    from autopar.launch.group import StoreGroup
    from autopar.planning.check import Check
    from autopar.planning.verify import Verification
    from autopar.run.planned_step import PlannedStep, Runner
    from autopar.run.planner import Planner
    from autopar.run.request import StepRequest
    from autopar.run.step import ParallelStep
    from autopar.servers.timeline import Timeline
    from autopar.state.init import Maker

#: For each client the flat arguments of its calls.
AllCalls = Sequence[Sequence[Sequence[Leaf]]]
#: A replay's final flat arguments, and for each client the flat results of its calls.
Replayed = tuple[list[Leaf], list[list[list[Leaf]]]]


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way to run a step. `options` are those that all ways read, and a way's own are fields of its class. `inner`
    runs one client's step, if there are clients."""

    options: Options
    inner: Way | None = None

    # --- how it is asked for ---

    #: Whether processes must be connected as soon as the step is made; else once it is called.
    is_made_at_once: ClassVar[bool] = False
    #: Whether the rows that batches touch are watched in training.
    is_watched: ClassVar[bool] = True

    @classmethod
    def check(cls, request: StepRequest) -> None:
        """Checks the way's own options, and that the others go with them. Raises ArgumentsError if they don't."""
        plan = request.planner.options.plan
        if plan is not None and plan.clients_plan is not None:
            raise ArgumentsError(
                f"{plan.name} is of {plan.clients_plan}, and doesn't hold all of what it was made with: give sync= as "
                "well, as it was"
            )

    @classmethod
    def planner(cls, request: StepRequest) -> Planner:
        raise NotImplementedError

    @classmethod
    def step(cls, request: StepRequest) -> ParallelStep:
        """Returns the step that a user calls."""
        return request.made(cls.planner(request), is_watched=cls.is_watched)

    def by(self, options: Options) -> Way:
        """Returns this way with other options."""
        inner = None if self.inner is None else self.inner.by(options)
        return replace(self, options=options, inner=inner)

    def among(self, clients: int, servers: int | None = None) -> Way:
        """Returns this way for other numbers of clients and servers; raises ArgumentsError if the way can't have so
        many clients."""
        return self

    def on(self, planner: Planner, devices: int) -> Planner:
        """Turns a planner of data parallelism on `devices` devices into one of this way on as many."""
        return planner

    def processes(self, planner: Planner) -> StoreGroup | None:
        """Returns the processes that run the step together, as far as they are known before planning."""
        return None if planner.devices is None else planner.devices.processes

    @property
    def choices(self) -> Mapping[str, object]:
        """Returns the way's own options by name; all processes must have the same."""
        shared = {f.name for f in fields(Way)}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in shared}

    # --- what it is compiled by ---

    @property
    def defers(self) -> bool:
        """Says whether rows may wait for later steps."""
        return self.options.sparse == "exact"

    #: Whether the batch is analysed on one device, too, and must divide evenly over devices.
    divides: ClassVar[bool] = False

    @property
    def analyses(self) -> tuple[Analysis, ...]:
        """Returns the analysis passes of a traced program, in order."""
        options = self.options
        return (
            ("normalize", normalize),
            ("classify", self.classified),
            (
                "analyze_rows",
                partial(analyze_rows, lazy=options.sparse == "lazy", defer=self.defers, undeferred=options.undeferred),
            ),
            (
                "analyze_batch",
                partial(
                    analyze_batch,
                    devices=options.devices,
                    microbatches=options.microbatches,
                    batch_axis=options.batch_axis,
                    always=self.divides,
                    uneven=not self.divides,
                ),
            ),
        )

    def classified(self, program: Program) -> tuple[Program, str]:
        return classify(program, self.options.strategy)

    def analyzed_again(self, program: Program) -> Program:
        """Returns a program that a pass made of an analysed one, with its facts."""
        *_, rows, batch = (run for _, run in self.analyses)
        for run in (partial(classify, strategy=self.options.strategy), rows, batch):
            program, _ = run(program)
        return program

    def resolve(self, planner: Planner, program: Program) -> Way:
        """Returns this way with choices for all options that are left to "auto"."""
        return self

    def measured(self, planner: Planner, analysed: Analysed, example: Sequence[Leaf] | None) -> Measurements:
        """Measures what the plan depends on, and no more; ids of `example` are counted."""
        program, options, machine = analysed.program, self.options, planner.machine
        memory = machine.memory_bytes  # here, where all processes are
        stages = machine.stages() if options.tensor > 1 and machine.stages is not None else None
        if options.devices == 1:
            return Measurements(memory=memory, stages=stages)
        rates = machine.rates() if machine.rates is not None and compares_methods(program, options) else None
        return Measurements(rates, memory, looked_up(program, example), stages, partial(example_value, leaves=example))

    def stacked(self, program: Program, bound: ProgramPlan) -> StackedProgram | None:
        """Returns the program that is run in place of an analysed one, whose tables are stacked; None: that one is."""
        return None

    def bordered(self, program: Program, bound: ProgramPlan) -> tuple[Program, Sequence[Moved | Kept]]:
        """Returns an analysed program with operations moved to the owners of its tables' rows, and what moved."""
        if not self.options.optimizes("border"):
            return program, ()
        on_cpus = not self.options.accelerators
        return place_border(program, bound, self.analyzed_again, on_cpus=on_cpus)

    def passes(self, bound: ProgramPlan, measured: Measurements = UNMEASURED) -> tuple[Pass, ...]:
        """Returns the passes that turn a planned program into compiled ones, in order; only those that do something."""
        raise NotImplementedError

    # --- what it is run by ---

    #: Reason why the step can't be traced into one program; "": it can.
    exchanges: ClassVar[str] = ""
    #: Classes of leaves that only this way takes.
    leaves: ClassVar[tuple[type, ...]] = ()

    @property
    def is_asynchronous(self) -> bool:
        """Says that no client or worker waits for another."""
        return False

    @property
    def has_timeline(self) -> bool:
        """Says whether results depend on the order in which clients come, so that a replay needs a recorded
        timeline."""
        return False

    #: Whether an earlier plan may decide what the user left open.
    may_follow: ClassVar[bool] = True

    def needs_mpi(self, planner: Planner) -> tuple[str, str] | None:
        """Returns what needs MPI ranks, and what to do instead, as texts for an error; None: nothing does."""
        return None

    def runner(self, planned: PlannedStep) -> Runner:
        raise NotImplementedError

    def table_runner(self, planned: PlannedStep) -> Runner:
        """Returns the runner for calls with tables of autopar's own."""
        return planned.runner

    def share_choices(self, first: PlannedStep, planned: PlannedStep) -> PlannedStep:
        """Returns `planned` for other shapes than the first call's, with the choices of `first` that all clients must
        share."""
        return planned

    @property
    def keeps_shards(self) -> bool:
        """Says whether leaves that the user gives in shards may stay in shards."""
        return True

    def homes(self, planned: PlannedStep) -> Mapping[int, Home]:
        """Returns the homes of the state's leaves by number, as far as the plan decides them."""
        return {} if self.inner is None else self.inner.homes(planned)

    def maker(self, planned: PlannedStep, traced: Traced, numbers: Sequence[int | None]) -> Maker | None:
        """Returns the maker of a state where the plan has it; None: on the devices. `numbers`: for each leaf that
        `traced` makes, the step's input."""
        return None if self.inner is None else self.inner.maker(planned, traced, numbers)

    # --- what it is compared with ---

    def replayed(self, planned: PlannedStep, leaves: Sequence[Leaf], steps: int) -> Verification | None:
        """Compares `steps` steps from flat arguments with a replay; None: it computes the plain step, and needs
        none."""
        return None

    def followed(
        self, planned: PlannedStep, start: Sequence[Leaf], calls: AllCalls, timeline: Timeline, clients: Clients | None
    ) -> Replayed:
        """Replays a recorded timeline; raises TimelineError if it can't be one of this step.

        `start`: flat arguments of a call, with the initial state. `calls`: for each client the flat arguments of its
        calls. `clients`: those of this process, whose devices may run the replay. Returns the final flat arguments; and
        for each client the flat results of its calls, None where it has no such result.
        """
        raise NotImplementedError

    def sends(self, planned: PlannedStep, name: str) -> Check | None:
        """Compares what is sent with the plan, or raises ArgumentsError; None: the compiled program shows it."""
        return None


def rewriting(
    run: Callable[[Program, ProgramPlan], tuple[Program, str]],
) -> Callable[..., tuple[Program, ProgramPlan, str]]:
    """Makes a pass of one that leaves the plan as it is."""

    def rewrite(program: Program, bound: ProgramPlan) -> tuple[Program, ProgramPlan, str]:
        program, note = run(program, bound)
        return program, bound, note

    return rewrite


def lifting(bound: ProgramPlan) -> tuple[Pass, ...]:
    """Returns the passes that lift a step to the rows that it touches, if it has tables."""
    if not bound.families:
        return ()
    shared: tuple[Pass, ...] = (("share_logs", rewriting(share_logs)),) if bound.plan.defers else ()
    return ("lift_rows", rewriting(lift_rows)), *shared, ("merge_pushes", rewriting(merge_pushes))


def in_microbatches(
    program: Program, bound: ProgramPlan, *, own_statistics: bool = False, option: str = "pipeline="
) -> tuple[Program, str]:
    """Runs `split_update`; raises StrategyError if the batch can't be divided, or tables are on hosts."""
    if bound.on_hosts:
        raise StrategyError(
            f"microbatches={bound.plan.microbatches}: {program.name} has tables on hosts, whose steps take a batch as "
            "a whole. Leave microbatches= out, or the tables on the devices"
        )
    return split_update(program, bound, own_statistics=own_statistics, option=option)
