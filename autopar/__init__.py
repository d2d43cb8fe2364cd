"""autopar: automatic parallel training for JAX. See `parallelize`."""

from autopar.collection import paused_collection

# A collection while modules are made walks all of JAX's: a tenth of the time.
with paused_collection():
    from autopar import kvstore, sync, testing
    from autopar.api import parallelize
    from autopar.batches.loops import uninterrupted
    from autopar.batches.shard import shard
    from autopar.calibration import calibrate
    from autopar.errors import (
        AlphaDriftWarning,
        ArgumentsError,
        AutoparError,
        CapacityWarning,
        CheckpointError,
        DamagedCheckpointError,
        DonatedStateError,
        HostMemoryError,
        LaunchError,
        LoneClientWarning,
        MissingCheckpointError,
        PlanError,
        RecompileWarning,
        SlowPlanWarning,
        StabilityWarning,
        StateError,
        StateWarning,
        StepError,
        StrategyError,
        TimelineError,
        VerificationError,
    )
    from autopar.ir.pipeline import Pipeline
    from autopar.ir.plan import Plan
    from autopar.launch.start import start as _start
    from autopar.launch.start import watchdog
    from autopar.measure.cluster import Cluster
    from autopar.planning.alpha import Alphas, TableAlpha, measure_alpha
    from autopar.planning.check import Check, check
    from autopar.planning.explain import Explanation, explain
    from autopar.planning.plan import plan
    from autopar.planning.replay_replicas import replay
    from autopar.planning.replay_served import replay_timeline, timeline
    from autopar.planning.simulate import Simulation, simulate
    from autopar.planning.simulate_clients import SyncSimulation
    from autopar.planning.staleness import Staleness, staleness
    from autopar.planning.trace_file import save_trace
    from autopar.planning.verification import Verification
    from autopar.planning.verify import verify
    from autopar.planning.why import Why, why
    from autopar.report import Report, report
    from autopar.retrieval import top_k
    from autopar.run.step import ParallelStep
    from autopar.schedules import large_batch_schedule
    from autopar.servers.timeline import Timeline
    from autopar.state.checkpoint import Restored, restore, save
    from autopar.state.checkpointer import Checkpointer
    from autopar.state.draining import ended, paired
    from autopar.state.init import init
    from autopar.state.resize import resize
    from autopar.tables.averaging import average
    from autopar.tables.deferred import DeferredTable
    from autopar.tables.host import HostTable
    from autopar.tables.kinds import materialize
    from autopar.tables.pending import PendingArray, drain
    from autopar.tables.replica import Replica
    from autopar.tables.served import ServedLeaf
    from autopar.tables.sharded import Table
    from autopar.tables.staged import StageArray

__version__ = "0.1.0"

__all__ = [
    "AlphaDriftWarning",
    "Alphas",
    "ArgumentsError",
    "AutoparError",
    "CapacityWarning",
    "Check",
    "CheckpointError",
    "Checkpointer",
    "Cluster",
    "DamagedCheckpointError",
    "DeferredTable",
    "DonatedStateError",
    "Explanation",
    "HostMemoryError",
    "HostTable",
    "LaunchError",
    "LoneClientWarning",
    "MissingCheckpointError",
    "ParallelStep",
    "PendingArray",
    "Pipeline",
    "Plan",
    "PlanError",
    "RecompileWarning",
    "Replica",
    "Report",
    "Restored",
    "ServedLeaf",
    "Simulation",
    "SlowPlanWarning",
    "StabilityWarning",
    "StageArray",
    "Staleness",
    "StateError",
    "StateWarning",
    "StepError",
    "StrategyError",
    "SyncSimulation",
    "Table",
    "TableAlpha",
    "Timeline",
    "TimelineError",
    "Verification",
    "VerificationError",
    "Why",
    "average",
    "calibrate",
    "check",
    "drain",
    "ended",
    "explain",
    "init",
    "kvstore",
    "large_batch_schedule",
    "materialize",
    "measure_alpha",
    "paired",
    "parallelize",
    "plan",
    "replay",
    "replay_timeline",
    "report",
    "resize",
    "restore",
    "save",
    "save_trace",
    "shard",
    "simulate",
    "staleness",
    "sync",
    "testing",
    "timeline",
    "top_k",
    "uninterrupted",
    "verify",
    "watchdog",
    "why",
]

# Under an MPI launcher JAX's processes must be connected before its first use. Otherwise this does nothing.
_start()
