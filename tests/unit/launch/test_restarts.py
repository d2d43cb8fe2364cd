"""Jobs that are started again, on the hosts that are left, and jobs that were interrupted, which are not."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from autopar.launch import launcher

SAVING = """
import signal, sys, time
from pathlib import Path
folder, seconds = Path(sys.argv[1]), float(sys.argv[2])
for number in signal.SIGINT, signal.SIGTERM:
    signal.signal(number, signal.default_int_handler)  # SIGINT is ignored by what a shell runs in the background
try:
    (folder / "training").touch()
    time.sleep(60)
except KeyboardInterrupt:
    for number in signal.SIGINT, signal.SIGTERM:
        signal.signal(number, signal.SIG_IGN)
    (folder / "saving").touch()
    time.sleep(seconds)
    sys.exit(3)
"""


@pytest.mark.parametrize(
    ("signals", "seconds", "code"),
    [
        ([signal.SIGINT], 0.2, 3),
        ([signal.SIGTERM], 1.0, 3),
        ([signal.SIGINT, signal.SIGINT], 60, 128 + signal.SIGKILL),
        ([signal.SIGTERM, signal.SIGTERM], 60, 128 + signal.SIGKILL),
    ],
)
def test_the_first_signal_leaves_time_to_save(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], signals: list[int], seconds: float, code: int
) -> None:
    """The job isn't started again; a line says what a second signal does."""
    script = tmp_path / "save.py"
    script.write_text(SAVING)

    def press() -> None:
        for name, number in zip(("training", "saving"), signals, strict=False):
            while not (tmp_path / name).exists():
                time.sleep(0.01)
            os.kill(os.getpid(), number)

    thread = threading.Thread(target=press)
    thread.start()
    command = [sys.executable, str(script), str(tmp_path), str(seconds)]
    assert launcher.run_job(command, 3, lambda: command, ending_s=0.01, killing_s=0.01) == code
    thread.join()
    said = capfd.readouterr().err.count("After a second signal those that haven't ended within 0.01 seconds are killed")
    assert said <= 1 and (said == 1 or seconds < 1 or len(signals) > 1)


TOLD = """
import os, signal, sys, time
from pathlib import Path
assert "PMI_RANK" not in os.environ
for number in signal.SIGUSR1, signal.SIGTERM:
    signal.signal(number, lambda number, frame: sys.exit(number))
Path(sys.argv[1]).touch()
time.sleep(60)
"""


@pytest.mark.parametrize(
    ("sent", "received"), [(signal.SIGUSR1, signal.SIGUSR1), (signal.SIGHUP, signal.SIGTERM), (None, signal.SIGTERM)]
)
def test_signals_that_mpirun_hears_of(
    tmp_path: Path, environment: Callable[..., None], sent: int | None, received: int
) -> None:
    """A SIGHUP that is ignored, as under nohup, none. The job has nothing of one that the launcher is a rank of."""
    environment(PMI_RANK="0")
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN if sent is None else signal.SIG_DFL)

    def press() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGHUP if sent is None else sent)
        if sent is None:
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGTERM)

    thread = threading.Thread(target=press)
    thread.start()
    command = [sys.executable, "-c", TOLD, str(tmp_path / "begun")]
    assert launcher.run_job(command, 0, lambda: command) == received
    thread.join()
    signal.signal(signal.SIGHUP, before)


def test_a_signal_that_another_thread_takes(tmp_path: Path) -> None:
    """It interrupts no call that the main thread waits in."""

    def press() -> None:
        while not (tmp_path / "begun").exists():
            time.sleep(0.01)
        time.sleep(0.1)
        signal.pthread_kill(threading.get_ident(), signal.SIGTERM)

    thread = threading.Thread(target=press)
    thread.start()
    command = [sys.executable, "-c", TOLD.replace("60", "5"), str(tmp_path / "begun")]
    assert launcher.run_job(command, 0, lambda: command) == signal.SIGTERM
    thread.join()


@pytest.mark.parametrize("run", [0, 1])
def test_a_signal_while_mpirun_is_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: int) -> None:
    """It ends the job, the first one as well as one that was started again."""
    started: list[Any] = []

    def start(*args: Any, **kwargs: Any) -> Any:
        process = popen(*args, **kwargs)
        if len(started) == run:
            while not (tmp_path / "begun").exists():
                time.sleep(0.01)
            os.kill(os.getpid(), signal.SIGTERM)
        started.append(process)
        return process

    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", start)
    command = [sys.executable, "-c", TOLD.replace("60", "5"), str(tmp_path / "begun")]
    first = command if run == 0 else [sys.executable, "-c", "raise SystemExit(1)"]
    assert launcher.run_job(first, 3, lambda: command) == signal.SIGTERM
    assert len(started) == run + 1


@pytest.mark.parametrize(("failures", "code", "runs"), [(0, 0, 1), (2, 0, 3), (9, 7, 4)])
def test_a_job_that_fails_is_started_again(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], failures: int, code: int, runs: int
) -> None:
    script, tally = tmp_path / "train.py", tmp_path / "tally"
    script.write_text(
        "import os, sys\n"
        f"with open({str(tally)!r}, 'a') as tally:\n"
        "    tally.write('.')\n"
        f"sys.exit(7 * (os.path.getsize({str(tally)!r}) <= {failures}))\n"
    )
    assert launcher.main(["-n", "1", "--max-restarts", "3", str(script)]) == code
    assert tally.stat().st_size == runs
    out, err = capfd.readouterr()
    assert out.count("supervise.py") == runs  # the line, of each run
    assert re.findall(r"exit code 7; restart (\d) of 3", err) == [str(k) for k in range(1, runs)]


#: In place of ssh. A host is gone as long as there is a file of its name in HOSTS_GONE.
SSH = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
if [ -e "$HOSTS_GONE/$1" ]; then exit 255; fi
shift
exec sh -c "$*"
"""

#: The first run takes two hosts with it, of which one is back after the second; the third one takes them all.
LOSING = """
import os, pathlib, sys
gone, run = pathlib.Path(os.environ["HOSTS_GONE"]), pathlib.Path(sys.argv[1])
if os.environ["PMI_RANK"] == "0":
    with run.open("a") as file:
        file.write(os.environ["PMI_SIZE"])
    run = len(run.read_text())
    for name in {1: ("127.0.0.2", "127.0.0.3"), 3: ("127.0.0.2", "127.0.0.3", "127.0.0.4")}.get(run, ()):
        (gone / name).touch()
    if run == 2:
        (gone / "127.0.0.2").unlink()
    sys.exit(5)
"""


def test_a_cluster_goes_on_with_the_hosts_that_are_left(
    tmp_path: Path, environment: Callable[..., None], capfd: pytest.CaptureFixture[str]
) -> None:
    for name, text in {"ssh": SSH, "train.py": LOSING}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "ssh").chmod(0o755)
    hosts = {"127.0.0.2": 2, "127.0.0.3": 1, "127.0.0.4": 1}
    cluster = tmp_path / "cluster.toml"
    cluster.write_text("".join(f'[[host]]\nname = "{h}"\nprocesses = {n}\n' for h, n in hosts.items()))
    environment(HYDRA_LAUNCHER_EXEC=str(tmp_path / "ssh"), HOSTS_GONE=str(tmp_path))
    flags = ["-n", "4", "--cluster", str(cluster), "--max-restarts", "9"]
    assert launcher.main([*flags, str(tmp_path / "train.py"), str(tmp_path / "sizes")]) == 5
    assert (tmp_path / "sizes").read_text() == "413"
    err = capfd.readouterr().err
    assert err.count("autopar launch: 127.0.0.2 can't be reached; without its 2 processes") == 2
    assert "it can't be started again: 127.0.0.2, 127.0.0.3, 127.0.0.4: no host can be reached" in err


def test_a_host_that_does_not_answer_is_gone(
    tmp_path: Path, environment: Callable[..., None], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ssh").write_text("#!/bin/sh\nexec sleep 5\n")
    (tmp_path / "ssh").chmod(0o755)
    environment(HYDRA_LAUNCHER_EXEC=str(tmp_path / "ssh"))
    (tmp_path / "cluster.toml").write_text('[[host]]\nname = "localhost"\n[[host]]\nname = "127.0.0.2"\n')
    cluster, now_s = launcher.read_cluster(tmp_path / "cluster.toml"), iter([0.0, 0.0, 59.7])
    monkeypatch.setattr(launcher, "time", SimpleNamespace(monotonic=lambda: next(now_s)))
    left = launcher._reachable(launcher.find_mpirun(), cluster, reaching_s=60.0)
    assert [host.name for host in left.hosts] == ["localhost"]


def test_files_that_hydra_leaves_are_removed(tmp_path: Path) -> None:
    """Those of this job: not older ones, not others' names, and none where a job of another's may need its own."""
    files, processes = tmp_path / "files", tmp_path / "processes"
    old, new, other = (files / name for name in ("hydra_hwloc_xmlfile_a", "hydra_hwloc_xmlfile_b", "hydra.conf"))
    (processes / "17").mkdir(parents=True)
    files.mkdir()
    for file, time_s in ((old, 50), (new, 150), (other, 150)):
        file.touch()
        os.utime(file, (time_s, time_s))
    (processes / "17" / "comm").write_text("hydra_pmi_proxy\n")
    launcher.remove_topologies(100, files, processes, proxy_s=0.1)
    assert new.exists()
    (processes / "17" / "comm").write_text("python\n")
    launcher.remove_topologies(100, files, processes)
    assert [*files.iterdir()] and not new.exists() and old.exists() and other.exists()
