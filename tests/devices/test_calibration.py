"""What is measured of the devices: in how much time, what is kept, and what is said of what is missing."""

from __future__ import annotations

import functools
import json
from pathlib import Path
from typing import Any

import jax
import pytest

import autopar
from autopar import calibration
from autopar.api import planned_by
from autopar.backends.devices import Devices
from autopar.cost.rates import Rates
from autopar.measure import calibrate
from autopar.measure.calibrate import Probe
from autopar.measure.loops import Budget
from tests.support.explained import explained
from tests.support.meshes import mesh_of
from tests.support.row_steps import ids_in, make_state, same, step

pytestmark = pytest.mark.measures
DEVICES = Devices.of(mesh_of(4))
NAMES = ("product", "all_to_all", "all_gather", "all_reduce", "route", "walk", "update")


class SlowMachine:
    """Measurements of two sizes of each figure, each of them a second and more of a clock that nobody waits for."""

    def __init__(self) -> None:
        self.now, self.measured = 0.0, list[tuple[str, int | str]]()

    def probes(self, purpose: str, *_: Any) -> list[Probe]:
        points = [(name, at) for at in (1024, 4096) for name in NAMES[1:]] if purpose == "methods" else [("dense", 4)]
        return [Probe(name, at, 1, functools.partial(self.run, name, at)) for name, at in points]

    def run(self, name: str, at: int) -> float:
        self.now += 1.1
        self.measured.append((name, at))
        return 1e-6 * at

    def next_process(self, *, steps: bool = False) -> Rates:
        """What a process finds, in at most five seconds."""
        calibrate._known.clear()
        self.measured.clear()
        before = self.now
        found = calibrate.rates_of(DEVICES, lambda step, method: step, steps=steps)
        assert self.now - before <= (10 if steps else 5)
        return found


@pytest.fixture
def machine(monkeypatch: pytest.MonkeyPatch) -> SlowMachine:
    """A slow machine in place of this one."""
    made = SlowMachine()
    monkeypatch.setattr(calibrate, "probes_for", made.probes)
    monkeypatch.setattr(calibrate.loops, "product_seconds", lambda *_: made.run("product", 512))
    for module in (calibrate, calibration):
        monkeypatch.setattr(module, "Budget", functools.partial(Budget, clock=lambda: made.now))
    return made


def test_what_there_is_no_time_for_is_measured_by_the_next_process(
    machine: SlowMachine, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first = machine.next_process()
    assert machine.measured == [("product", 512), *((name, 1024) for name in NAMES[1:4])]
    assert set(NAMES[1:]) <= set(first.assumed)
    (file,) = (tmp_path / "autopar").iterdir()
    why = "what exchanges cost on 4 devices, to choose each table's method"
    assert caplog.messages == [f"measuring {why}; kept in {file}"]
    assert calibrate.rates_of(DEVICES, lambda step, method: step) == first, (
        "the plans of a process are made by the same"
    )
    for _ in range(5):
        last = machine.next_process()
    assert not set(NAMES) & set(last.assumed) and last.all_reduce(4096) == pytest.approx(4096e-6)
    assert machine.next_process() == last and not machine.measured
    assert "dense" in last.assumed, "nobody predicts whole steps"
    machine.next_process(steps=True)
    assert machine.measured == [("product", 512), ("dense", 4)]


@pytest.mark.parametrize("broken", ["", "[]", '{"walk": 3}', '{"walk": {"8": null}}'])
def test_a_broken_file_is_measured_anew(broken: str, machine: SlowMachine, tmp_path: Path) -> None:
    machine.next_process()
    (file,) = (tmp_path / "autopar").iterdir()
    good = file.read_text()
    file.write_text(broken)
    machine.next_process()
    assert file.read_text() == good


def test_the_names_of_a_meshs_axes_do_not_matter() -> None:
    other = Devices.of(jax.make_mesh((4,), ("batch",)))
    assert calibrate.cache_file(other, "{}") == calibrate.cache_file(DEVICES, "{}")
    assert calibrate.cache_file(Devices.of(mesh_of(2)), "{}") != calibrate.cache_file(DEVICES, "{}")


@pytest.mark.usefixtures("machine")
def test_explain_says_what_is_assumed() -> None:
    planned = autopar.parallelize(step, mesh=mesh_of(4))
    text = " ".join(explained(planned, make_state(4000), ids_in(0, 4000)).split())
    assert "Assumed, as of devices like these, for want of time to measure: AllToAll" in text
    assert "python -m autopar calibrate measures all at once" in text


def test_rates_are_measured_outside_of_what_is_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    measured = []

    def concrete(*_: Any) -> calibrate.Figures:
        measured.append(float(jax.jit(lambda x: x + 1)(1.0)))  # part of the trace, and no number, otherwise
        return {}

    monkeypatch.setattr(calibrate, "measure_probes", concrete)
    planned = autopar.parallelize(step, mesh=mesh_of(4), donate=False)
    same(
        jax.jit(lambda s, b: planned(s, b))(make_state(4000), ids_in(0, 4000)),
        jax.jit(step)(make_state(4000), ids_in(0, 4000)),
    )
    assert measured == [2.0]


def test_the_command(
    machine: SlowMachine, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """It measures what is missing in the time that it is given; the next process reads it, unless it is --again."""
    monkeypatch.setattr(calibration, "measure_cluster", lambda mesh, budget, again: autopar.Cluster.named("dgx-h100"))
    arguments = ["--devices", "4", "--seconds", "40"]
    assert calibration.main(arguments) == 0
    text = capsys.readouterr().out
    assert "all_reduce" in text and "1.0 KiB 1.024 ms  4.0 KiB 4.096 ms" in text
    assert "no time for: gather, scatter, fixed" in text and f"kept in {tmp_path / 'autopar'}" in text
    rates = machine.next_process()
    assert not machine.measured and rates.all_reduce(1024) == pytest.approx(1024e-6)
    assert calibration.main(arguments) == 0 and not machine.measured
    assert calibration.main([*arguments, "--again"]) == 0 and ("walk", 4096) in machine.measured
    assert calibration.main(["--devices", "9"]) == 1
    assert "--devices 9: process 0 has 8" in capsys.readouterr().err


def test_measured_rates_make_sense(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Each is a time, and a step by them agrees with the plain one. Small arrays, and few turns, will do."""
    small = {"_MUCH": 1 << 14, "_WALKED": 1 << 16, "_ALSO_WALKED": (1 << 15,), "_GRADIENT": 1 << 16}
    small |= {"_TABLE": 1 << 16, "_ROUNDS": 4}
    for name, value in small.items():
        monkeypatch.setattr(calibrate, name, value)
    plan = functools.partial(planned_by, DEVICES)
    found = calibrate.rates_of(DEVICES, plan, steps=True, budget=Budget(600.0, DEVICES.processes))
    assert not found.assumed
    assert min(found.fixed.values()) == 0 and set(found.fixed) == {"ps", "allgather", "allreduce_rows", "allreduce"}
    for curve in (found.all_to_all, found.all_gather, found.all_reduce, found.route, found.walk):
        assert all(seconds >= 0 for _, seconds in curve.points)
    assert found.gather(100, 1024) > 0 and found.scatter(100, 1024) > 0
    assert found.dense is not None and found.dense(4) >= 0
    assert found.flop_s > 0 and found.moved_byte_s >= 0 and found.call_s >= 0
    planned = autopar.parallelize(step, mesh=mesh_of(4))
    same(planned(make_state(4000), ids_in(0, 4000)), jax.jit(step)(make_state(4000), ids_in(0, 4000)))
    text = explained(planned)
    assert "predicted" in text and "Parallax's table 3" in text
    (file,) = (tmp_path / "autopar").iterdir()
    assert set(json.loads(file.read_text())["more"]) == {"ps", "allgather", "allreduce_rows"}
