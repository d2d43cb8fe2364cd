"""Hosts on one machine: network namespaces joined by a bridge, each with a name, an address and counters of its own.

Needs Linux, iproute2 and util-linux, and root. mpich's ranks are put into them by a wrapper that goes by `PMI_RANK`,
so that no ssh is needed; shared memory between them is switched off, and all that they send goes over their `eth0`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

#: mpich sees one host a rank, and uses TCP, within a namespace by its loopback; a ring for reductions, by its blocking
#: and its nonblocking form.
ENVIRONMENT: Mapping[str, str] = {
    "MPIR_CVAR_NOLOCAL": "1",
    "UCX_TLS": "tcp,self",
    "MPIR_CVAR_ALLREDUCE_INTRA_ALGORITHM": "ring",
    "MPIR_CVAR_IALLREDUCE_INTRA_ALGORITHM": "tsp_ring",
}

_TOOLS = ("ip", "nsenter", "unshare", "mount", "hostname")

#: $1: the names' common part, $2: a hosts file, $3: how many ranks each has; then the command.
_WRAPPER = """#!/bin/sh
name=$1-$((PMI_RANK / $3)) hosts=$2
shift 3
exec nsenter --net=/run/netns/$name unshare --uts --mount sh -c '
    name=$0 hosts=$1
    shift
    hostname "$name" && mount --bind "$hosts" /etc/hosts && exec "$@"
' "$name" "$hosts" "$@"
"""


class CannotMake(Exception):
    """Namespaces can't be made here; the message says why."""


@dataclass(frozen=True)
class Hosts:
    """Namespaces NAME-0, NAME-1, ...; a command is run in that of its rank by putting `wrapper` before it."""

    name: str
    count: int
    wrapper: tuple[str, ...]


@contextlib.contextmanager
def hosts(count: int, folder: Path, each: int = 1, rate: str | None = None) -> Iterator[Hosts]:
    """`count` namespaces and a bridge, gone afterwards, whatever happens.

    Args:
      count: How many.
      folder: For the wrapper and the hosts file.
      each: Ranks that each has: the first ones in the first, and so on.
      rate: Of each one's link, both ways, as `tc` says it: "1gbit".

    Raises:
      CannotMake: not on this machine, or not by this user.
    """
    missing = [tool for tool in (*_TOOLS, *([] if rate is None else ["tc"])) if shutil.which(tool) is None]
    if missing or os.name != "posix":
        raise CannotMake(f"network namespaces need {', '.join(missing) or 'Linux'}")
    name = f"autopar-{secrets.token_hex(3)}"
    spaces = [f"{name}-{k}" for k in (*range(count), "bridge")]
    try:
        try:
            _make(name, count, spaces)
            if rate is not None:
                _limit(spaces, rate)
        except subprocess.CalledProcessError as error:
            raise CannotMake(f"{' '.join(error.cmd)}: {error.stderr.decode().strip()}") from error
        yield Hosts(name, count, _wrapper(name, count, folder, each))
    finally:
        for space in spaces:
            subprocess.run(["ip", "netns", "del", space], capture_output=True, check=False)


def _make(name: str, count: int, spaces: list[str]) -> None:
    bridge = spaces[-1]
    for space in spaces:
        _ip("netns", "add", space)
        _ip("-n", space, "link", "set", "lo", "up")
    _ip("-n", bridge, "link", "add", "bridge", "type", "bridge")
    _ip("-n", bridge, "link", "set", "bridge", "up")
    for k, space in enumerate(spaces[:count]):
        _ip("-n", bridge, "link", "add", f"port{k}", "type", "veth", "peer", "name", "eth0", "netns", space)
        _ip("-n", bridge, "link", "set", f"port{k}", "master", "bridge", "up")
        _ip("-n", space, "address", "add", f"{_address(k)}/24", "dev", "eth0")
        _ip("-n", space, "link", "set", "eth0", "up")


def _limit(spaces: list[str], rate: str) -> None:
    limit = ["root", "tbf", "rate", rate, "burst", "256kb", "latency", "100ms"]
    for k, space in enumerate(spaces[:-1]):
        for inside, device in ((space, "eth0"), (spaces[-1], f"port{k}")):
            _run("tc", "-n", inside, "qdisc", "add", "dev", device, *limit)


def _ip(*arguments: str) -> None:
    _run("ip", *arguments)


def _run(*command: str) -> None:
    subprocess.run(command, capture_output=True, check=True, stdin=subprocess.DEVNULL)


def _address(k: int) -> str:
    return f"10.77.0.{k + 1}"


def _wrapper(name: str, count: int, folder: Path, each: int) -> tuple[str, ...]:
    script, names = folder / "in_namespace", folder / "hosts"
    script.write_text(_WRAPPER)
    script.chmod(0o755)
    lines = ["127.0.0.1 localhost", *(f"{_address(k)} {name}-{k}" for k in range(count))]
    names.write_text("\n".join(lines) + "\n")
    return str(script), name, str(names), str(each)


def sent_by_interface(interface: str = "eth0") -> int | None:
    """Bytes that this process's network namespace sent by an interface so far; None where there is no such one."""
    for line in Path("/proc/self/net/dev").read_text().splitlines():
        found, _, counters = line.partition(":")
        if found.strip() == interface:
            return int(counters.split()[8])
    return None
