"""Shared by all tests. XLA's optimizer is turned down: tests compile hundreds of tiny programs, and run each a few
times. What depends on it (memory, HLO) asks for the default in a process of its own. What one test compiled, JAX keeps
in a folder for all others: workers, ranks, and the next time."""

import contextlib
import ctypes
import gc
import importlib.metadata
import os
import sys
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

#: Of a worker's memory, from where on it forgets what it has compiled.
MOST_BYTES = 3 << 29

os.environ.setdefault("XLA_FLAGS", "")
if "xla_backend_optimization_level" not in os.environ["XLA_FLAGS"]:
    os.environ["XLA_FLAGS"] += " --xla_backend_optimization_level=0"
    # A program's parts are compiled by one thread, together: a third less work, and the other cores have tests to run.
    os.environ["XLA_FLAGS"] += " --xla_cpu_parallel_codegen_split_count=1"
    if tuple(map(int, importlib.metadata.version("jax").split(".")[:2])) < (0, 11):  # newer ones don't know it
        # Compiles in 60% of the time. It rounds otherwise where it fuses.
        os.environ["XLA_FLAGS"] += " --xla_cpu_use_fusion_emitters=false"

os.environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(__file__).parent.parent / ".pytest_cache" / "jax"))
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """The tests on several devices run only where they are named: JAX fixes the number of devices at its start."""
    named = any("devices" in str(argument) for argument in config.args)
    return True if collection_path == Path(__file__).parent / "devices" and not named else None


def pytest_addoption(parser: pytest.Parser) -> None:
    """Adds `--every N`."""
    parser.addoption("--every", type=int, default=1, metavar="N", help="run one test of N, by a hash of its name")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Jobs of several processes begin: they take longest, and the other worker fills the time up to their end."""
    every = config.getoption("--every")
    chosen = {item for item in items if zlib.crc32(item.nodeid.encode()) % every == 0}
    config.hook.pytest_deselected(items=[item for item in items if item not in chosen])
    jobs = Path(__file__).parent / "mpi"
    items[:] = sorted(filter(chosen.__contains__, items), key=lambda item: jobs not in item.path.parents)


def pytest_collection_finish() -> None:
    """Python's collector of cyclic garbage has less to walk: not what was imported, and not as often."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)


@pytest.fixture
def environment() -> Iterator[Callable[..., None]]:
    """`environment(NAME="value", OTHER=None)` sets variables for a test, and removes those that are None."""
    before: dict[str, str | None] = {}

    def change(**variables: str | None) -> None:
        for name, value in variables.items():
            before.setdefault(name, os.environ.get(name))
            _set_variable(name, value)

    yield change
    for name, value in before.items():
        _set_variable(name, value)


def _set_variable(name: str, value: str | None) -> None:
    os.environ.pop(name, None)
    if value is not None:
        os.environ[name] = value


@pytest.fixture
def uninstalled() -> Iterator[Callable[[str], None]]:
    """`uninstalled(name)`: a module can't be imported for the rest of a test."""
    before = {}

    def hide(name: str) -> None:
        before[name] = sys.modules.pop(name, None)
        sys.modules[name] = None  # type: ignore[assignment]

    yield hide
    for name, module in before.items():
        del sys.modules[name]
        if module is not None:
            sys.modules[name] = module


@pytest.fixture
def in_tmp_path(tmp_path: Path) -> Iterator[Path]:
    """Runs a test in its own folder."""
    with contextlib.chdir(tmp_path):
        yield tmp_path


@pytest.fixture(autouse=True, scope="module")
def _let_go() -> Iterator[None]:
    """Programs stay for other modules, unless they are very many."""
    yield
    pages = Path("/proc/self/statm")
    if pages.exists() and int(pages.read_text().split()[1]) * os.sysconf("SC_PAGESIZE") > MOST_BYTES:
        import jax

        jax.clear_caches()
        # The allocator keeps what is freed, and each later module would be taken for one too many.
        with contextlib.suppress(AttributeError):  # of other C libraries than glibc
            ctypes.CDLL(None).malloc_trim(0)
