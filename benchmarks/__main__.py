"""`python -m benchmarks [NAME ...]`: all benchmarks, or those named."""

from __future__ import annotations

import sys

from benchmarks import (
    adamw,
    binding,
    bubbles,
    choice,
    clients,
    contract,
    devices,
    exchange,
    first_week,
    hosts,
    hybrid,
    microbatches,
    one_device,
    overlap,
    parallax_paper,
    pipelines,
    pipelines_choice,
    pipelines_systems,
    replicas,
    rings,
    soak,
    staleness,
    stragglers,
)

BENCHMARKS = {
    "lookup": one_device.lookup,
    "adamw": adamw.adamw,
    "dispatch": one_device.dispatch,
    "planning": one_device.planning,
    "crossover": one_device.crossover,
    "devices": devices.devices,
    "choice": choice.choice,
    "exchange": exchange.exchange,
    "binding": binding.binding,
    "first_week": first_week.first_week,
    "hosts": hosts.hosts,
    "hybrid": hybrid.hybrid,
    "microbatches": microbatches.microbatches,
    "pipelines": pipelines.pipelines,
    "pipelines_network": pipelines.pipelines_network,
    "pipelines_choice": pipelines_choice.pipelines_choice,
    "pipelines_systems": pipelines_systems.pipelines_systems,
    "bubbles": bubbles.bubbles,
    "staleness": staleness.staleness,
    "prediction": staleness.prediction,
    "replicas": replicas.replicas,
    "rings": rings.rings,
    "overlap": overlap.overlap,
    "clients": clients.clients,
    "stragglers": stragglers.stragglers,
    "soak": soak.soak,
    "contract": contract.product,
    "optimizers": contract.optimizers,
    "parallax": parallax_paper.parallax,
}


def main(names: list[str]) -> None:
    unknown = [n for n in names if n not in BENCHMARKS]
    if unknown:
        raise SystemExit(f"no benchmark {', '.join(unknown)}; there are {', '.join(BENCHMARKS)}")
    for name in names or BENCHMARKS:
        print(f"== {name}", flush=True)
        BENCHMARKS[name]()


if __name__ == "__main__":
    main(sys.argv[1:])
