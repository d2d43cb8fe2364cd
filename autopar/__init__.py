"""autopar: automatic parallel training for JAX. See `parallelize`."""

from autopar.api import parallelize
from autopar.checkpoint import Restored, restore, save
from autopar.cost import Cluster
from autopar.deferred_table import DeferredTable
from autopar.errors import (
    ArgumentsError,
    AutoparError,
    CapacityWarning,
    CheckpointError,
    DonatedStateError,
    HostMemoryError,
    LaunchError,
    MissingCheckpointError,
    RecompileWarning,
    StateError,
    StepError,
    StrategyError,
    VerificationError,
)
from autopar.explain import Explanation, explain
from autopar.host_table import HostTable
from autopar.init import init
from autopar.mpi.start import start as _start
from autopar.mpi.start import watchdog
from autopar.shard import shard
from autopar.spread_table import Table
from autopar.step import ParallelStep
from autopar.table import materialize
from autopar.verify import Verification, verify

__version__ = "0.1.0"

__all__ = [
    "ArgumentsError",
    "AutoparError",
    "CapacityWarning",
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
    "RecompileWarning",
    "Restored",
    "StateError",
    "StepError",
    "StrategyError",
    "Table",
    "Verification",
    "VerificationError",
    "explain",
    "init",
    "materialize",
    "parallelize",
    "restore",
    "save",
    "shard",
    "verify",
    "watchdog",
]

# Under an MPI launcher JAX's processes must be connected before its first use. Otherwise this does nothing.
_start()
