"""The examples, each for a few steps in a process of its own: what they train gets better."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.mpi.jobs import ROOT, WARNINGS

CORPUS = ROOT / "autopar" / "analysis"


def run(name: str, *flags: str | Path | int) -> str:
    """What an example prints."""
    command = [sys.executable, *WARNINGS, ROOT / "examples" / name, *map(str, flags)]
    env = {**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    job = subprocess.run(command, env=env, capture_output=True, text=True, timeout=300)
    assert job.returncode == 0, job.stdout + job.stderr
    return job.stdout


def losses(text: str) -> list[float]:
    return [float(loss) for loss in re.findall(r"^step .* loss (\S+)", text, re.MULTILINE)]


def test_word2vec() -> None:
    text = run("word2vec.py", "--corpus", CORPUS, "--steps", 100, "--batch", 512, "--dim", 16, "--words", "shape", "if")
    first, *_, last = losses(text)
    assert last < first - 0.5
    (near,) = re.findall("^ +shape: (.*)", text, re.MULTILINE)
    assert len(set(near.split(", ")) - {"shape"}) == 6


@pytest.mark.parametrize("flags", [(), ("--devices", 2, "--stages", 2, "--microbatches", 2)], ids=["one", "stages"])
def test_transformer(flags: tuple[str | int, ...]) -> None:
    sizes = ("--layers", 2, "--heads", 2, "--dim", 16, "--length", 16, "--batch", 16, "--learning-rate", 0.02)
    text = run("transformer.py", "--corpus", CORPUS, "--steps", 40, *sizes, *flags)
    first, *_, last = losses(text)
    assert last < first - 1
    assert ("2 microbatches" in text) == bool(flags)
