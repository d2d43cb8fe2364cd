"""How a rank finds what it may use of its machine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from autopar.launch.start import nvidia_gpus


def test_gpus_are_counted_without_starting_cuda(tmp_path: Path, environment: Callable[..., None]) -> None:
    environment(CUDA_VISIBLE_DEVICES=None)
    assert nvidia_gpus(tmp_path) == 0
    for name in ("nvidia0", "nvidia11", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    assert nvidia_gpus(tmp_path) == 2
    for visible, count in (("0", 1), ("GPU-8932f937,GPU-1b0bf1b4,3", 3), ("", 0)):
        environment(CUDA_VISIBLE_DEVICES=visible)
        assert nvidia_gpus(tmp_path) == count
