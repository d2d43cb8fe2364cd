"""The files of deploy/: what they say is what there is, and the commands that they name train, over processes."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support.mpi.deployed_training import STEPS
from tests.support.mpi.jobs import MPIEXEC, ROOT, Job, coordinator, run_job

DEPLOY = ROOT / "deploy"
TRAINING = "from tests.support.mpi.deployed_training import main\n\nmain()\n"

#: Slurm's commands, as the batch script sees them: ranks with PMI-2, told to end once, as Slurm tells them.
SLURM = {
    "srun": """#!/bin/sh
for flag in "$@"; do case $flag in --mpi=pmi2) pmi=2; shift;; --*) shift;; *) break;; esac; done
[ "$pmi" = 2 ] || exit 9
mpiexec -n 2 "$@" & ranks=$!
while kill -0 $ranks 2> /dev/null; do
    # Two ranks' words may stand on one line.
    if [ "$(grep -o begins output | wc -l)" = 2 ] && [ ! -e told ]; then touch told; kill -TERM $ranks; fi
    sleep 0.1
done
wait $ranks
""",
    "scontrol": '#!/bin/sh\necho "scontrol $*"\n',
}


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder with the deploy files, a training where they have theirs, Slurm's commands, and this Python."""
    shutil.copytree(DEPLOY, tmp_path / "deploy")
    (tmp_path / "examples").mkdir()
    (tmp_path / "examples" / "recommender.py").write_text(TRAINING)
    (tmp_path / "bin").mkdir()
    for name, text in SLURM.items():
        (tmp_path / "bin" / name).write_text(text)
        (tmp_path / "bin" / name).chmod(0o755)
    return tmp_path


def run(command: Sequence[str], place: Path, **env: str) -> Job:
    """Runs a command of a deploy file; what it keeps in /checkpoints is kept in this place."""
    path = os.pathsep.join([str(place / "bin"), str(MPIEXEC.parent), os.environ["PATH"]])
    found = [word.replace("/checkpoints", str(place / "checkpoints")) for word in command]
    env |= {"CHECKPOINT": str(place / "checkpoints"), "PATH": path, "JAX_NUM_CPU_DEVICES": "1"}
    job = run_job(found, place, timeout_s=120, **env)
    assert not job.left, f"left behind: {job.left}\n{job.output}"
    return job


def steps(job: Job, count: int, when: str) -> int:
    """The step that so many processes "begins" or "ends" at."""
    found = sorted(re.findall(rf"process (\d) .*?{when} at (\d+)", job.output))
    assert [int(process) for process, _ in found] == [*range(count)], job.output
    (step,) = {step for _, step in found}
    return int(step)


def container(pod: Mapping[str, Any]) -> Mapping[str, Any]:
    """The one container of a pod, whose volumes are there."""
    (found,) = pod["spec"]["containers"]
    assert {v["name"] for v in found.get("volumeMounts", ())} <= {v["name"] for v in pod["spec"].get("volumes", ())}
    return found


def test_slurm(place: Path) -> None:
    """Told to end, the training saves and is queued again, and goes on where it was."""
    text = (DEPLOY / "slurm.sbatch").read_text()
    flags = dict(re.findall(r"^#SBATCH --([\w-]+)=?(.*)$", text, re.MULTILINE))
    assert {"signal": "TERM@120", "requeue": "", "open-mode": "append"}.items() <= flags.items()
    told = run(["bash", "deploy/slurm.sbatch"], place, SLURM_JOB_ID="17", ENDLESS="1")
    assert told.code == 143 and "scontrol requeue 17" in told.output, told.output
    last = run(["bash", "deploy/slurm.sbatch"], place, SLURM_JOB_ID="17", SLURM_RESTART_COUNT="1")
    assert last.code == 0 and "scontrol" not in last.output, last.output
    assert steps(told, 2, "begins") == 0 and steps(told, 2, "ends") == steps(last, 2, "begins") > 0


@pytest.mark.parametrize(
    ("code", "in_vain", "saves", "is_queued"),
    [
        (143, 19, True, True),
        (143, 19, False, False),  # a rank has failed before the others could save: they die of SIGTERM
        (137, 19, True, True),
        (137, 18, False, True),
        (137, 19, False, False),
        (0, 5, False, False),
    ],
)
def test_when_slurm_queues_it_again(place: Path, code: int, in_vain: int, saves: bool, is_queued: bool) -> None:
    saved = "mkdir -p $CHECKPOINT/step-1" if saves else ":"
    (place / "bin" / "srun").write_text(f"#!/bin/sh\n{saved}\nexit {code}\n")
    failures = place / "checkpoints.failures"
    failures.write_text("1\n" * in_vain)
    job = run(["bash", "deploy/slurm.sbatch"], place, SLURM_JOB_ID="17")
    assert job.code == code and ("scontrol requeue 17" in job.output) is is_queued, job.output
    assert failures.exists() is not (saves or code == 0)


def test_mpijob(place: Path) -> None:
    """By the operator's hosts and ssh. The launcher is started again after a failure."""
    job = yaml.safe_load((DEPLOY / "mpijob.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v2beta1", "MPIJob")
    spec = job["spec"]
    launcher, worker = (spec["mpiReplicaSpecs"][name] for name in ("Launcher", "Worker"))
    command = container(launcher["template"])["command"]
    assert spec["mpiImplementation"] == "MPICH" and launcher["restartPolicy"] == "OnFailure"
    assert int(command[command.index("-n") + 1]) == worker["replicas"] * spec["slotsPerWorker"]
    ssh, hosts = place / "bin" / "ssh", place / "hostfile"
    ssh.write_text('#!/bin/sh\nwhile [ "${1#-}" != "$1" ]; do shift; done\necho "ssh $1"\nshift\nexec sh -c "$*"\n')
    ssh.chmod(0o755)
    hosts.write_text("".join(f"127.0.0.{k + 2}:{spec['slotsPerWorker']}\n" for k in range(worker["replicas"])))
    variables = {"HYDRA_HOST_FILE": str(hosts), "HYDRA_LAUNCH_EXTRA_ARGS": "-o ConnectionAttempts=10", "DIE": "1:2"}
    killed = run(command, place, **variables)
    assert killed.code == 137 and killed.output.count("ssh 127.0.0.") == worker["replicas"], killed.output
    last = run(command, place, **variables)
    assert last.code == 0, last.output
    assert [steps(job, worker["replicas"], "begins") for job in (killed, last)] == [0, 2]
    assert steps(last, worker["replicas"], "ends") == STEPS


def test_jobset(place: Path) -> None:
    """Processes of jax.distributed alone."""
    job = yaml.safe_load((DEPLOY / "jobset.yaml").read_text())
    assert (job["apiVersion"], job["kind"]) == ("jobset.x-k8s.io/v1alpha2", "JobSet")
    (replicated,) = job["spec"]["replicatedJobs"]
    spec = replicated["template"]["spec"]
    process = container(spec["template"])
    env = {variable["name"]: variable.get("value") for variable in process["env"]}
    (port,) = (each["containerPort"] for each in process["ports"])
    name = job["metadata"]["name"]
    assert env["JAX_COORDINATOR_ADDRESS"] == f"{name}-{replicated['name']}-0-0.{name}:{port}"
    assert spec["completionMode"] == "Indexed" and spec["parallelism"] == spec["completions"]
    assert int(env["JAX_NUM_PROCESSES"]) == spec["completions"] and env["JAX_PROCESS_ID"] is None
    starts = [f"JAX_PROCESS_ID={k} {shlex.join(process['command'])} &" for k in range(spec["completions"])]
    with coordinator() as env["JAX_COORDINATOR_ADDRESS"]:
        found = run(["sh", "-c", " ".join([*starts, "wait"])], place, **{k: v for k, v in env.items() if v})
    assert [steps(found, spec["completions"], when) for when in ("begins", "ends")] == [0, STEPS]


def test_a_process_that_fails_before_the_others_ends_at_once(place: Path) -> None:
    """JAX would have it wait for them for five minutes, and them for it."""
    (place / "train.py").write_text("import jax\nassert jax.process_index(), 'it fails'\njax.distributed.shutdown()\n")
    command = [sys.executable, "deploy/connected.py", "train.py"]
    with coordinator() as address:
        env = {**os.environ, "JAX_COORDINATOR_ADDRESS": address, "JAX_NUM_PROCESSES": "2", "JAX_PLATFORMS": "cpu"}
        failing, other = (
            subprocess.Popen(
                command, cwd=place, env={**env, "JAX_PROCESS_ID": str(k)}, stderr=subprocess.PIPE, text=True
            )
            for k in (0, 1)
        )
        try:
            assert "it fails" in failing.communicate(timeout=60)[1] and failing.returncode == 1
        finally:
            other.kill()
            other.communicate()


def test_the_image_has_what_the_jobs_use() -> None:
    text = (DEPLOY / "Dockerfile").read_text()
    lines = [line for line in re.sub(r"\\\n", "", text).splitlines() if line and line[0] != "#"]
    steps = [line.split(maxsplit=1) for line in lines]
    assert steps[0][0] == "FROM" and {word for word, _ in steps} <= {"FROM", "RUN", "COPY", "WORKDIR", "USER", "CMD"}
    for script in (rest for word, rest in steps if word == "RUN"):
        subprocess.run(["sh", "-n", "-c", script], check=True)
    options = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    (extras,) = re.findall(r"pip install .*\[(.*)\]", text)
    assert set(extras.split(",")) <= options.keys()
    spec = yaml.safe_load((DEPLOY / "mpijob.yaml").read_text())["spec"]
    worker = container(spec["mpiReplicaSpecs"]["Worker"]["template"])
    assert Path(spec["sshAuthMountPath"], "id_rsa").as_posix() in text and worker["command"][-1] in text
    assert f"Port {worker['readinessProbe']['tcpSocket']['port']}" in text
    assert f"--uid {worker['securityContext']['runAsUser']}" in text
