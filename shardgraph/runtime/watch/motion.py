"""Whether what this rank waits for moves: the bytes of its connections, and what its threads compute.

A collective that is slow moves something on some rank of its group all the time: bytes come or go, or are copied and
added up. One whose connections are stalled leaves all its ranks still. Where that cannot be told, nobody is still.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

from shardgraph import torch_api
from shardgraph.runtime.watch import tcp
from shardgraph.runtime.watch.place import Place

_THREADS = "/proc/self/task"
_IDLE = 1  # tick of the processor between two looks, up to which a thread is idle: some wake up now and then
_LONGEST = 2.0  # seconds that a look may stand for: between two, all ranks may have been stopped together
_CARRIERS = ("gloo_tcp_loop", "pt_tcpstore_uv")  # threads that do nothing but carry bytes, which are counted
_OWN = ("shardgraph watch", "shardgraph store")  # threads of the watch


class Motion:
    """``still`` is for how many seconds nothing has moved, in all looks while the main thread waits at one place."""

    def __init__(self) -> None:
        self.still, self._looked = 0.0, 0.0
        self._seen: tuple[object, int] | None = None  # the place, and the bytes that were carried by then
        self._computed: dict[int, int] = {}  # the ticks of each thread, mostly hundredths of a second

    def look(self, now: Place) -> None:
        """Look at what this rank does, which is in a collective, in a step of a pipeline, or at an agreement."""
        carried = _carried(now.group) if now.group else 0
        of_user = now.message and now.run is None  # a message, which any thread of another rank may send
        seen = None if carried is None or now.answer or now.beside or of_user else (now.mark, carried)
        active = self._computes()
        passed, self._looked = time.monotonic() - self._looked, time.monotonic()
        is_still = seen is not None and seen == self._seen and not active
        self.still = self.still + min(passed, _LONGEST) if is_still else 0.0
        self._seen = seen

    def _computes(self) -> bool:
        """Whether a thread has computed since the last look, or waits for a disk; also where that cannot be told."""
        own = {each.native_id for each in threading.enumerate() if each.name in _OWN}
        before, self._computed, waits = self._computed, {}, False
        for thread in map(int, os.listdir(_THREADS) if os.path.isdir(_THREADS) else ()):
            with contextlib.suppress(OSError), open(f"{_THREADS}/{thread}/stat") as file:
                name, _, rest = file.read().partition("(")[2].rpartition(")")
                fields = rest.split()
                if thread not in own and name not in _CARRIERS:
                    self._computed[thread] = int(fields[11]) + int(fields[12])
                    waits |= fields[0] == "D"
        used = [ticks - before.get(thread, 0) for thread, ticks in self._computed.items()]
        return waits or max(used, default=0) > _IDLE or not any(self._computed.values())


def _carried(group: str) -> int | None:
    """The bytes of connections to other ranks for groups like this one, but for the store's, which carry on always."""
    sockets = torch_api.connections_of(group)
    return None if sockets is None else tcp.carried(sockets, but_at=torch_api.store_port())
