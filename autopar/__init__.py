"""autopar: automatic parallel training for JAX. See `parallelize`."""

from autopar.alphas import Alphas, TableAlpha, measure_alpha
from autopar.api import parallelize
from autopar.check import Check, check
from autopar.checkpoint import Restored, restore, save
from autopar.cost import Cluster
from autopar.deferred_table import DeferredTable
from autopar.errors import (
    AlphaDriftWarning,
    ArgumentsError,
    AutoparError,
    CapacityWarning,
    CheckpointError,
    DonatedStateError,
    HostMemoryError,
    LaunchError,
    MissingCheckpointError,
    PlanError,
    RecompileWarning,
    StateError,
    StateWarning,
    StepError,
    StrategyError,
    UncheckedWarning,
    VerificationError,
)
from autopar.explain import Explanation, explain
from autopar.host_table import HostTable
from autopar.init import init
from autopar.measure.detect import calibrate
from autopar.mpi.start import start as _start
from autopar.mpi.start import watchdog
from autopar.report import Report, report
from autopar.shard import shard
from autopar.simulation import Simulation, simulate
from autopar.spread_table import Table
from autopar.step import ParallelStep
from autopar.step_plan import StepPlan, plan
from autopar.table import materialize
from autopar.verify import Verification, verify
from autopar.why import Why, why

__version__ = "0.1.0"

__all__ = [
    "AlphaDriftWarning",
    "Alphas",
    "ArgumentsError",
    "AutoparError",
    "CapacityWarning",
    "Check",
    "CheckpointError",
    "Cluster",
    "DeferredTable",
    "DonatedStateError",
    "Explanation",
    "HostMemoryError",
    "HostTable",
    "LaunchError",
    "MissingCheckpointError",
    "ParallelStep",
    "PlanError",
    "RecompileWarning",
    "Report",
    "Restored",
    "Simulation",
    "StateError",
    "StateWarning",
    "StepError",
    "StepPlan",
    "StrategyError",
    "Table",
    "TableAlpha",
    "UncheckedWarning",
    "Verification",
    "VerificationError",
    "Why",
    "calibrate",
    "check",
    "explain",
    "init",
    "materialize",
    "measure_alpha",
    "parallelize",
    "plan",
    "report",
    "restore",
    "save",
    "shard",
    "simulate",
    "verify",
    "watchdog",
    "why",
]

# Under an MPI launcher JAX's processes must be connected before its first use. Otherwise this does nothing.
_start()
