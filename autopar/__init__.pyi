"""The public names of autopar, which `__init__.py` loads when they are used."""

from autopar import kvstore as kvstore
from autopar import sync as sync
from autopar import testing as testing
from autopar.api import parallelize as parallelize
from autopar.batches.iterator import uninterrupted as uninterrupted
from autopar.batches.shard import shard as shard
from autopar.calibration import calibrate as calibrate
from autopar.errors import (
    AlphaDriftWarning as AlphaDriftWarning,
)
from autopar.errors import (
    ArgumentsError as ArgumentsError,
)
from autopar.errors import (
    AutoparError as AutoparError,
)
from autopar.errors import (
    CapacityWarning as CapacityWarning,
)
from autopar.errors import (
    CheckpointError as CheckpointError,
)
from autopar.errors import (
    DamagedCheckpointError as DamagedCheckpointError,
)
from autopar.errors import (
    DonatedStateError as DonatedStateError,
)
from autopar.errors import (
    HostMemoryError as HostMemoryError,
)
from autopar.errors import (
    LaunchError as LaunchError,
)
from autopar.errors import (
    LoneClientWarning as LoneClientWarning,
)
from autopar.errors import (
    MissingCheckpointError as MissingCheckpointError,
)
from autopar.errors import (
    PlanError as PlanError,
)
from autopar.errors import (
    RecompileWarning as RecompileWarning,
)
from autopar.errors import (
    SlowPlanWarning as SlowPlanWarning,
)
from autopar.errors import (
    StabilityWarning as StabilityWarning,
)
from autopar.errors import (
    StateError as StateError,
)
from autopar.errors import (
    StateWarning as StateWarning,
)
from autopar.errors import (
    StepError as StepError,
)
from autopar.errors import (
    StrategyError as StrategyError,
)
from autopar.errors import (
    TimelineError as TimelineError,
)
from autopar.errors import (
    VerificationError as VerificationError,
)
from autopar.ir.pipeline import Pipeline as Pipeline
from autopar.ir.plan import Plan as Plan
from autopar.launch.start import watchdog as watchdog
from autopar.measure.cluster import Cluster as Cluster
from autopar.planning.alpha import Alphas as Alphas
from autopar.planning.alpha import TableAlpha as TableAlpha
from autopar.planning.alpha import measure_alpha as measure_alpha
from autopar.planning.check import Check as Check
from autopar.planning.check import check as check
from autopar.planning.explain import Explanation as Explanation
from autopar.planning.explain import explain as explain
from autopar.planning.plan import plan as plan
from autopar.planning.replay import Staleness as Staleness
from autopar.planning.replay import staleness as staleness
from autopar.planning.replay_clients import replay as replay
from autopar.planning.replay_clients import replay_timeline as replay_timeline
from autopar.planning.replay_clients import timeline as timeline
from autopar.planning.simulate import Simulation as Simulation
from autopar.planning.simulate import save_trace as save_trace
from autopar.planning.simulate import simulate as simulate
from autopar.planning.simulate_clients import SyncSimulation as SyncSimulation
from autopar.planning.verify import Verification as Verification
from autopar.planning.verify import verify as verify
from autopar.planning.why import Why as Why
from autopar.planning.why import why as why
from autopar.report.build import Report as Report
from autopar.report.build import report as report
from autopar.retrieval import top_k as top_k
from autopar.run.step import ParallelStep as ParallelStep
from autopar.schedules import large_batch_schedule as large_batch_schedule
from autopar.servers.timeline import Timeline as Timeline
from autopar.state.checkpoint import Restored as Restored
from autopar.state.checkpoint import restore as restore
from autopar.state.checkpoint import save as save
from autopar.state.checkpointer import Checkpointer as Checkpointer
from autopar.state.init import init as init
from autopar.state.resize import resize as resize
from autopar.tables.deferred import DeferredTable as DeferredTable
from autopar.tables.host import HostTable as HostTable
from autopar.tables.kinds import materialize as materialize
from autopar.tables.pending import PendingArray as PendingArray
from autopar.tables.pending import drain as drain
from autopar.tables.pending import ended as ended
from autopar.tables.pending import paired as paired
from autopar.tables.replica import Replica as Replica
from autopar.tables.replica import average as average
from autopar.tables.served import ServedLeaf as ServedLeaf
from autopar.tables.sharded import Table as Table
from autopar.tables.stacked import TablePart as TablePart
from autopar.tables.staged import StageArray as StageArray

__version__: str
