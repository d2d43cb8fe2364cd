"""autopar: automatic parallel training for JAX. See `parallelize`."""

from autopar.api import ParallelStep, parallelize
from autopar.errors import (
    ArgumentsError,
    AutoparError,
    DonatedStateError,
    RecompileWarning,
    StateError,
    StepError,
    StrategyError,
    VerificationError,
)

__version__ = "0.1.0"

__all__ = [
    "ArgumentsError",
    "AutoparError",
    "DonatedStateError",
    "ParallelStep",
    "RecompileWarning",
    "StateError",
    "StepError",
    "StrategyError",
    "VerificationError",
    "parallelize",
]
