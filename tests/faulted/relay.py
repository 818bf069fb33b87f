"""A relay on the loopback interface that the connections of a rank go through: it cuts, stalls, delays or slows them.

It stands between a rank and the store. What it sees go by there, addresses of gloo's sockets and the port of the watch,
it replaces by its own, of the same length: so what connects to them later comes through it too.
"""

from __future__ import annotations

import contextlib
import re
import selectors
import socket
import struct
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from types import TracebackType

LINKS = ("store", "ranks", "watch")
_ADDRESS = re.compile(rb"\x02\x00(..)\x7f\x00\x00\x01", re.DOTALL)  # as Linux keeps an address of IPv4
_PORT = re.compile(rb'"port": (\d{5})\b')
_LINGER = struct.pack("ii", 1, 0)  # a socket that is closed resets its connection


@dataclass
class _End:
    """One end of a relayed connection: what comes here goes on to ``other``."""

    socket: socket.socket
    link: str
    other: _End | None = None
    waiting: deque[tuple[float, bytes]] = field(default_factory=deque)  # what is to go out here, and when
    read_again: float = 0.0  # when more may come in here


class Relay:
    """The relay to a store at ``port``; ranks are given its own ``port``."""

    def __init__(self, port: int) -> None:
        self._selector = selectors.DefaultSelector()
        self._fronts: dict[int, int] = {}  # by the port behind
        self._ends: list[_End] = []
        self._cut, self._stalled, self._delay, self._rates = set[str](), dict[str, float](), 0.0, dict[str, int]()
        self._lock, self._over = threading.RLock(), False
        self.port = self._front(port, "store")
        self._thread = threading.Thread(target=self._run, daemon=True)

    def __enter__(self) -> Relay:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._over = True
        self._thread.join()
        for key in list(self._selector.get_map().values()):
            key.fileobj.close()  # type: ignore[union-attr]
        for end in self._ends:
            end.socket.close()
        self._selector.close()

    def cut(self, links: tuple[str, ...]) -> None:
        """Reset the connections of these links, and take no new ones."""
        with self._lock:
            self._cut |= set(links)
            for end in [each for each in self._ends if each.link in links]:
                self._close(end)

    def stall(self, links: tuple[str, ...], seconds: float) -> None:
        """Carry nothing on these links for a time."""
        with self._lock:
            self._stalled |= dict.fromkeys(links, time.monotonic() + seconds)

    def delay(self, seconds: float) -> None:
        """Carry everything that comes from now on later."""
        with self._lock:
            self._delay = seconds

    def slow(self, links: tuple[str, ...], rate: int) -> None:
        """Carry ``rate`` bytes a second on each connection of these links, in each direction."""
        with self._lock:
            self._rates |= dict.fromkeys(links, rate)

    def _front(self, port: int, link: str) -> int:
        """The port of the relay for one behind it."""
        if port in self._fronts.values():
            return port
        if port not in self._fronts:
            listener = _listener_beside(port)
            self._fronts[port] = listener.getsockname()[1]
            self._selector.register(listener, selectors.EVENT_READ, (link, port))
        return self._fronts[port]

    def _run(self) -> None:
        while not self._over:
            for key, _ in self._selector.select(0.002 if any(end.waiting for end in self._ends) else 0.02):
                with self._lock:
                    if isinstance(key.data, _End):
                        self._read(key.data)
                    else:
                        self._accept(key.fileobj, *key.data)  # type: ignore[arg-type]
            with self._lock:
                for end in list(self._ends):
                    self._write(end)

    def _is_stalled(self, link: str) -> bool:
        return self._stalled.get(link, 0.0) > time.monotonic()

    def _accept(self, listener: socket.socket, link: str, port: int) -> None:
        one, _ = listener.accept()
        if link in self._cut:
            one.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
            one.close()
            return
        try:
            other = _connected(port, 30.0 if link == "store" else 0.0)  # the first rank may not serve it yet
        except OSError:
            one.close()
            return
        ends = _End(one, link), _End(other, link)
        ends[0].other, ends[1].other = ends[1], ends[0]
        for end in ends:
            end.socket.setblocking(True)
            end.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends.append(end)
            self._selector.register(end.socket, selectors.EVENT_READ, end)

    def _read(self, end: _End) -> None:
        if end not in self._ends or end.other is None:
            return
        if self._is_stalled(end.link) or time.monotonic() < end.read_again:
            time.sleep(0.002)  # it is left where it is, as on a connection that is full
            return
        rate = self._rates.get(end.link)
        try:
            data = end.socket.recv(1 << 20 if rate is None else max(rate // 20, 1))
        except OSError:
            data = b""
        if not data:
            self._close(end)
            return
        if rate is not None:
            end.read_again = time.monotonic() + len(data) / rate
        if end.link == "store":
            data = _ADDRESS.sub(self._address, _PORT.sub(self._named, data))
        end.other.waiting.append((time.monotonic() + self._delay, data))
        self._write(end.other)

    def _write(self, end: _End) -> None:
        while end.waiting and end.waiting[0][0] <= time.monotonic() and not self._is_stalled(end.link):
            with contextlib.suppress(OSError):  # it was closed at the other side, which reading tells
                end.socket.sendall(end.waiting.popleft()[1])

    def _close(self, end: _End) -> None:
        for each in (end, end.other):
            if each in self._ends and each is not None:
                self._ends.remove(each)
                self._selector.unregister(each.socket)
                if end.link in self._cut:
                    each.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _LINGER)
                else:
                    while each.waiting:  # what the other side had sent before it ended
                        with contextlib.suppress(OSError):
                            each.socket.sendall(each.waiting.popleft()[1])
                each.socket.close()

    def _address(self, found: re.Match[bytes]) -> bytes:
        port = self._front(struct.unpack("!H", found[1])[0], "ranks")
        return b"\x02\x00" + struct.pack("!H", port) + b"\x7f\x00\x00\x01"

    def _named(self, found: re.Match[bytes]) -> bytes:
        return b'"port": %d' % self._front(int(found[1]), "watch")


def _listener_beside(port: int) -> socket.socket:
    """A listener that two ranks think of as they do of ``port``: the one with the lower port waits for the other.

    Gloo compares ports as they stand in addresses, with the bytes swapped, so the next ones are 256 apart.
    """
    for near in (*range(port + 256, min(port + 20 * 256, 65536), 256), 0):
        with contextlib.suppress(OSError):
            return socket.create_server(("127.0.0.1", near), backlog=64)
    raise OSError("no port is free")


def _connected(port: int, patience: float) -> socket.socket:
    deadline = time.monotonic() + patience
    while True:
        try:
            return socket.create_connection(("127.0.0.1", port), timeout=5)
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.02)
