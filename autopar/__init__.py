"""autopar: automatic parallel training for JAX. See `parallelize`.

Importing autopar loads what a step on one device needs. Everything else is loaded when its name is first used.
"""

from importlib import import_module
from typing import Any

from autopar.garbage import paused_collection

# A garbage collection during imports would walk all of JAX's objects, which takes a tenth of the import.
with paused_collection(lasting=True):
    from autopar import sync as sync
    from autopar.api import parallelize as parallelize
    from autopar.mpi.world import launched

    # The package `report` has the name of a function: loaded now, it doesn't take its place later.
    import_module("autopar.report")
    del globals()["report"]

__version__ = "0.1.0"

#: Modules of autopar -> their public names (`__init__.pyi` has them for type checkers).
_HOMES = {
    "batches.iterator": "uninterrupted",
    "batches.shard": "shard",
    "calibration": "calibrate",
    "errors": "AlphaDriftWarning ArgumentsError AutoparError CapacityWarning CheckpointError DamagedCheckpointError "
    "DonatedStateError HostMemoryError LaunchError LoneClientWarning MissingCheckpointError PlanError "
    "RecompileWarning SlowPlanWarning StabilityWarning StateError StateWarning StepError StrategyError "
    "TimelineError VerificationError",
    "ir.pipeline": "Pipeline",
    "ir.plan": "Plan",
    "launch.start": "watchdog",
    "measure.cluster": "Cluster",
    "planning.alpha": "Alphas TableAlpha measure_alpha",
    "planning.check": "Check check",
    "planning.explain": "Explanation explain",
    "planning.plan": "plan",
    "planning.replay": "Staleness staleness",
    "planning.replay_clients": "replay replay_timeline timeline",
    "planning.simulate": "Simulation save_trace simulate",
    "planning.simulate_clients": "SyncSimulation",
    "planning.verify": "Verification verify",
    "planning.why": "Why why",
    "report.build": "Report report",
    "retrieval": "top_k",
    "run.step": "ParallelStep",
    "learning_rates": "large_batch_schedule",
    "servers.timeline": "Timeline",
    "state.checkpoint": "Restored restore save",
    "state.checkpointer": "Checkpointer",
    "state.init": "init",
    "state.resize": "resize",
    "tables.host": "HostTable",
    "tables.kinds": "materialize",
    "tables.pending": "PendingArray drain finished_minibatch train_batches",
    "tables.replica": "Replica average",
    "tables.served": "ServedLeaf",
    "tables.sharded": "DeferredTable Table TablePart",
    "tables.staged": "StageArray",
}
_HOME_OF = {name: module for module, names in _HOMES.items() for name in names.split()}
_MODULES = ("kvstore", "sync", "testing")

__all__ = sorted(["parallelize", *_HOME_OF, *_MODULES])  # pyright: ignore[reportUnsupportedDunderAll]


def __getattr__(name: str) -> Any:
    """Loads a public name."""
    if name not in _HOME_OF and name not in _MODULES:
        raise AttributeError(f"module 'autopar' has no attribute {name!r}", name=name, obj=import_module("autopar"))
    with paused_collection(lasting=True):
        module = import_module(f"autopar.{_HOME_OF.get(name, name)}")
    globals()[name] = found = module if name in _MODULES else getattr(module, name)
    return found


def __dir__() -> list[str]:
    return [*globals(), *__all__]


# Under an MPI launcher JAX's processes must be connected before its first use.
if launched() is not None:
    import_module("autopar.launch.start").start()
