"""Programs that one process compiles, and others load."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from autopar.launch.start import HEADER, Compilations

KEY, OTHER = b"k" * 32, b"o" * 32
#: A process that has a program's lock, and works on it.
HOLDS = """
import fcntl, os, struct, sys, time
file = os.open(sys.argv[1], os.O_RDWR)
fcntl.fcntl(file, fcntl.F_OFD_SETLK, struct.pack("hhqqi4x", fcntl.F_WRLCK, os.SEEK_SET, int(sys.argv[2]), 1, 0))
print("holds", flush=True)
time.sleep(60)
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "programs").touch()
    return tmp_path / "programs"


@pytest.fixture
def opened(path: Path) -> Iterator[Callable[..., Compilations]]:
    """Opens the file as another process does."""
    files = []

    def open_(wait_s: float = 20.0) -> Compilations:
        files.append(os.open(path, os.O_RDWR))
        return Compilations(files[-1], wait_s)

    yield open_
    for file in files:
        os.close(file)


class Program:
    """What compiles takes a moment, and is counted."""

    def __init__(self, seconds: float = 0.05) -> None:
        self.compiled, self.seconds = 0, seconds

    def of(self, programs: Compilations, key: bytes = KEY, size: int = 3000, *, compiles: bool = False) -> bytes:
        def compile_here() -> bytes:
            time.sleep(self.seconds)
            self.compiled += 1
            return key[:1] * size

        return programs.program(key, compile_here, lambda program: program, lambda saved: saved, compiles=compiles)


def test_each_program_is_compiled_once(opened: Callable[..., Compilations]) -> None:
    """By threads and openers that come at once, and later; programs of all sizes."""
    programs, mine, other = [opened() for _ in range(4)], Program(), Program()
    with ThreadPoolExecutor(12) as pool:
        waiting = [pool.submit(mine.of, programs[k % 4]) for k in range(8)]
        waiting += [pool.submit(other.of, programs[k], OTHER, 1 << 20) for k in range(4)]
        assert {x.result() for x in waiting} == {b"k" * 3000, b"o" * (1 << 20)}
    assert mine.compiled == other.compiled == 1
    assert mine.of(opened()) == b"k" * 3000 and mine.compiled == 1
    assert mine.of(programs[1], compiles=True) == b"k" * 3000 and mine.compiled == 2  # for JAX's own cache


@pytest.mark.parametrize("dies", [True, False])
def test_a_process_that_compiles_dies_or_takes_too_long(
    opened: Callable[..., Compilations], path: Path, *, dies: bool
) -> None:
    """Another one compiles as soon as it is dead; or once it has waited, and leaves the file to the first one."""
    programs, program = opened(20.0 if dies else 0.3), Program()
    place = str(1 + int.from_bytes(KEY[:6]))
    process = subprocess.Popen([sys.executable, "-c", HOLDS, str(path), place], stdout=subprocess.PIPE)
    try:
        assert process.stdout is not None and process.stdout.readline() == b"holds\n"
        assert Program().of(programs, OTHER) == b"o" * 3000  # another program's lock
        killer = threading.Timer(0.5, process.kill)
        start = time.monotonic()
        if dies:
            killer.start()
        assert program.of(programs) == b"k" * 3000 and program.compiled == 1
        assert 0.25 < time.monotonic() - start < 15
        assert (opened(0.0)._find(KEY) is not None) == dies
    finally:
        process.kill()
        process.communicate()


def test_what_a_process_wrote_before_it_died_is_written_over(opened: Callable[..., Compilations], path: Path) -> None:
    """A program without its header, longer than the next one."""
    programs, program = opened(), Program()
    program.of(programs)
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        file.seek(file.tell() + HEADER.size)
        file.write(b"x" * 10_000)
    assert program.of(opened(), OTHER) == b"o" * 3000
    assert program.of(opened(), KEY) == b"k" * 3000 and program.of(programs, OTHER) == b"o" * 3000
    assert program.compiled == 2


def test_a_process_with_too_many_files_compiles_by_itself(
    opened: Callable[..., Compilations], monkeypatch: pytest.MonkeyPatch
) -> None:
    programs, program = opened(), Program()

    def refused(*_: object) -> int:
        raise OSError(24, "Too many open files")

    monkeypatch.setattr("autopar.launch.start.os.open", refused)
    assert program.of(programs) == b"k" * 3000 and program.compiled == 1


def test_what_cannot_be_saved_or_loaded_is_told(
    opened: Callable[..., Compilations], caplog: pytest.LogCaptureFixture
) -> None:
    def fails(_: bytes) -> bytes:
        raise ValueError("not in this way")

    with caplog.at_level(logging.WARNING, "autopar"):
        assert opened().program(KEY, lambda: b"made", fails, fails) == b"made"
        assert "can't be shared, so that each rank compiles it: not in this way" in caplog.text
        Program().of(opened())
        assert opened().program(KEY, lambda: b"here", bytes, fails) == b"here"
        assert "can't be loaded, so this one compiles it: not in this way" in caplog.text


#: A rank that isn't the first one: all that it runs is loaded, then all is compiled.
RANK = """
import os, sys
import jax, numpy as np
from jax._src import distributed
from autopar import jax_compat
from tests.support.shared_cache import share_cache

def program_of(key, compile_here, save, load, *, compiles):
    assert not compiles
    made = compile_here()
    return load(save(made)) if loads else made

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
distributed.global_state.process_id = 1
share_cache()
jax_compat.share_compilations(program_of)
for loads, scale in ((True, 2.0), (False, 3.0)):
    jax.jit(lambda x: x * scale + 1)(np.ones(1000, np.float32)).block_until_ready()
    print(len([name for name in os.listdir(sys.argv[1]) if name.endswith("-cache")]), end=" ")
"""


def test_what_was_loaded_is_not_saved_again(tmp_path: Path) -> None:
    """XLA would leave functions out, and whoever reads JAX's persistent cache would miss them."""
    environment = {key: value for key, value in os.environ.items() if not key.startswith("JAX_")}
    command = [sys.executable, "-c", RANK, str(tmp_path)]
    assert subprocess.check_output(command, env=environment, text=True).split() == ["0", "1"]
