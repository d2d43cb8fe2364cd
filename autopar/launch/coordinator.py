"""`choose_coordinator`: where JAX's coordination service is to listen, so that every rank can reach it.

A host's name is a poor answer: in a network namespace, in a container, or under Debian's 127.0.1.1 it means something
else to each host. So rank 0 listens, all others try its addresses in turn, and the first one that all of them reach
is taken: loopback where all ranks are on one host, else a network's address. Who answers must know a word that rank 0
sent through MPI: another host's loopback may have a listener, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import secrets
import socket
import struct
import threading
from collections.abc import Iterator

from autopar.errors import LaunchError
from autopar.mpi.world import World

#: How long an address is tried, in seconds.
TRIAL_S = 3.0

_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface.


def choose_coordinator(world: World) -> str:
    """An "address:port" at rank 0 that all ranks reach; where there is none (a firewall), the LaunchError names who
    can't reach which addresses. Collective."""
    word = secrets.token_bytes(16)
    with contextlib.ExitStack() as stack:
        listener = stack.enter_context(_listening(word)) if world.rank == 0 else None
        port = listener.getsockname()[1] if listener is not None else 0
        addresses = _own_addresses() if world.rank == 0 else []
        word, port, addresses = world.comm.bcast((word, port, addresses))
        failed: list[str] = []
        for address in addresses:
            reached = world.comm.allgather(world.rank == 0 or _answers(address, port, word))
            if all(reached):
                return f"{address}:{_free_port(world, address)}"
            far = ", ".join(str(rank) for rank, reaches in enumerate(reached) if not reaches)
            failed.append(f"{address} not from rank {far}")
    raise LaunchError(
        f"rank {world.rank}: JAX's processes need a TCP connection to rank 0's host, on any port, and there is none: "
        + "; ".join(failed)
        + ". Open the firewall between the hosts, or initialise JAX yourself (jax.distributed.initialize with a "
        "coordinator_address that works) before autopar is imported"
    )


def _free_port(world: World, address: str) -> int:
    """A port of rank 0 that is free now at an address. Not the one that was tried, whose connections linger."""
    port = 0
    if world.rank == 0:
        with socket.create_server((address, 0)) as free:
            port = free.getsockname()[1]
    return world.comm.bcast(port)


@contextlib.contextmanager
def _listening(word: bytes) -> Iterator[socket.socket]:
    """A server on all IPv4 addresses that says a word to whoever connects."""
    with socket.create_server(("", 0), backlog=1024) as server:
        done = threading.Event()
        server.settimeout(0.1)

        def serve() -> None:
            while not done.is_set():
                with contextlib.suppress(OSError):
                    connection, _ = server.accept()
                    with connection:
                        connection.sendall(word)

        thread = threading.Thread(target=serve, name="autopar-coordinator", daemon=True)
        thread.start()
        try:
            yield server
        finally:
            done.set()
            thread.join()


def _answers(address: str, port: int, word: bytes) -> bool:
    """Whether rank 0 answers at an address."""
    try:
        with socket.create_connection((address, port), timeout=TRIAL_S) as connection:
            return connection.recv(len(word), socket.MSG_WAITALL) == word
    except OSError:
        return False


def _own_addresses() -> list[str]:
    """This host's IPv4 addresses, loopback first."""
    addresses = ["127.0.0.1"]
    with contextlib.suppress(OSError):
        addresses += [str(info[4][0]) for info in socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)]
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, interface in socket.if_nameindex():
            with contextlib.suppress(OSError):
                request = struct.pack("256s", interface.encode()[:15])
                addresses.append(socket.inet_ntoa(fcntl.ioctl(probe.fileno(), _SIOCGIFADDR, request)[20:24]))
    return list(dict.fromkeys(addresses))
