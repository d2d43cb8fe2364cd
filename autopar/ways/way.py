"""`Way`: one way to run a step, and all that is particular about it. What all ways share asks it, and names none.

A way is bound to the options that it takes. Ways compose: replicas wrap whatever runs a replica's own step (`inner`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import TYPE_CHECKING, ClassVar

from autopar.compile import Analysed, Analysis, Pass
from autopar.cost.rates import UNMEASURED, Measurements
from autopar.errors import ArgumentsError, StrategyError
from autopar.ir.local import NotLocal
from autopar.ir.options import Options
from autopar.ir.program import Program
from autopar.ir.program_plan import ProgramPlan
from autopar.jax_types import Leaf
from autopar.measure.machine import looked_up
from autopar.passes.analyze_batch import analyze_batch
from autopar.passes.analyze_rows import analyze_rows
from autopar.passes.choose import compares_methods
from autopar.passes.classify import classify
from autopar.passes.lift_rows import lift_rows
from autopar.passes.merge_pushes import merge_pushes
from autopar.passes.normalize import normalize
from autopar.passes.share_logs import share_logs
from autopar.passes.split_update import split_update
from autopar.tables.leaf import Home

if TYPE_CHECKING:  # names of those who ask
    from jax.stages import Traced

    from autopar.backends.clients import Clients
    from autopar.launch.group import StoreGroup
    from autopar.planning.check import Check
    from autopar.planning.verify import Verification
    from autopar.run.asked import Asked
    from autopar.run.planned_step import PlannedStep
    from autopar.run.planner import Planner
    from autopar.run.runner import Runner
    from autopar.run.step import ParallelStep
    from autopar.servers.timeline import Timeline
    from autopar.state.init import Maker


@dataclass(frozen=True, slots=True, eq=False)
class Way:
    """One way to run a step.

    Attributes:
      options: What the user chose for the whole step; what only one way knows of are fields of its own.
      inner: The way in which each client runs the step by itself, if this one is made of several such.
    """

    options: Options
    inner: Way | None = None

    # --- how it is asked for ---

    #: Whether processes must be connected as soon as the step is made; else once it is called.
    is_made_at_once: ClassVar[bool] = False
    #: Whether the rows that batches touch are watched in training.
    is_watched: ClassVar[bool] = True

    @classmethod
    def check(cls, asked: Asked) -> None:
        """Checks the options that are its own, and that others go with them.

        Raises:
          ArgumentsError: they don't.
        """
        plan = asked.planner.options.plan
        if plan is not None and plan.clients_plan is not None:
            raise ArgumentsError(
                f"{plan.name} is of {plan.clients_plan}, and doesn't hold all of what it was made with: give sync= as "
                "well, as it was"
            )

    @classmethod
    def planner(cls, asked: Asked) -> Planner:
        """Makes what plans the step."""
        raise NotImplementedError

    @classmethod
    def step(cls, asked: Asked) -> ParallelStep:
        """Makes the step that a user calls."""
        return asked.made(cls.planner(asked), is_watched=cls.is_watched)

    def by(self, options: Options) -> Way:
        """Returns the way by other options."""
        inner = None if self.inner is None else self.inner.by(options)
        return replace(self, options=options, inner=inner)

    def among(self, clients: int, servers: int | None = None) -> Way:
        """Returns the way of other numbers of clients and servers, where there are some.

        Raises:
          ArgumentsError: there can't be so many clients.
        """
        return self

    def on(self, planner: Planner, devices: int) -> Planner:
        """Returns what plans the step on so many devices, of what plans it by data parallelism on them."""
        return planner

    def processes(self, planner: Planner) -> StoreGroup | None:
        """Returns those that run the step together, as far as it's known before it is planned."""
        return None if planner.devices is None else planner.devices.processes

    @property
    def choices(self) -> Mapping[str, object]:
        """Returns its own options, which all processes have the same, by name."""
        shared = {f.name for f in fields(Way)}
        return {f.name: getattr(self, f.name) for f in fields(self) if f.name not in shared}

    # --- what it is compiled by ---

    @property
    def defers(self) -> bool:
        """Says whether rows may wait for later steps."""
        return self.options.sparse == "exact"

    @property
    def divides(self) -> bool:
        """Says whether the batch is followed on one device, too; then devices divide it evenly or not at all."""
        return False

    @property
    def analyses(self) -> tuple[Analysis, ...]:
        """Returns the passes that find out about a traced program, in this order."""
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
        """Finds tables."""
        return classify(program, self.options.strategy)

    def settled(self, planner: Planner, program: Program) -> Way:
        """Returns the way with all chosen that its options leave open, for a traced program."""
        return self

    def measured(self, planner: Planner, analysed: Analysed, example: Sequence[Leaf] | None) -> Measurements:
        """Returns what there is to know before a plan is made, and no more than that.

        Args:
          planner: Whose machine it is.
          analysed: The step.
          example: Arguments, of which ids are read.
        """
        program, options, machine = analysed.program, self.options, planner.machine
        memory = machine.memory_bytes  # here, where all processes are
        stages = machine.stages() if options.tensor > 1 and machine.stages is not None else None
        if options.devices == 1:
            return Measurements(memory=memory, stages=stages)
        rates = machine.rates() if machine.rates is not None and compares_methods(program, options) else None
        return Measurements(rates, memory, looked_up(program, example), stages)

    def passes(self, bound: ProgramPlan, measured: Measurements = UNMEASURED) -> tuple[Pass, ...]:
        """Returns what makes a program of a plan, in this order; only what does something."""
        raise NotImplementedError

    # --- what it is run by ---

    #: What keeps a step from being traced into one program, in words; "": it is one.
    exchanges: ClassVar[str] = ""
    #: Leaves of the state that this way alone takes.
    leaves: ClassVar[tuple[type, ...]] = ()

    @property
    def is_asynchronous(self) -> bool:
        """No client or worker waits for another one."""
        return False

    @property
    def has_timeline(self) -> bool:
        """Says whether what clients do depends on who comes when, and is replayed of a timeline."""
        return False

    #: Whether an earlier plan may take the place of what the user left open.
    may_follow: ClassVar[bool] = True

    def needs_mpi(self, planner: Planner) -> tuple[str, str] | None:
        """Returns what takes ranks of an MPI job, and what to do in place of it, in words; None: nothing does."""
        return None

    def runner(self, planned: PlannedStep) -> Runner:
        """Makes what calls the planned step."""
        raise NotImplementedError

    def table_runner(self, planned: PlannedStep) -> Runner:
        """Returns what calls it where an argument is a table of autopar's own."""
        return planned.runner

    def settled_with(self, first: PlannedStep, planned: PlannedStep) -> PlannedStep:
        """Returns a plan for other shapes than the first call's, with what all clients must have as in its plan."""
        return planned

    @property
    def keeps_shards(self) -> bool:
        """Says whether leaves of the state that come in shards can stay so."""
        return True

    def homes(self, planned: PlannedStep) -> Mapping[int, Home]:
        """Returns where leaves of the state are, by number, as far as the plan says."""
        return {} if self.inner is None else self.inner.homes(planned)

    def maker(self, planned: PlannedStep, traced: Traced, numbers: Sequence[int | None]) -> Maker | None:
        """Returns what makes a state where the plan has it, as `init` does; None: on the devices (`Maker`).

        Args:
          planned: The step.
          traced: What makes the state, as JAX traced it.
          numbers: Of each leaf that is made the number of the step's input that it is.
        """
        return None if self.inner is None else self.inner.maker(planned, traced, numbers)

    # --- what it is compared with ---

    def replayed(self, planned: PlannedStep, leaves: Sequence[Leaf], steps: int) -> Verification | None:
        """Compares the step with a replay, where it is another function than the plain step by design; else None.

        Args:
          planned: The step.
          leaves: Its flat arguments.
          steps: How often it is run.
        """
        return None

    def followed(
        self,
        planned: PlannedStep,
        start: Sequence[Leaf],
        calls: Sequence[Sequence[Sequence[Leaf]]],
        timeline: Timeline,
        clients: Clients | None,
    ) -> tuple[list[Leaf], list[list[list[Leaf]]]]:
        """Does what a timeline says, if there can be one.

        Args:
          planned: The step.
          start: Flat arguments of a call; of these the state.
          calls: For each client its calls' flat arguments.
          timeline: What was done when.
          clients: Those of this process, whose devices may run it.

        Returns:
          The flat arguments of the end, and for each client its calls' flat results, with None for what it doesn't
          have.

        Raises:
          TimelineError: the timeline can't be of this step.
        """
        raise NotImplementedError

    def sends(self, planned: PlannedStep, name: str) -> Check | None:
        """Compares what is sent with the plan, where no compiled program says it; else None. `name`: the step's.

        Raises:
          ArgumentsError: that can't be compared.
        """
        return None


def rewriting(
    run: Callable[[Program, ProgramPlan], tuple[Program, str]],
) -> Callable[..., tuple[Program, ProgramPlan, str]]:
    """Returns a pass that leaves the plan as it is."""

    def rewrite(program: Program, bound: ProgramPlan) -> tuple[Program, ProgramPlan, str]:
        program, note = run(program, bound)
        return program, bound, note

    return rewrite


def lifting(bound: ProgramPlan) -> tuple[Pass, ...]:
    """Returns what puts a step on the rows that it touches, if it has such tables."""
    if not bound.families:
        return ()
    shared: tuple[Pass, ...] = (("share_logs", rewriting(share_logs)),) if bound.plan.defers else ()
    return ("lift_rows", rewriting(lift_rows)), *shared, ("merge_pushes", rewriting(merge_pushes))


def in_microbatches(
    program: Program, bound: ProgramPlan, *, own_statistics: bool = False, option: str = "pipeline="
) -> tuple[Program, str]:
    """Runs `split_update`.

    Raises:
      StrategyError: the batch can't be divided, or tables are on hosts.
    """
    if bound.on_hosts:
        raise StrategyError(
            f"microbatches={bound.plan.microbatches}: {program.name} has tables on hosts, whose steps take a batch as "
            "a whole. Leave microbatches= out, or the tables on the devices"
        )
    return split_update(program, bound, own_statistics=own_statistics, option=option)


def without_own_program(program: Program, error: NotLocal) -> StrategyError:
    """Returns the user's error for a step of which a device can't run its part."""
    return StrategyError(f"{program.name} can't be written as the program of one device of several: {error}")
