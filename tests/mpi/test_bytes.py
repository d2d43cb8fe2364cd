"""Bytes that a step with tables on hosts sends: as the ranks hand them to MPI, exactly, from the batch's own ids; and
at the network interfaces of hosts (namespaces), where MPI's algorithm and TCP's headers are added, within 8%. With one
rank on each machine, and with two, which send what both want once.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.network import ENVIRONMENT, CannotMake, hosts
from tests.support.mpi.bytes_cases import COUNTED, Sizes
from tests.support.mpi.jobs import MPIEXEC, run_job

FLOAT = ID = 4
#: What headers, acknowledgements and small talk may add to the payload, and the least payload that is held to it.
TOLERATED, LEAST_BYTES = 0.08, 16e6


def run(
    count: int, sizes: Sizes, folder: Path, wrapper: tuple[str, ...] = (), each: int = 0, **environment: str
) -> list[Any]:
    """What each rank counted. `each`: ranks of a machine; 0: all."""
    numbers = (sizes.rows, sizes.dim, sizes.width, sizes.examples, sizes.length)
    python = [
        sys.executable,
        "-W",
        "error",
        "-m",
        "tests.support.mpi.bytes_cases",
        str(folder),
        str(each),
        *map(str, numbers),
    ]
    job = run_job([str(MPIEXEC), "-n", str(count), *wrapper, *python], folder, timeout_s=100, **environment)
    assert job.code == 0 and not job.left, f"{job.code}, left behind: {job.left}\n{job.output}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(count)]


def requested_rows(sizes: Sizes, seed: int, count: int) -> np.ndarray:
    """[ranks, owners]: how many different rows of each owner are among each rank's part of the ids."""
    parts = np.array_split(sizes.ids(seed), count)
    return np.array([np.bincount(np.unique(part) % count, minlength=count) for part in parts])


def expected(sizes: Sizes, seed: int, count: int, rank: int) -> dict[str, int]:
    """What a rank hands to MPI for others in a step, but for 'reduce'."""
    requested = requested_rows(sizes, seed, count)
    np.fill_diagonal(requested, 0)
    width = sizes.dim * FLOAT
    return {
        # To each owner the number of rows, and their ids.
        "ids": ID * int(count - 1 + requested[rank].sum()),
        # As an owner, the table's rows, once; the slots stay where they are.
        "rows": width * int(requested[:, rank].sum()),
        # Summed over the rank's duplicates before.
        "gradients": width * int(requested[rank].sum()),
    }


def reduced(sizes: Sizes) -> set[int]:
    """A rank's contributions to the sums of a step: the dense gradient with the loss, and then the norm.

    In one message arrays begin at multiples of 64 bytes: the order in which the two lie tells the gap between them.
    """
    dense, scalar = sizes.dim * sizes.width * FLOAT, FLOAT
    return {dense + scalar + scalar, 64 + dense + scalar}


def check_handed(found: list[Any], sizes: Sizes) -> None:
    """Exact, on every rank and in every phase."""
    count = len(found)
    for rank, phases in enumerate(found):
        sent = phases["step"]["sent"]
        told = {k: v for k, v in sent.items() if k != "reduce"}
        assert told == {**expected(sizes, COUNTED, count, rank), "gather": 0}
        assert sent["reduce"] in reduced(sizes)
        alone = expected(sizes, 0, count, rank)
        assert phases["fetch"]["sent"] == {**dict.fromkeys(sent, 0), "rows": alone["rows"]}
        assert phases["deliver"]["sent"] == {**dict.fromkeys(sent, 0), "gradients": alone["gradients"]}
        assert phases["reduce"]["sent"] == {**dict.fromkeys(sent, 0), "reduce": sizes.dim * sizes.width * FLOAT}


@pytest.mark.long
@pytest.mark.parametrize("count", [2, 4])
def test_bytes_handed_to_mpi(count: int, tmp_path: Path) -> None:
    sizes = Sizes(rows=5_003, dim=12, width=8, examples=8, length=70)
    found = run(count, sizes, tmp_path)
    check_handed(found, sizes)
    assert all(phases["step"]["sent"]["rows"] > 0 for phases in found)


@pytest.mark.long
def test_bytes_at_the_interfaces(tmp_path: Path) -> None:
    """Three hosts, one rank each, ring forced; payloads of over 16 MB."""
    count, sizes = 3, Sizes(rows=24_000, dim=1024, width=4096, examples=36, length=600)
    try:
        with hosts(count, tmp_path) as made:
            found = run(count, sizes, tmp_path, made.wrapper, **ENVIRONMENT)
    except CannotMake as error:
        pytest.skip(f"no hosts can be made on this machine: {error}")
    check_handed(found, sizes)
    for rank, phases in enumerate(found):
        for name, phase in phases.items():
            check_wire(f"rank {rank}, {name}", phase["wire"], [phase["sent"]], count)


def check_wire(what: str, wire: int, sent: Sequence[dict[str, int]], count: int) -> float:
    """What an interface sent against what the ranks behind it handed to MPI for other machines; returns the ratio."""
    # Of an AllReduce of b bytes a ring sends 2(N-1)/N b from each rank, and so from the last rank of each machine.
    reduced = sent[0]["reduce"]
    payload = sum(sum(s.values()) - s["reduce"] for s in sent) + 2 * (count - 1) * reduced / count
    assert payload > LEAST_BYTES, f"{what} sends {payload / 1e6:.1f} MB only"
    ratio = wire / payload
    print(f"{what}: {payload / 1e6:.1f} MB, {ratio:.4f} of it on the wire")
    assert abs(ratio - 1) <= TOLERATED, f"{what}: {ratio:.3f} of {payload / 1e6:.1f} MB"
    return ratio


def machine_rows(sizes: Sizes, seed: int, count: int, each: int) -> np.ndarray:
    """[machines, owners]: how many different rows of each owner are among each machine's part of the ids."""
    parts = np.array_split(sizes.ids(seed), count)
    parts = [np.concatenate(parts[k : k + each]) for k in range(0, count, each)]
    return np.array([np.bincount(np.unique(part) % count, minlength=count) for part in parts])


def check_crossing(found: list[Any], sizes: Sizes, each: int) -> None:
    """What crosses machines, exactly: the rows that a machine's ranks want together, once."""
    count, width = len(found), sizes.dim * FLOAT
    for name, seed in (("step", COUNTED), ("fetch", 0), ("deliver", 0)):
        requested = machine_rows(sizes, seed, count, each)
        by_ranks = requested_rows(sizes, seed, count)
        for k, first in enumerate(range(0, count, each)):
            own = slice(first, first + each)
            asks = requested[k].sum() - requested[k, own].sum()
            answers = requested[:, own].sum() - requested[k, own].sum()
            expected = {
                # Each owner on another machine has one node leader here, which tells it the number of rows, and their
                # ids.
                "ids": ID * int(count - each + asks) if name == "step" else 0,
                "rows": width * int(answers) if name != "deliver" else 0,
                "gradients": width * int(asks) if name != "fetch" else 0,
            }
            phases = [ranks[name] for ranks in found[own]]
            assert {kind: sum(p["sent"][kind] for p in phases) for kind in expected} == expected
            assert asks < by_ranks[own].sum() - by_ranks[own, own].sum()
            if name == "step":
                assert min(p["near"]["rows"] for p in phases) > 0


@pytest.mark.long
def test_bytes_of_two_machines(tmp_path: Path) -> None:
    sizes = Sizes(rows=1_003, dim=12, width=8, examples=8, length=70)
    check_crossing(run(4, sizes, tmp_path, each=2), sizes, each=2)


@pytest.mark.long
def test_bytes_at_the_interfaces_of_two_machines(tmp_path: Path) -> None:
    """Two hosts with two ranks each, whose messages to each other don't leave them."""
    count, each, sizes = 4, 2, Sizes(rows=6_000, dim=2048, width=2048, examples=36, length=600)
    try:
        with hosts(count // each, tmp_path, each) as made:
            found = run(count, sizes, tmp_path, made.wrapper, each, **ENVIRONMENT)
    except CannotMake as error:
        pytest.skip(f"no hosts can be made on this machine: {error}")
    check_crossing(found, sizes, each)
    for first in range(0, count, each):
        for name in ("step", "fetch", "deliver"):
            phases = [ranks[name] for ranks in found[first : first + each]]
            check_wire(f"machine {first // each}, {name}", phases[0]["wire"], [p["sent"] for p in phases], count)
