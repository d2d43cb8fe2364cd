"""Marks, and the page of memory in which a supervisor finds the last one."""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

import pytest

from autopar.launch import progress, supervise
from autopar.launch.progress import PAGE_BYTES, Progress


def test_marks() -> None:
    here = Progress()
    assert str(here.last) == "before the first step"
    here.mark(3, "computing")
    assert (here.last.step, here.last.kind, str(here.last)) == (3, "computes", "in step 3 (computing)")
    with here.during("row exchange", "waits"):
        waiting = here.last
        assert (waiting.step, waiting.what, waiting.kind) == (3, "row exchange", "waits")
    assert (here.last.what, here.last.kind) == ("computing", "computes")
    assert here.last.time_s >= waiting.time_s


def test_a_fault_is_told_where_it_was() -> None:
    here = Progress()
    here.mark(3, "computing")
    with pytest.raises(ValueError, match="lost"), here.during("row exchange", "waits"):
        raise ValueError("lost")
    assert str(here.last) == "in step 3 (row exchange)"


class Result:
    """A result of a program that is under way."""

    ready = False

    def is_ready(self) -> bool:
        return self.ready


def test_a_program_under_way_is_a_wait() -> None:
    here, result = Progress(), Result()
    here.dispatched(result)
    assert here.seen.kind == "computes"  # Nobody watches.
    here.watched = True
    here.mark(4, "train_step")
    here.dispatched(result)
    assert (here.seen.kind, str(here.seen)) == ("waits", "in step 4 (train_step, on the devices)")
    with here.during("compiling", "compiles"):
        assert here.seen.kind == "compiles"
    result.ready = True
    assert here.seen == here.last and here.last.kind == "computes"


def test_a_program_under_way_is_a_wait_until_it_ends_whatever_else_does() -> None:
    """A mean of all ranks is under way while some of them compute together: a wait for all, then for these."""
    here, mean, step = Progress(), Result(), Result()
    here.watched = True
    here.dispatched(mean, range(4))
    here.dispatched(step, range(2, 4))
    assert (here.seen.kind, here.seen.needs) == ("waits", range(4))
    mean.ready = True
    assert (here.seen.kind, here.seen.needs) == ("waits", range(2, 4))
    step.ready, mean.ready = True, False
    assert here.seen.needs == range(4)
    mean.ready = True
    assert here.seen.kind == "computes"


def test_the_page_of_the_supervisor() -> None:
    with tempfile.TemporaryFile() as file:
        file.truncate(PAGE_BYTES)

        def page() -> tuple[int, int, str]:
            file.seek(0)
            told = file.read()
            flags, step, length = supervise.PAGE.unpack_from(told)
            return flags, step, told[supervise.PAGE.size :][:length].decode()

        here = Progress()
        here.share(file.fileno())
        assert page() == (supervise.STARTED, -1, "before the first step")
        here.mark(5, "a text that is longer than what is kept of it, which is " + "x" * 100)
        assert page()[1] == 5 and len(page()[2]) == progress.TEXT_BYTES
        here.mark(6, "short")
        here.flag(progress.LEFT)
        assert page() == (supervise.STARTED | supervise.LEFT, 6, "short")


def test_a_program_under_way_is_waited_for() -> None:
    here, result = Progress(), Result()
    here.settle()
    here.watched = True
    here.dispatched(result)
    thread = threading.Thread(target=here.settle)
    thread.start()
    thread.join(0.1)
    assert thread.is_alive()
    result.ready = True
    thread.join(5)
    assert not thread.is_alive()


@pytest.mark.parametrize(("number", "name"), [(11, "SIGSEGV"), (40, "signal 40")])
def test_the_supervisor_names_a_signal(number: int, name: str) -> None:
    script = f"import os; os.kill(os.getpid(), {number})"
    command = [sys.executable, "-I", str(supervise.__file__), "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert f"was killed by {name}, before autopar was imported" in done.stderr and done.returncode == 128 + number


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="processes are looked up in /proc")
def test_the_supervisor_names_a_rank_that_ends_while_others_go_on() -> None:
    """One that imported nothing and ended with exit code 0, which is no fault by itself."""
    supervised = [sys.executable, "-I", str(supervise.__file__), "-c"]
    with subprocess.Popen([*supervised, "import time; time.sleep(60)"]) as other:
        while not Path(f"/proc/{other.pid}/task/{other.pid}/children").read_text():
            time.sleep(0.01)
        done = subprocess.run([*supervised, "pass"], capture_output=True, text=True, check=False)
        other.terminate()
    assert re.search(r"rank 0 .* ended with exit code 0 and didn't import autopar", done.stderr), done.stderr
    assert done.returncode == 0
    done = subprocess.run([*supervised, "pass"], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and not done.stderr


def test_the_supervisor_reads_what_the_rank_writes() -> None:
    for name in ("PAGE_BYTES", "STARTED", "REPORTED", "LEFT", "PAGE_VARIABLE"):
        assert getattr(supervise, name) == getattr(progress, name)
    assert supervise.PAGE.format == progress.PAGE.format
