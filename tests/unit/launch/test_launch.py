"""The launcher's line, for several mpiruns and clusters, and what is said about wrong files and flags."""

from __future__ import annotations

import shlex
import signal
import socket
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from autopar.errors import LaunchError
from autopar.interrupts import INTERRUPTS, Body
from autopar.launch import heartbeat, launcher
from autopar.launch.cluster_file import read_cluster
from tests.support.mpi.jobs import MPIEXEC

HYDRA = launcher.Mpirun("/opt/bin/mpiexec", "hydra")
TWO_DEVICES = "-env JAX_NUM_CPU_DEVICES 2 -env GLIBC_TUNABLES glibc.malloc.hugetlb=1"
OPEN_MPI = launcher.Mpirun("/opt/bin/mpirun", "open-mpi")

CLUSTER = """
# Two machines.
[[host]]
name = "node1"
address = "10.0.0.1"
processes = 2
devices = 4

[[host]]
name = "node2"
processes = 2
devices = [0, 1, 2, 5]
"""


def cluster_file(folder: Path, text: str, name: str = "cluster.toml") -> str:
    path = folder / name
    path.write_text(text)
    return str(path)


def line(mpirun: launcher.Mpirun, ranks: list[launcher.RankGroup], cluster: object = None) -> str:
    """The line without the program, which is checked here."""
    command = launcher.mpirun_command(mpirun, ranks, cluster, ["/train.py", "--lr", "1 2"])  # type: ignore[arg-type]
    program = shlex.join(command[-6:])
    assert command[-6] == sys.executable and program.endswith("launch/supervise.py /train.py --lr '1 2'"), program
    return shlex.join(command).replace(program, "RUN")


def test_ranks_of_this_machine() -> None:
    ranks = launcher.plan_ranks(4, 2, None, watchdog="60", bind="none")
    flags = f"{TWO_DEVICES} -env AUTOPAR_WATCHDOG 60 -env AUTOPAR_BIND none"
    assert line(HYDRA, ranks) == f"/opt/bin/mpiexec -n 4 {flags} RUN"
    pages = "-x GLIBC_TUNABLES=glibc.malloc.hugetlb=1"
    flags = f"-x JAX_NUM_CPU_DEVICES=2 {pages} -x AUTOPAR_WATCHDOG=60 -x AUTOPAR_BIND=none"
    assert line(OPEN_MPI, ranks).endswith(f"-n 4 {flags} RUN")
    assert line(OPEN_MPI, ranks).startswith("/opt/bin/mpirun --bind-to none --oversubscribe")
    assert line(launcher.Mpirun("/opt/x", "other"), launcher.plan_ranks(3, None, None)) == "/opt/x -n 3 RUN"
    with pytest.raises(LaunchError, match="neither mpich's nor Open MPI's"):
        line(launcher.Mpirun("/opt/x", "other"), ranks)
    served = launcher.plan_ranks(4, None, None, servers=3)
    assert line(HYDRA, served) == "/opt/bin/mpiexec -n 4 -env AUTOPAR_SERVERS 3 RUN"
    grouped = launcher.plan_ranks(6, None, None, servers=2, clients="2")
    assert line(HYDRA, grouped) == "/opt/bin/mpiexec -n 6 -env AUTOPAR_SERVERS 2 -env AUTOPAR_CLIENTS 2 RUN"
    with pytest.raises(LaunchError, match="--clients 3 of 4 processes that train"):
        launcher.plan_ranks(6, None, None, servers=2, clients="3")
    with pytest.raises(LaunchError, match="--servers 4 of 4 processes"):
        launcher.plan_ranks(4, None, None, servers=4)


def test_what_a_user_says_to_glibc_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLIBC_TUNABLES", "glibc.malloc.perturb=1")
    assert line(HYDRA, launcher.plan_ranks(1, 2, None)) == "/opt/bin/mpiexec -n 1 -env JAX_NUM_CPU_DEVICES 2 RUN"


def test_ranks_of_a_cluster(tmp_path: Path) -> None:
    cluster = read_cluster(cluster_file(tmp_path, CLUSTER))
    assert [(h.name, h.address, h.processes, h.devices, h.accelerators) for h in cluster.hosts] == [
        ("node1", "10.0.0.1", 2, 2, ()),
        ("node2", "node2", 2, 2, ((0, 1), (2, 5))),
    ]
    ranks = launcher.plan_ranks(None, None, cluster)
    first, second, third = line(HYDRA, ranks, cluster).split(" : ")
    assert first == f"/opt/bin/mpiexec -hosts 10.0.0.1:2,node2:2 -n 2 {TWO_DEVICES} RUN"
    numbers = "-env JAX_CUDA_VISIBLE_DEVICES {0} -env JAX_ROCM_VISIBLE_DEVICES {0}"
    assert second == f"-n 1 {TWO_DEVICES} {numbers.format('0,1')} RUN"
    assert third == f"-n 1 {TWO_DEVICES} {numbers.format('2,5')} RUN"
    assert "--host 10.0.0.1:2,node2:2" in line(OPEN_MPI, ranks, cluster)
    assert launcher.plan_ranks(4, None, cluster) == ranks
    with pytest.raises(LaunchError, match="-n 3, but the cluster file has 4 processes"):
        launcher.plan_ranks(3, None, cluster)
    with pytest.raises(LaunchError, match="leave --devices out"):
        launcher.plan_ranks(None, 2, cluster)


def test_equal_hosts_are_one_group(tmp_path: Path) -> None:
    text = '[[host]]\nname = "a"\n[[host]]\nname = "b"\n'
    cluster = read_cluster(cluster_file(tmp_path, text))
    expected = "/opt/bin/mpiexec -hosts a:1,b:1 -n 2 -env JAX_NUM_CPU_DEVICES 1 RUN"
    assert line(HYDRA, launcher.plan_ranks(None, None, cluster), cluster) == expected


def test_a_resource_file(tmp_path: Path) -> None:
    text = "# address: device ids\n10.0.0.1: 0,1\n\n10.0.0.2: 1, 3  # the second one\n"
    cluster = read_cluster(cluster_file(tmp_path, text, "resources"))
    assert [(h.address, h.processes, h.devices, h.accelerators) for h in cluster.hosts] == [
        ("10.0.0.1", 1, 2, ((0, 1),)),
        ("10.0.0.2", 1, 2, ((1, 3),)),
    ]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "cluster.toml: it has no [[host]] tables"),
        (
            '[[host]]\nname = "a"\n\n[[host]]\nname = "b"\nbandwith = 3\n',
            "cluster.toml: there is no host[1].bandwith; there are name, address, processes, devices",
        ),
        ('[hosts]\nname = "a"\n', "cluster.toml: there is no hosts; there are name, machines"),
        ('[[host]]\nname = "a\n', "cluster.toml: Illegal character '\\n' (at line 2, column 10)"),
        ("[[host]]\nprocesses = 2\n", "cluster.toml: host[0]: a host needs a name"),
        ("[[host]]\nname = 3\n", "cluster.toml: host[0].name is a text, not 3"),
        ('[[host]]\nname = "a"\nprocesses = 0\n', "cluster.toml: host[0]: processes is a number of ranks"),
        ('[[host]]\nname = "a"\nprocesses = true\n', "cluster.toml: host[0].processes is a whole number, not true"),
        ('[[host]]\nname = "a"\ndevices = "all"\n', "cluster.toml: host[0]: devices is their number"),
        ('[[host]]\nname = "a"\ndevices = [0, -1]\n', "cluster.toml: host[0]: devices is their number"),
        ('[[host]]\nname = "a"\ndevices = 0\n', "cluster.toml: host[0]: devices is their number"),
        ('[[host]]\nname = "a"\ndevices = true\n', "cluster.toml: host[0]: devices is their number"),
        ("[[host]]\nname = 2026-01-01\n", "cluster.toml: host[0].name is a text, not "),
        ("host = 3\n", "cluster.toml: host is a list, not 3"),
        ('[[host]]\nname = "a"\ndevices = [1, 1]\n', "cluster.toml: host[0]: devices names one twice"),
        ('[[host]]\nname = "a"\nprocesses = 2\ndevices = 3\n', "cluster.toml: host[0]: 3 devices can't be shared out"),
        ('[[host]]\nname = "a"\n[[host]]\nname = "a"\n', "cluster.toml: host[1]: a is there already"),
    ],
)
def test_a_wrong_cluster_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(LaunchError) as raised:
        read_cluster(cluster_file(tmp_path, text))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("10.0.0.1: 0\n10.0.0.2 0\n", "resources:2: '10.0.0.2 0' is not of the form `address: device ids`"),
        ("10.0.0.1: 0,a\n", "resources:1: "),
        ("10.0.0.1: 0,0\n", "resources:1: a device is named twice"),
        ("# nothing\n", "resources: it has no lines"),
    ],
)
def test_a_wrong_resource_file(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(LaunchError) as raised:
        read_cluster(cluster_file(tmp_path, text, "resources"))
    assert message in str(raised.value)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["-n", "2", "gone.py"], "gone.py: there is no such script"),
        (["train.py"], "how many processes? -n 4"),
        (["--cluster", "gone.toml", "train.py"], "gone.toml: the cluster file can't be read: No such file"),
        (["-n", "2", "--mpirun", "gone", "train.py"], "--mpirun gone: there is no such program"),
        (["--cluster", "far.toml", "train.py"], "far.toml: host[0]: the host nowhere.invalid isn't known"),
    ],
)
def test_what_cannot_be_started(
    in_tmp_path: Path, capsys: pytest.CaptureFixture, flags: list[str], message: str
) -> None:
    (in_tmp_path / "train.py").write_text("")
    cluster_file(in_tmp_path, '[[host]]\nname = "nowhere.invalid"\n', "far.toml")
    assert launcher.main(flags) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("flags", [["-n", "0"], ["-n", "x"], ["--watchdog", "soon"], ["--watchdog", "-1"]])
def test_wrong_flags(flags: list[str], capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as raised:
        launcher.main([*flags, "train.py"])
    assert raised.value.code == 2 and "argument" in capsys.readouterr().err


def test_a_dry_run_prints_the_line(in_tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    (in_tmp_path / "train me.py").write_text("raise SystemExit('it ran')")
    assert launcher.main(["-n", "2", "--dry-run", "train me.py", "-n", "3"]) == 0
    printed = capsys.readouterr().out
    words = shlex.split(printed)
    assert words[0] == str(MPIEXEC) and words[words.index("-n") + 1] == "2" and printed.count("\n") == 1
    assert shlex.split(printed)[-3:] == [str(in_tmp_path / "train me.py"), "-n", "3"]
    assert launcher.main(["-n", "2", "--dry-run", "-m", "autopar", "calibrate", "--again"]) == 0
    assert shlex.split(capsys.readouterr().out)[-4:] == ["-m", "autopar", "calibrate", "--again"]


@pytest.mark.parametrize("in_loop", [False, True])
def test_a_rank_in_a_loop_may_answer_late(monkeypatch: pytest.MonkeyPatch, in_loop: bool) -> None:
    """Its step may be long, and all ranks do it; a rank whose collective waits for one that has left never answers."""
    ended: list[str] = []
    monkeypatch.setattr(heartbeat, "abort", lambda world, message, code: ended.append(message))
    monkeypatch.setattr(INTERRUPTS, "bodies", [Body("train.py:7")] if in_loop else [])
    reading, writing = socket.socketpair()
    reading.setblocking(False)
    beat = object.__new__(heartbeat.Heartbeat)
    vars(beat).update(_world=SimpleNamespace(rank=0), _names=["rank 0"], _interrupts=reading, _listened_s=0.0)
    vars(beat).update(_interrupted_s=None, _before_interrupt_s=0.0)
    vars(beat).update(_hooks=SimpleNamespace(answers_interrupts=lambda: True, answered_s=-1.0))
    with reading, writing:
        writing.send(bytes([signal.SIGINT]))
        for now_s in (1.0, 2.0, 2.0 + heartbeat.ANSWER_S):
            beat._check_interrupt(now_s)
    assert bool(ended) is not in_loop
