"""The examples, each for a few steps in a process of its own: what they train gets better."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from autopar.ir.strategy import OPTIMIZATIONS
from tests.support.mpi.jobs import MPIEXEC, ROOT, WARNINGS

CORPUS = ROOT / "autopar" / "analysis"


def run(name: str, *flags: str | Path | int, ranks: int = 1) -> str:
    """Runs an example, under mpiexec if there are several ranks, and returns what it prints."""
    launcher = [MPIEXEC, "-n", str(ranks)] if ranks > 1 else []
    command = [*launcher, sys.executable, *WARNINGS, ROOT / "examples" / name, *map(str, flags)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    job = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


def test_the_ablation_of_the_demo_over_processes() -> None:
    """A line for each optimisation, the first for none."""
    sizes = ("--vocab", 200, "--dim", 8, "--batch", 4, "--length", 5)
    text = run("language_model_mpi.py", "--ablation", "--corpus", CORPUS, *sizes, ranks=2)
    rows = re.findall(r"^(none|\+ \w+) +(\d+) +([\d.]+) +([\d.]+) +([\d.]+)$", text, re.MULTILINE)
    switched = ["none", *(f"+ {name}" for name in OPTIMIZATIONS if name != "prefetch")]
    assert [name for name, *_ in rows] == switched and rows[0][-1] == "1.00", text
    assert all(float(value) > 0 for _, *values in rows for value in values)
    assert "prefetch isn't among them: " in text
    assert float(re.findall(r"metrics differ by (\S+) at most", text)[0]) < 1e-4


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step .* loss (\S+)", text, re.MULTILINE)]


def test_word2vec() -> None:
    text = run("word2vec.py", "--corpus", CORPUS, "--steps", 100, "--batch", 512, "--dim", 16, "--words", "shape", "if")
    first, *_, last = losses(text)
    assert last < first - 0.5
    (near,) = re.findall("^ +shape: (.*)", text, re.MULTILINE)
    assert len(set(near.split(", ")) - {"shape"}) == 6


def test_transformer(tmp_path: Path) -> None:
    """In stages, and from their checkpoint on on one device."""
    sizes = ("--layers", 2, "--heads", 2, "--dim", 16, "--length", 16, "--batch", 16, "--learning-rate", 0.02)
    stages = ("--devices", 2, "--stages", 2, "--microbatches", 2)
    saved = ("--checkpoint", tmp_path / "run", "--corpus", CORPUS, *sizes)
    text = run("transformer.py", "--steps", 40, *saved, *stages)
    first, *others, last = losses(text)
    assert len(others) == 8 and last < first - 1
    assert "2 microbatches" in text
    again = losses(run("transformer.py", "--steps", 45, *saved))
    assert len(again) == 1 and again[0] < first - 1, "it goes on from 40, and tells each fourth step"
    assert len([*(tmp_path / "run").glob("step-*")]) == 2


def test_recommender(tmp_path: Path) -> None:
    """Two ranks go on from the checkpoint of one process."""
    sizes = ("--lines", 8000, "--rows", 500, "--batch", 256, "--every", 40, "--checkpoint", tmp_path)
    scores = re.findall(r"AUC (\S+)", run("recommender.py", "--steps", 80, *sizes))
    assert len(scores) == 2 and float(scores[-1]) > 0.6
    again = run("recommender.py", "--steps", 120, *sizes, ranks=2)
    assert re.findall(r"^step +(\d+) +loss", again, re.MULTILINE) == ["120"]


@pytest.mark.parametrize(
    ("memory", "ranks"),
    [
        pytest.param("devices", 1, marks=pytest.mark.long),
        pytest.param("hosts", 1, marks=pytest.mark.long),
        ("hosts", 2),
    ],
)
def test_ngram_memory(memory: str, ranks: int) -> None:
    """Both tables run on their touched rows, with the numbers of plain JAX, and the memories help."""
    sizes = ("--vocab", 512, "--layers", 2, "--dim", 32, "--rows", 50_000, "--width", 32, "--batch", 8)
    flags = (*sizes, "--corpus", CORPUS, "--memory", memory, "--steps", 80, *["--compare"][: ranks == 1])
    text = run("ngram_memory.py", *flags, ranks=ranks)
    kept = "sparse, others deferred" + (", ps on hosts" if memory == "hosts" else "")
    assert re.findall(r"^params/memory_(\d): (.*?);", text, re.MULTILINE) == [("2", kept), ("3", kept)]
    without, with_memories = map(float, re.findall(r", held-out loss (\S+)$", text, re.MULTILINE))
    assert with_memories < without - 0.03
    assert ranks > 1 or float(re.findall(r"metrics differ by at most (\S+)", text)[0]) < 1e-5
