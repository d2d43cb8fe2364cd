"""Where random programs run: devices, ranks, and the options that are drawn there."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax

#: Pairs (name, value), as `parallelize` takes them; of `sync` its text.
Options = tuple[tuple[str, Any], ...]
#: Schedule, number of stages, slack (None of synchronous ones).
Pipeline = tuple[str, int, int | None] | tuple[()]

#: XLA's newer emitters take twice as long to compile; where they are all that there is, it ends at such a flag.
_UNOPTIMISED = "--xla_backend_optimization_level=0"
if jax.__version_info__ < (0, 11):
    _UNOPTIMISED += " --xla_cpu_use_fusion_emitters=false"

_ANYWHERE: tuple[Options, ...] = ((("replan", "off"),), (("microbatches", 2),))


@dataclass(frozen=True)
class Mode:
    """A way to run programs. Numbers are float64; a mode of 32 bits would hide faults behind rounding."""

    name: str
    devices: int = 1
    ranks: int = 1
    #: Whether XLA optimises: compiling takes twice as long, and fuses otherwise.
    optimised: bool = False
    #: Methods, pairs of where as well, or pairs (pattern, such a pair).
    strategies: tuple[str | tuple[Any, ...], ...] = (*["ps"] * 9, "auto")
    options: tuple[Options, ...] = _ANYWHERE
    pipelines: tuple[Pipeline, ...] = ((),)
    #: Whether tables are looked up by bags, which owners add up however few bytes that saves.
    bags: bool = False

    @property
    def environment(self) -> dict[str, str]:
        """Variables that JAX reads at its start."""
        flags = "" if self.optimised else _UNOPTIMISED
        return {
            "JAX_PLATFORMS": "cpu",
            "JAX_ENABLE_X64": "1",
            "JAX_NUM_CPU_DEVICES": str(self.devices),
            "XLA_FLAGS": flags,
        }


#: Dense leaves on hosts, beside tables on devices or there.
_DENSE = tuple(
    tuple((pattern, ("ps", "hosts")) for pattern in patterns)
    for patterns in (("**w",), ("**bias",), ("**w", "**bias"), ("**w", "**bias", "**table*"), ("**params/**",))
)

MODES: Mapping[str, Mode] = {
    mode.name: mode
    for mode in (
        Mode("one"),
        Mode("optimised", optimised=True),
        Mode("devices", devices=4, strategies=(*["ps", "allgather", "allreduce_rows"] * 3, "auto")),
        Mode(
            "served", strategies=("auto",), options=((("sync", "Async()"),), (("sync", "Async()"), ("microbatches", 2)))
        ),
        Mode("ranks", ranks=2, strategies=(*["ps", "allgather", "allreduce_rows"] * 3, "auto")),
        Mode("hosts", ranks=2, strategies=(("ps", "hosts"),)),
        Mode("bags", devices=4, strategies=("ps",), bags=True),
        Mode("hosts-bags", ranks=2, strategies=(("ps", "hosts"),), bags=True),
        Mode("hosts-devices", devices=2, ranks=2, strategies=(("ps", "hosts"), ("ps", "hosts"), *_DENSE)),
        Mode("one-host", strategies=(("ps", "hosts"),)),
        Mode("one-host-devices", devices=2, strategies=(("ps", "hosts"), ("ps", "hosts"), *_DENSE)),
        Mode("dense-hosts", ranks=2, strategies=_DENSE),
        Mode("dense-one-host", strategies=_DENSE),
        Mode(
            "stages",
            devices=2,
            strategies=("ps", "auto"),
            options=((("replan", "off"),),),
            pipelines=(
                ("async", 2, 0),
                ("stash", 2, 2),
                ("spectrain", 2, 0),
                ("spectrain", 2, 1),
                ("spectrain", 1, 0),
                ("1f1b", 2, None),
                ("zero-bubble", 2, None),
            ),
        ),
    )
}
