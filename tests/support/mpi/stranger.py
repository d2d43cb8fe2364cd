"""A program outside of a job that knows the port of JAX's coordinator, and nothing else: it writes to its store.

It speaks gRPC by a socket, as anybody could. `python -m tests.support.mpi.stranger PORT KEY FILE`: under a key, it
writes what the file holds, in place of what is there.
"""

from __future__ import annotations

import re
import socket
import struct
import sys
from pathlib import Path

_HEADERS, _DATA, _SETTINGS, _PING = 1, 0, 4, 6
_END_HEADERS, _END_STREAM, _ACK = 4, 1, 1


def write(port: int, key: bytes, value: bytes) -> None:
    """Write a value to the store; an AssertionError if the coordinator doesn't take it."""
    entry = _field(2, _field(1, key) + _field(2, value)) + b"\x18\x01"  # in place of what is there
    answer = _call(port, b"InsertKeyValue", entry)
    known = re.search(rb"wrong service incarnation: requested 0, currently (\d+)", answer)
    if known:  # the coordinator itself says what to say
        header = b"\x19" + struct.pack("<Q", int(known[1]))
        answer = _call(port, b"InsertKeyValue", _field(1, header) + entry)
    assert b"grpc-status\x010" in answer, answer


def _call(port: int, method: bytes, message: bytes) -> bytes:
    """Returns the bytes of a call's answer."""
    fields = {
        b":path": b"/xla.coordination.CoordinationService/" + method,
        b":authority": b"stranger",
        b"content-type": b"application/grpc",
        b"te": b"trailers",
    }
    headers = b"\x83\x86" + b"".join(b"\0" + _short(name) + _short(value) for name, value in fields.items())
    with socket.create_connection(("127.0.0.1", port), timeout=20) as connection:
        connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _frame(_SETTINGS, 0, 0))
        connection.sendall(_frame(_HEADERS, _END_HEADERS, 1, headers))
        connection.sendall(_frame(_DATA, _END_STREAM, 1, b"\0" + struct.pack(">I", len(message)) + message))
        answer = b""
        while b"grpc-status" not in answer:
            part = connection.recv(1 << 16)
            assert part, answer
            answer += part
        return answer


def _frame(kind: int, flags: int, stream: int, payload: bytes = b"") -> bytes:
    return struct.pack(">I", len(payload))[1:] + bytes([kind, flags]) + struct.pack(">I", stream) + payload


def _field(number: int, value: bytes) -> bytes:
    """Returns a field of a protocol buffer."""
    size, length = b"", len(value)
    while length > 127:
        size, length = size + bytes([length & 127 | 128]), length >> 7
    return bytes([number << 3 | 2]) + size + bytes([length]) + value


def _short(text: bytes) -> bytes:
    assert len(text) < 127
    return bytes([len(text)]) + text


if __name__ == "__main__":
    write(int(sys.argv[1]), sys.argv[2].encode(), Path(sys.argv[3]).read_bytes())
