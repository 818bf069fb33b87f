"""The process that watches one rank from outside: ``python -S -E sentinel.py``, of the standard library alone.

A rank can hold Python's lock for minutes, be stopped or be gone, and then says nothing by itself. Its sentinel sees by
the system whether it lives, never by whether it answers: a rank that computes is alive. The sentinels of a run are
connected to that of rank 0, which passes on what each reports. All talk in lines of JSON: with the rank over standard
input and output, with each other over TCP.

From the rank: its place in the run (first line), ``at`` (what it does), ``failed`` or ``left`` (how it ends),
``abandoned`` (a graph that it has left in the middle), ``told`` (the failure of another was raised in it), ``held`` (it
could not be, so far) and ``ending`` (its program is over). To the rank: ``port``, ``event`` and ``lost`` (there is no
connection any more).
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import selectors
import signal
import socket
import sys
import time
from typing import Any

TICK = 0.5  # seconds between two looks at the rank
STOPPED = 3.0  # seconds for which a rank is stopped until it is said to be
SILENCE = 10.0  # seconds without a word from another sentinel until its machine is said to be lost
CONNECTING = 5.0  # seconds to connect to the sentinel of rank 0
TELLING = 10.0  # seconds until a rank that was not told of a failure is ended
OWN = 5.0  # the same, of its own failure
HELD = 2.0  # the same, in a collective of the user's whose connections are not known
ENDING = 8.0  # seconds for a program that is over to leave


class Peer:
    """A connection over which lines come and go."""

    def __init__(self, connection: socket.socket, rank: int | None = None) -> None:
        connection.setblocking(True)
        connection.settimeout(CONNECTING)
        self.socket, self.rank, self.heard, self._rest = connection, rank, time.monotonic(), b""

    def send(self, record: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # reading will tell
            self.socket.sendall(json.dumps(record).encode() + b"\n")

    def receive(self) -> list[dict[str, Any]] | None:
        """What has come; None at the end of the connection."""
        try:
            data = self.socket.recv(65536)
        except OSError:
            data = b""
        if not data:
            return None
        self.heard = time.monotonic()
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines if line]


class Sentinel:
    """What is known of a rank, and of the others by their sentinels."""

    def __init__(self, place: dict[str, Any]) -> None:
        self.rank, self.parent, self.token = place["rank"], place["pid"], place.get("token", "")
        self.selector = selectors.DefaultSelector()
        self.peers: dict[socket.socket, Peer] = {}  # of rank 0: all others; of another: that of rank 0
        self.final: dict[int, str] = {}  # ranks that have ended, and how
        self.at = ""
        self.said: dict[str, Any] | None = None  # how this rank has ended
        self.alive, self.stopped_since, self.said_stopped = True, 0.0, False
        self.deadline, self.why, self.told = 0.0, "", False
        self._rest = b""
        self.file, self.flights = place.get("file", ""), dict[int, Any]()
        self.selector.register(0, selectors.EVENT_READ, "rank")
        if hasattr(os, "pidfd_open"):
            with contextlib.suppress(OSError):
                self.selector.register(os.pidfd_open(self.parent), selectors.EVENT_READ, "death")
        if self.rank == 0:
            self.listener = socket.create_server((place["bind"], 0))
            self.selector.register(self.listener, selectors.EVENT_READ, "new")
            self.say({"port": self.listener.getsockname()[1]})

    def run(self) -> None:
        last = beat = time.monotonic()
        while self.alive or (self.rank == 0 and self.peers):
            for key, _ in self.selector.select(TICK):
                self.react(key)
            now = time.monotonic()
            if now - last > 6 * TICK:  # this process was stopped itself, or the machine slept
                for peer in self.peers.values():
                    peer.heard = now
                self.stopped_since = 0.0
            last = now
            if now - beat > 1.0:
                beat = now
                for peer in list(self.peers.values()):
                    peer.send({})
                    if now - peer.heard > SILENCE:
                        self.lost(peer, f"no longer answers: nothing was heard of its machine for {SILENCE:g} s")
            if self.alive:
                self.look(now)

    def react(self, key: selectors.SelectorKey) -> None:
        if key.data == "rank":
            self.read_rank()
        elif key.data == "death":
            self.read_rank()
            self.died()
        elif key.data == "new":
            connection, _ = self.listener.accept()
            self.add(Peer(connection))
        else:
            self.read_peer(key.data)

    def look(self, now: float) -> None:
        """Whether the rank still lives, is stopped, or has had its time."""
        if os.getppid() != self.parent:
            self.read_rank()
            self.died()
            return
        if state(self.parent) != "T":
            self.stopped_since, self.said_stopped = 0.0, False
        elif not self.stopped_since:
            self.stopped_since = now
        elif now - self.stopped_since > STOPPED and not self.said_stopped:
            self.said_stopped = True
            self.report("stopped", f"rank {self.rank} was stopped (SIGSTOP) and no longer answers")
        if self.deadline and now > self.deadline:
            self.deadline = 0.0
            over = "its program was over and did not end" if self.told else "it could not be told in time"
            print(f"shardgraph: rank {self.rank} was ended, since {self.why} ({over})", file=sys.stderr, flush=True)
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.parent, signal.SIGKILL)

    def died(self) -> None:
        if not self.alive:
            return
        self.look_away()
        code = exit_status(self.parent)
        if code == 0:
            self.report("left", f"rank {self.rank} has ended, without an error")
        elif code is not None and os.WIFSIGNALED(code):
            name = signal.Signals(os.WTERMSIG(code)).name
            self.report("died", f"rank {self.rank} was killed by {name}" + " (or memory ran out)" * (name == "SIGKILL"))
        elif code is not None:
            self.report("died", f"rank {self.rank} has ended with exit code {os.WEXITSTATUS(code)}")
        else:
            how = "it was killed, memory ran out, or it called os._exit"
            self.report("died", f"rank {self.rank} has ended without notice: {how}")

    def look_away(self) -> None:
        """Watch the rank no longer, which has ended or needs no others; that of rank 0 still passes on what is told."""
        self.alive = False
        for key in list(self.selector.get_map().values()):
            if key.data in ("rank", "death"):
                self.selector.unregister(key.fileobj)

    def read_rank(self) -> None:
        """Take what the rank has written; at its end nothing more comes."""
        os.set_blocking(0, False)
        with contextlib.suppress(BlockingIOError):
            while data := os.read(0, 65536):
                *lines, self._rest = (self._rest + data).split(b"\n")
                for line in lines:
                    self.obey(json.loads(line))
            with contextlib.suppress(KeyError):
                self.selector.unregister(0)

    def obey(self, record: dict[str, Any]) -> None:
        if "hub" in record:
            self.connect(record["hub"])
        if "at" in record:
            self.at = record["at"]
        for kind in ("failed", "left"):
            if kind in record:
                self.report(kind, record[kind])
        if "left" in record and not self.why:
            self.look_away()
        if "abandoned" in record:
            self.broadcast(
                {"event": "abandoned", "rank": self.rank, "text": record["text"], "call": record["abandoned"]}
            )
        if "flight" in record:
            self.keep(self.rank, record)
        if "told" in record:
            self.told, self.deadline = True, 0.0
        if "held" in record and self.deadline:
            self.deadline = min(self.deadline, time.monotonic() + HELD)
        if "ending" in record and self.why:
            self.told, self.deadline = True, time.monotonic() + ENDING

    def keep(self, rank: int, record: dict[str, Any]) -> None:
        """Write the last collectives of a rank beside those of others, in one file on the machine of rank 0."""
        if self.rank != 0:
            for peer in self.peers.values():
                peer.send({"flight": record["flight"], "text": record["text"], "rank": rank})
            return
        self.flights[rank] = record["flight"]
        with contextlib.suppress(OSError):
            with open(f"{self.file}.part", "w") as file:
                json.dump({"failure": record["text"], "ranks": self.flights}, file)
            os.replace(f"{self.file}.part", self.file)

    def connect(self, hub: dict[str, Any]) -> None:
        for host in hub["hosts"]:
            with contextlib.suppress(OSError):
                peer = Peer(socket.create_connection((host, hub["port"]), timeout=CONNECTING), 0)
                peer.send({"token": hub["token"], "rank": self.rank})
                self.add(peer)
                if self.said is not None:
                    peer.send(self.said)
                return
        self.say({"lost": f"the process that watches rank 0 cannot be reached at {', '.join(hub['hosts'])}"})

    def add(self, peer: Peer) -> None:
        self.peers[peer.socket] = peer
        self.selector.register(peer.socket, selectors.EVENT_READ, peer)

    def remove(self, peer: Peer) -> None:
        self.selector.unregister(peer.socket)
        self.peers.pop(peer.socket, None)
        peer.socket.close()

    def read_peer(self, peer: Peer) -> None:
        records = peer.receive()
        if records is None:
            self.lost(peer, "has ended with the process that watched it, or the connection to it was cut")
            return
        for record in records:
            if peer.rank is None:
                if not hmac.compare_digest(str(record.get("token")), self.token):
                    self.remove(peer)
                    return
                peer.rank = record["rank"]
            elif "event" in record:
                self.hear(record, peer)
            elif "flight" in record:
                self.keep(peer.rank, record)

    def lost(self, peer: Peer, how: str) -> None:
        self.remove(peer)
        if peer.rank is not None and peer.rank not in self.final:
            self.hear({"event": "died", "rank": peer.rank, "text": f"rank {peer.rank} {how}", "at": ""}, peer)

    def report(self, kind: str, text: str) -> None:
        """Tell all that this sentinel's rank has ended or will."""
        if self.rank not in self.final or kind == "stopped":
            if kind != "left":
                self.why = self.why or text
            self.final[self.rank] = text
            if kind in ("stopped", "failed"):
                self.deadline = self.deadline or time.monotonic() + (
                    STOPPED if not self.peers else OWN if kind == "failed" else TELLING
                )
            self.said = record = {"event": kind, "rank": self.rank, "text": text, "at": self.at}
            self.broadcast(record)
            self.say(record)

    def hear(self, record: dict[str, Any], source: Peer) -> None:
        """Pass on what another sentinel reports, to the other sentinels and to the rank."""
        if record["event"] != "abandoned":
            if record["rank"] in self.final:
                return
            self.final[record["rank"]] = record["text"]
        self.broadcast(record, source)
        self.say(record)
        if record["event"] in ("died", "stopped", "failed") and self.alive and self.rank not in self.final:
            self.why = self.why or record["text"]
            if not self.told:
                self.deadline = self.deadline or time.monotonic() + TELLING

    def broadcast(self, record: dict[str, Any], but: Peer | None = None) -> None:
        for peer in list(self.peers.values()):
            if peer is not but and peer.rank is not None:
                peer.send(record)

    def say(self, record: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):
            os.write(1, json.dumps(record).encode() + b"\n")


def state(pid: int) -> str:
    """The state of a process as the system has it: "T" for one that is stopped; "" where that is not told."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            return file.read().rpartition(b")")[2].split()[0].decode()
    except (OSError, IndexError):
        return ""


def exit_status(pid: int) -> int | None:
    """The wait status of a process that has just ended, if its parent has not asked for it yet."""
    with contextlib.suppress(OSError, IndexError, ValueError), open(f"/proc/{pid}/stat", "rb") as file:
        fields = file.read().rpartition(b")")[2].split()
        if fields[0] == b"Z":
            return int(fields[49])
    return None


def main() -> None:
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # it ends with its rank
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            return
        line += byte
    Sentinel(json.loads(line)).run()


if __name__ == "__main__":
    main()
