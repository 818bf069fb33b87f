"""What TCP connections have carried, by the system's counts.

By the C library: a socket object of Python's may change how the socket behaves for whom it belongs to.
"""

from __future__ import annotations

import ctypes
import socket
import struct
import sys
from collections.abc import Iterable

_TCP_INFO = 11
_CARRIED = struct.Struct("120x2Q")  # bytes_acked and bytes_received in struct tcp_info of linux/tcp.h
_ADDRESS = struct.Struct("=H2s124x")  # family and port of struct sockaddr_in and sockaddr_in6
_LIBC = ctypes.CDLL(None) if sys.platform == "linux" else None


def carried(descriptors: Iterable[int], but_at: int) -> int | None:
    """The bytes that came by these connections, and that the other side has acknowledged; None where none are counted.

    Those from or to the port ``but_at`` do not count, and sockets of another kind neither.
    """
    if _LIBC is None:
        return None
    return sum(_bytes_of(each) for each in descriptors if but_at not in _ports(each)) or None


def _ports(descriptor: int) -> list[int]:
    """The ports of both ends, of a connection over IP."""
    found = []
    for call in (_LIBC.getsockname, _LIBC.getpeername):  # type: ignore[union-attr]
        address, size = ctypes.create_string_buffer(_ADDRESS.size), ctypes.c_uint(_ADDRESS.size)
        if call(descriptor, address, ctypes.byref(size)) == 0:
            family, port = _ADDRESS.unpack(address.raw)
            if family in (socket.AF_INET, socket.AF_INET6):
                found.append(int.from_bytes(port, "big"))
    return found


def _bytes_of(descriptor: int) -> int:
    info, size = ctypes.create_string_buffer(_CARRIED.size), ctypes.c_uint(_CARRIED.size)
    wanted = socket.IPPROTO_TCP, _TCP_INFO
    if _LIBC.getsockopt(descriptor, *wanted, info, ctypes.byref(size)) != 0:  # type: ignore[union-attr]
        return 0  # no connection over TCP, or none any more
    return sum(_CARRIED.unpack(info.raw))
