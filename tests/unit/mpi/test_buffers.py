"""Host memory, what the machine lets a process have, and how waiting is chosen: no ranks needed."""

from __future__ import annotations

import resource
from pathlib import Path

import numpy as np
import pytest

from autopar.errors import AutoparError, HostMemoryError
from autopar.mpi import buffers, limits, waiting
from autopar.mpi.buffers import Buffers, aligned, allocate_table, grown
from autopar.mpi.waiting import pieces


@pytest.mark.parametrize("dtype", [bool, "i1", "f2", "f4", "f8", "c16"])
@pytest.mark.parametrize("shape", [(), (0,), (1,), (7, 3), (5, 0, 2), (1000, 9)])
def test_aligned_arrays(shape: tuple[int, ...], dtype: str) -> None:
    kept = [aligned(shape, dtype) for _ in range(8)]
    for k, array in enumerate(kept):
        assert array.shape == shape and array.dtype == dtype
        assert array.ctypes.data % 64 == 0 or not array.size
        assert array.flags.c_contiguous and array.flags.writeable
        array[...] = k % 2
    assert all((array == k % 2).all() for k, array in enumerate(kept))


def test_jax_takes_an_aligned_array_over_without_a_copy() -> None:
    import jax

    array = aligned((1000, 3), np.float32)
    array[...] = 1
    placed = jax.device_put(array)
    assert placed.unsafe_buffer_pointer() == array.ctypes.data


def test_a_buffer_is_used_again_only_at_its_turn() -> None:
    taken = Buffers()
    first, second = taken.take("a", (4, 2), np.float32), taken.take("a", (4, 2), np.float32)
    other = taken.take("b", (4, 2), np.float32)
    first[...], second[...], other[...] = 1, 2, 3
    assert (first == 1).all() and (second == 2).all()
    third = taken.take("a", 3, np.int32)
    assert third.ctypes.data == first.ctypes.data and third.shape == (3,) and third.dtype == np.int32
    assert not np.shares_memory(third, second) and not np.shares_memory(third, other)
    assert Buffers(sets=1).take("a", 3, bool).shape == (3,)


def test_a_buffer_grows_and_what_was_taken_before_stays() -> None:
    taken = Buffers(sets=1)
    small = taken.take("a", 10, np.int64)
    small[...] = 7
    large = taken.take("a", 1000, np.int64)
    large[...] = 8
    assert (small == 7).all()
    held = taken.nbytes
    assert 8000 <= held <= 9000
    assert np.shares_memory(taken.take("a", 10, np.int64), large) and taken.nbytes == held
    sizes = {grown(n) for n in range(4096, 8192)}
    assert len(sizes) <= 9 and all(grown(n) >= n and grown(n) % 64 == 0 for n in range(5000))


def test_a_table_that_fits() -> None:
    table = allocate_table((1000, 16), np.float32, "params/emb")
    assert table.ctypes.data % 64 == 0 and table.shape == (1000, 16) and not table.any()
    assert allocate_table((0, 16), np.float32, "params/emb").shape == (0, 16)


def _process_bytes(name: str) -> int:
    """Returns what the kernel says of the process's memory."""
    (line,) = [x for x in Path("/proc/self/status").read_text().splitlines() if x.startswith(f"{name}:")]
    return 1024 * int(line.split()[1])


def test_a_table_that_does_not_fit() -> None:
    """The error comes before any page is touched: the system would promise this much."""
    with pytest.raises(HostMemoryError, match=r"params/emb: \(4000000000, 256\) of float32 takes 4096.00 GB") as caught:
        allocate_table((4_000_000_000, 256), np.float32, "params/emb")
    assert isinstance(caught.value, MemoryError) and isinstance(caught.value, AutoparError)
    assert _process_bytes("VmPeak") < 4096 * 10**9, "memory was taken"
    with pytest.raises(HostMemoryError, match="takes 1.00 GB of host memory, and 1.00 GB are available"):
        buffers.require_pages(10**9 + 1, "opt/emb", "(1000000001,) of int8", buffers.RESERVE + 10**9)


def test_a_table_that_the_system_refuses() -> None:
    """Though there is memory: the process may have no more addresses."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (_process_bytes("VmSize") + (32 << 20), before[1]))
    try:
        with pytest.raises(HostMemoryError, match="params/emb"):
            allocate_table((1 << 27,), np.int8, "params/emb")
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


def _files(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


MEMINFO = "MemTotal:       32000 kB\nMemFree:   1 kB\nMemAvailable:   20000 kB\n"


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 20000 * 1024),
        # Version 2: the parent's limit counts; files that nobody used lately are given up.
        (
            {
                "proc/self/cgroup": "0::/job/task\n",
                "sys/fs/cgroup/job/memory.max": "1000000\n",
                "sys/fs/cgroup/job/memory.current": "700000\n",
                "sys/fs/cgroup/job/memory.stat": "anon 5\ninactive_file 50000\n",
                "sys/fs/cgroup/job/task/memory.max": "max\n",
                "sys/fs/cgroup/job/task/memory.current": "600000\n",
            },
            350000,
        ),
        # In a container the path is the host's, and the mount the container's own.
        (
            {
                "proc/self/cgroup": "0::/../../docker/abc\n",
                "sys/fs/cgroup/memory.max": "900000\n",
                "sys/fs/cgroup/memory.current": "1000000\n",
            },
            0,
        ),
        # Version 1, where no limit is a large number.
        (
            {
                "proc/self/cgroup": "4:memory:/job\n1:cpu,cpuacct:/\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
                "sys/fs/cgroup/memory/memory.usage_in_bytes": "123\n",
                "sys/fs/cgroup/memory/job/memory.limit_in_bytes": "500000\n",
                "sys/fs/cgroup/memory/job/memory.usage_in_bytes": "200000\n",
            },
            300000,
        ),
    ],
)
def test_available_memory(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    root = _files(tmp_path / "root", {"proc/meminfo": MEMINFO, **files})
    assert limits.available_bytes(root) == expected


def test_total_memory(tmp_path: Path) -> None:
    """The machine's, or the least limit of a group of processes; what is in use doesn't matter."""
    files = {"proc/meminfo": MEMINFO}
    assert limits.total_bytes(_files(tmp_path / "a", files)) == 32000 * 1024
    files |= {"proc/self/cgroup": "0::/job/task\n", "sys/fs/cgroup/job/memory.max": "1000000\n"}
    files |= {"sys/fs/cgroup/job/task/memory.max": "max\n", "sys/fs/cgroup/job/memory.current": "700000\n"}
    assert limits.total_bytes(_files(tmp_path / "b", files)) == 1000000


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "250000 100000\n"}, 2),
        ({"proc/self/cgroup": "0::/a\n", "sys/fs/cgroup/a/cpu.max": "max 100000\n"}, 8),
        (
            {
                "proc/self/cgroup": "1:cpu,cpuacct:/\n0::/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "50000\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            1,
        ),
        (
            {
                "proc/self/cgroup": "1:cpu,cpuacct:/\n",
                "sys/fs/cgroup/cpu/cpu.cfs_quota_us": "-1\n",
                "sys/fs/cgroup/cpu/cpu.cfs_period_us": "100000\n",
            },
            8,
        ),
    ],
)
def test_cores(files: dict[str, str], expected: int, tmp_path: Path) -> None:
    assert limits.cores(_files(tmp_path, files), own=range(8)) == expected


def test_this_machine() -> None:
    assert 0 < limits.available_bytes() < 1 << 60
    assert limits.cores() >= 1 and limits.machine_name() == limits.machine_name() != ""


class _Ranks:
    """A communicator that gathers what was given."""

    def __init__(self, told: list[tuple[bool | None, bool, str, set[int], int]]) -> None:
        self._told = [(p, s, m, frozenset(a), q) for p, s, m, a, q in told]

    def allgather(self, own: object) -> list[tuple[bool | None, bool, str, frozenset[int], int]]:
        return self._told


@pytest.mark.parametrize(
    ("told", "polling"),
    [
        ([(None, False, "m", {0, 1}, 2)] * 2, False),
        ([(None, False, "m", {0, 1}, 2)] * 3, True),
        ([(None, False, "m", {0, 1}, 1)] * 2, True),  # a quota of one core for both
        ([(None, False, "m", {0}, 1), (None, False, "m", {1}, 1)], False),  # each bound to its own core
        ([(None, False, "m", {0}, 1), (None, False, "n", {0}, 1)], False),  # two machines
        ([(None, False, "m", {0, 1}, 2), (None, True, "n", {0, 1}, 2)], True),  # gloo's threads on one of them
        ([(False, True, "m", {0}, 1)] * 2, False),  # a wish counts for more
        ([(None, False, "m", {0, 1}, 2), (True, False, "m", {0, 1}, 2)], True),
    ],
)
def test_how_waiting_is_chosen(told: list[tuple[bool | None, bool, str, set[int], int]], polling: bool) -> None:
    assert waiting.choose_waiting(_Ranks(told)).polling is polling


@pytest.mark.parametrize(
    ("affinity", "shared", "patience_s"),
    [
        ({1}, False, waiting.BOUND_PATIENCE_S),
        ({0, 1}, False, waiting.PATIENCE_S),
        ({1}, True, waiting.PATIENCE_S),
    ],
)
@pytest.mark.parametrize("option", [None, True])
def test_a_bound_rank_yields_for_longer(
    affinity: set[int], shared: bool, patience_s: float, option: bool | None
) -> None:
    told = [(option, False, "m", affinity, 1), (option, shared, "m", {1}, 1)]
    assert waiting.choose_waiting(_Ranks(told), own=affinity).patience_s == patience_s


class _Request:
    """Done at the n-th test."""

    tests = 0

    def __init__(self, at: int) -> None:
        type(self).tests, self.at = 0, at

    @classmethod
    def Testall(cls, requests: list[_Request]) -> bool:
        cls.tests += 1
        return all(cls.tests >= r.at for r in requests)


@pytest.mark.parametrize("at", [1, 2, 40])
@pytest.mark.parametrize("patience_s", [0.0, 10.0])
def test_polling_ends_when_the_message_is_there(at: int, patience_s: float) -> None:
    slept: list[float] = []
    waiting.Waiting(True, patience_s, sleep=slept.append).finish([_Request(at), _Request(at)])
    assert _Request.tests == at
    assert len(slept) == (0 if patience_s else -(-(at - 1) // waiting.Waiting(True).tests))


@pytest.mark.parametrize(("nbytes", "limit", "lengths"), [(10, 4, [4, 4, 2]), (8, 4, [4, 4]), (3, 4, [3]), (0, 4, [])])
def test_messages_in_pieces(nbytes: int, limit: int, lengths: list[int]) -> None:
    message = np.arange(nbytes, dtype=np.int8)
    found = list(pieces(message, limit))
    assert [p.nbytes for p in found] == lengths
    assert not found or np.array_equal(np.concatenate(found).view(np.int8), message)
    assert all(np.shares_memory(p, message) for p in found)
    wide = np.ones((3, 2), np.float64)
    assert [p.nbytes for p in pieces(wide, 20)] == [20, 20, 8]
