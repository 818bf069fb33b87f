"""The thread of a rank that hears of others: it ends what this rank waits for when another can no longer come.

Others are known by their sentinels (:mod:`shardgraph.runtime.watch.sentinel`). What fails is told once and to all; on
this rank connections are then closed under whatever waits for them, which raises in the thread that waits, and what
communicates next raises too. A main thread that does neither is interrupted, and a process that cannot be is ended by
its sentinel.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardgraph import torch_api
from shardgraph.errors import RankFailedError
from shardgraph.runtime.watch import flight, place
from shardgraph.runtime.watch.motion import Motion
from shardgraph.runtime.watch.place import Place
from shardgraph.runtime.watch.stuck import Status, verdict
from shardgraph.runtime.watch.wording import unreachable

_LOOK = 1.0  # seconds between two looks at what this rank does
_SETTLED = 3  # looks at one place until a rank is said to wait there
_UNANSWERED = 4  # looks during which the store does not answer until it is said to be lost
_HEARING = 4.0  # seconds for a rank whose communication fails to hear why
_MOMENT = 0.2  # seconds between two looks at what has been heard
_INTERRUPT = 3.0  # seconds until a main thread that does not communicate is interrupted
_SIGNAL = getattr(signal, "SIGURG", None)  # nobody uses it, and it is ignored by a process that does not handle it


class Watcher:
    """The watch of this rank over the default process group ``group``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.rank, self.size = group, dist.get_rank(), dist.get_world_size()
        self.failure: str | None = None  # why this rank cannot go on
        self.left: dict[int, str] = {}  # ranks that have ended in order, and how
        self.abandoned: dict[int, tuple[int, str]] = {}  # ranks that have left this graph in the middle, and how
        self.failed = threading.Event()
        self.process = os.getpid()
        self.introduced = threading.Event()  # others hear of it if this rank ends from now on
        self._store = torch_api.own_connection()
        self._sentinel: subprocess.Popen[bytes] | None = None
        self._writing, self._at_store = threading.Lock(), threading.Lock()
        self._told = self._over = self._puzzled = False
        self._asking: threading.Thread | None = None  # the store what others wait for
        self._unanswered = 0  # looks since it began to
        self._at, self._looks, self._motion, self._posted = Place("", ()), 0, Motion(), False
        self._proposed, self._known_at = "", dict[int, int]()  # what is told if it stays so, and of which looks it is
        self._since, self._own = 0.0, ""  # when the failure was heard of, and what this rank was doing
        self._held: tuple[Any, ...] | None = None  # the mark of that place, if it cannot be made to fail
        self.record_file = ""  # where rank 0's machine has the last collectives of all after a failure
        self._rest = b""
        self._token = secrets.token_hex(16) if self.rank == 0 else ""
        self._bind = "127.0.0.1" if _is_local(self._store) else ""
        self._thread = threading.Thread(target=self._run, name="shardgraph watch", daemon=True)
        if _SIGNAL is not None and threading.current_thread() is threading.main_thread():
            with contextlib.suppress(ValueError):
                if signal.getsignal(_SIGNAL) in (signal.SIG_DFL, signal.SIG_IGN, None):
                    signal.signal(_SIGNAL, self._interrupted)
        self._start()
        self._thread.start()

    # -- what the rank tells --

    @property
    def is_on(self) -> bool:
        """Whether this is the process that it began in, with its process group."""
        return self.process == os.getpid() and not self._over

    def raise_failure(self) -> None:
        """Raise the failure of another rank, if there is one."""
        if self.failure is not None:
            raise self.error()

    def error(self, doing: str = "") -> RankFailedError:
        """The failure, which is raised now, while this rank is ``doing`` something."""
        if not self._told:
            self._told = True
            self._send({"told": True})
        cause = self.failure or "; ".join(self.left.values())
        own = doing if doing and (not self._own or self._own.startswith("computing")) else self._own
        where = (
            f". Rank {self.rank} was in {own}"
            if own and own not in cause and f"rank {self.rank} is in" not in cause
            else ""
        )
        see = f" (shardgraph flight {self.record_file})" if self.failure and place.calls else ""
        return RankFailedError(f"{cause}{where}{see}")

    def cause(self) -> bool:
        """Whether it is known, or becomes known within seconds, why communication fails: a rank failed, or has left."""
        for _ in range(int(_HEARING / _MOMENT)):
            if self.failed.wait(_MOMENT) or self.left:
                break
        if self.left and not self.failed.wait(_MOMENT):
            self.fail(f"the ranks do not end together: {'; '.join(self.left.values())}")
        return self.failed.is_set() or bool(self.left)

    def abandon(self, error: BaseException) -> None:
        """Say that this rank has left a graph in the middle, which others may then wait in for ever."""
        self._send({"abandoned": place.calls, "text": f"rank {self.rank} raised {place.described(error)}"})

    def fail(self, text: str) -> None:
        """Say that this rank fails, and how."""
        self._send({"failed": text, "told": True})

    def leave(self, text: str) -> None:
        """Say that this rank ends in order."""
        self._over = True
        if self.failure is not None:
            gc.freeze()  # collecting what a model leaves behind, at the end of the interpreter, may take seconds
        self._send({"left": text, "ending": True})
        if self._at_store.acquire(timeout=_HEARING if self.failure is None else _MOMENT):
            self._at_store.release()

    # -- the thread --

    def _asked(self, call: Callable[..., Any], *arguments: Any) -> Any:
        """What the store answers. A thread that is in there at the end of the interpreter would abort the process: so
        none is once this rank has left.

        Raises:
            OSError: this rank has left.
        """
        with self._at_store:
            if self._over:
                raise OSError("this rank has left")
            return call(*arguments)

    def _start(self) -> None:
        command = [sys.executable, "-S", "-E", str(Path(__file__).with_name("sentinel.py"))]
        with contextlib.suppress(OSError):  # no room for a process: then collectives have their timeout
            self._sentinel = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, close_fds=True)
        about: dict[str, Any] = {"rank": self.rank, "pid": os.getpid()}
        if self.rank == 0:
            name = f"shardgraph-flight-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.json"
            self.record_file = str(Path(tempfile.gettempdir(), name))
            about |= {"token": self._token, "bind": self._bind, "file": self.record_file}
        self._send(about)  # before anything else

    def _run(self) -> None:
        with contextlib.suppress(dist.DistError, OSError, ValueError):  # the store is gone, or the sentinel
            try:
                self._introduce()
            finally:
                self.introduced.set()
            while not self._over:
                self._hear(_LOOK)
                self._look_if_possible()
                if not dist.is_initialized() or dist.group.WORLD is not self.group:
                    self.leave(f"rank {self.rank} has destroyed its process group")

    def _introduce(self) -> None:
        """Connect the sentinels: that of rank 0 says where it is, in the store."""
        if self.rank == 0:
            while not (ports := [record["port"] for record in self._read(_LOOK) if "port" in record]):
                pass
            hosts = [self._bind] if self._bind else _addresses(self._store)
            where = {"hosts": hosts, "port": ports[0], "token": self._token, "file": self.record_file}
            self._asked(self._store.set, "shardgraph/watch", json.dumps(where))
            return
        while not self._asked(self._store.check, ["shardgraph/watch"]):
            time.sleep(0.1)
        hub = json.loads(self._asked(self._store.get, "shardgraph/watch"))
        self.record_file = hub["file"]
        self._send({"hub": hub})

    def _send(self, record: dict[str, Any]) -> None:
        if self._sentinel is None or self.process != os.getpid():  # of a process that was forked here
            return
        with self._writing, contextlib.suppress(OSError):
            assert self._sentinel.stdin is not None
            os.write(self._sentinel.stdin.fileno(), json.dumps(record).encode() + b"\n")

    def _read(self, seconds: float) -> list[dict[str, Any]]:
        """What the sentinel says within ``seconds``."""
        if self._sentinel is None:
            time.sleep(seconds)
            return []
        assert self._sentinel.stdout is not None
        if not select.select([self._sentinel.stdout], [], [], seconds)[0]:
            return []
        data = os.read(self._sentinel.stdout.fileno(), 65536)
        if not data:
            raise OSError("the sentinel has ended")
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines if line]

    def _hear(self, seconds: float) -> None:
        for record in self._read(seconds):
            kind = record.get("event")
            if "lost" in record:
                print(f"shardgraph: rank {self.rank} is not watched: {record['lost']}", file=sys.stderr, flush=True)
            if kind == "left":
                self.left[record["rank"]] = record["text"]
            elif kind == "abandoned":
                self.abandoned[record["rank"]] = record["call"], record["text"]
            elif kind is not None:
                self._fail(record)

    def _fail(self, record: dict[str, Any]) -> None:
        """Note the failure, the first alone, and end what this rank waits for."""
        if self.failure is not None:
            return
        where = f", while it was in {record['at']}" if record["event"] in ("died", "stopped") and record["at"] else ""
        now = place.here()
        self._own, self._held = now.text, now.mark if now.group and not torch_api.can_break(now.group) else None
        self._send({"flight": flight.records(), "text": record["text"]})
        self.failure = f"{record['text']}{where}"
        self._since = time.monotonic()
        self.failed.set()
        torch_api.break_connections()

    def _look_if_possible(self) -> None:
        """Look, and go on watching if a look cannot tell what it sees, which is said once."""
        try:
            self._look()
        except (dist.DistError, OSError, ValueError):
            raise
        except Exception as error:
            if not self._puzzled:
                text = f"shardgraph: rank {self.rank} is watched with gaps: {place.described(error)}"
                print(text, file=sys.stderr, flush=True)
            self._puzzled = True

    def _look(self) -> None:
        now = place.here()
        if self.failure is not None:
            self._interrupt(now)
            return
        if now.text != self._at.text:
            self._send({"at": now.text})
        self._looks = self._looks + 1 if now.mark == self._at.mark else 0
        self._at = now
        if self._looks and (now.group or now.absent):
            self._motion.look(now)
        waits = self._looks >= _SETTLED and bool(now.group or now.absent)
        if self._asking is not None and self._asking.is_alive():
            self._unanswered += 1
            if waits and self._unanswered == _UNANSWERED:
                self._lost(now, f"it gives no answer for {_UNANSWERED * _LOOK:g} s")
        elif waits or self._posted:
            self._unanswered = 0
            self._asking = threading.Thread(target=self._ask, args=(now, waits), name="shardgraph store", daemon=True)
            self._asking.start()

    def _ask(self, now: Place, waits: bool) -> None:
        """Compare what this rank waits for with others, on a thread that the store may keep waiting."""
        try:
            if waits:
                self._waits(now)
            else:
                self._asked(self._store.set, self._key(self.rank), "")
                self._posted = False
        except dist.DistError as error:
            if waits:
                self._lost(now, str(error))
        except OSError:  # this rank has left
            return

    def _lost(self, now: Place, how: str) -> None:
        """Say that this rank, which waits, has lost the store: it fails, unless the one that serves it has."""
        if not self.failed.wait(_MOMENT):
            self._send({"failed": unreachable(self.rank, now.text, how)})

    def _waits(self, now: Place) -> None:
        """Post what this rank waits for, and find out whether it waits in vain: at two looks of all who wait."""
        members = torch_api.members(now.group)
        group = "" if now.message or now.group in place.with_messages else now.group
        beside = now.group if now.group in place.in_steps and now.run is None else ""
        counts, absent = place.counts(), () if now.answer else now.absent
        still, computes = self._motion.still, now.beside == "save"
        told = now.text, now.operation, group, members, absent, now.run, now.message, counts
        status = Status(*told, beside, still, computes)
        self._asked(self._store.set, self._key(self.rank), json.dumps({**vars(status), "looks": self._looks}))
        self._posted = True
        if self._looks % max(1, self.size // 16):
            return
        waiting, looks = self._waiting(status)
        found = self._ended(now, members) or verdict(waiting) or ""
        if found != self._proposed:
            self._proposed, self._known_at = found, looks
        elif found and all(looks[rank] != before for rank, before in self._known_at.items() if rank in looks):
            self._send({"failed": found})

    def _ended(self, now: Place, members: tuple[int, ...]) -> str | None:
        for rank in now.absent or members:
            if rank in self.left:
                return f"the ranks do not end together: {self.left[rank]}, and rank {self.rank} waits in {now.text}"
            call, how = self.abandoned.get(rank, (None, ""))
            if call is not None and call == now.run:
                return f"the ranks do not go on together: {how}, and rank {self.rank} waits for it in {now.text}"
        return None

    def _waiting(self, own: Status) -> tuple[dict[int, Status], dict[int, int]]:
        """What all who wait have posted, and at which of their looks: a rank that posts no more may have gone on."""
        ranks = [rank for rank in range(self.size) if rank != self.rank]
        waiting, looks = {self.rank: own}, {self.rank: self._looks}
        present = [rank for rank in ranks if self._asked(self._store.check, [self._key(rank)])]
        for rank in present:
            if post := self._asked(self._store.get, self._key(rank)):
                record: dict[str, Any] = json.loads(post)
                looks[rank] = record.pop("looks")
                waiting[rank] = Status(**record)
        return waiting, looks

    def _key(self, rank: int) -> str:
        return f"shardgraph/watch/{rank}"

    # -- the main thread --

    def _interrupt(self, now: Place) -> None:
        """Raise the failure in a main thread that has not met it, as it will not where it is held."""
        waited = time.monotonic() - self._since
        if self._told or self._over:
            return
        if now.mark == self._held:
            self._send({"held": True})
            return
        if waited <= _INTERRUPT:
            return
        if now.absent:  # inside of the store, no signal is heard
            torch_api.break_store()
        if _SIGNAL is not None:
            main = threading.main_thread()
            if main.ident is not None and signal.getsignal(_SIGNAL) == self._interrupted:
                signal.pthread_kill(main.ident, _SIGNAL)

    def _interrupted(self, *_: Any) -> None:
        if self.failure is not None and not self._told:
            raise self.error()


def _is_local(store: Any) -> bool:
    """Whether all ranks are on this machine."""
    if os.environ.get("LOCAL_WORLD_SIZE") == str(dist.get_world_size()):
        return True
    host = getattr(torch_api.innermost_store(store), "host", os.environ.get("MASTER_ADDR", ""))
    return host == "localhost" or host.startswith("127.") or host == "::1"


def _addresses(store: Any) -> list[str]:
    """How other machines may reach this one: the address that it reaches the store from, and those of its name."""
    found = [os.environ.get("MASTER_ADDR", ""), socket.gethostname()]
    with contextlib.suppress(OSError), socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((getattr(torch_api.innermost_store(store), "host", found[0]), 9))
        found.insert(0, probe.getsockname()[0])
    return [*dict.fromkeys(host for host in found if host)]
