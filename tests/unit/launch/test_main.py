"""`python -m autopar`."""

from __future__ import annotations

import platform

import jax
import jaxlib
import pytest

import autopar
from autopar.__main__ import main


def test_versions_are_those_that_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"]) == 0
    jax_versions = f"jax {jax.__version__}, jaxlib {jaxlib.__version__}"
    told = capsys.readouterr().out
    assert told == f"autopar {autopar.__version__} ({jax_versions}, Python {platform.python_version()})\n"
    assert main([]) == 2 and "--version" in capsys.readouterr().out
