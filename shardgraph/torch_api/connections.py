"""The connections of gloo's groups, which nothing in gloo ends: what waits for one waits until its timeout."""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

_PROBE = (1 << 20) + 1  # a tag of messages that nobody takes
_CONNECTING = 5.0  # seconds, and some more that torch takes, until a store is not reached
_probes: list[object] = []
_connections = dict[tuple[int, int], str]()  # those to other ranks, and the backend whose groups they are of


@contextlib.contextmanager
def recorded_connections(backend: str) -> Iterator[None]:
    """Note the connections that are made inside, by one thread at a time: those of a process group of a ``backend``."""
    before = _sockets()
    try:
        yield
    finally:
        _connections.update(dict.fromkeys(_sockets() - before, backend))


def break_connections() -> None:
    """Let whatever waits for a collective fail, now and from now on, on this rank.

    Gloo's connections are shut down, as if the other ranks had closed them, and NCCL's groups are aborted.
    """
    for descriptor, _ in _connections.keys() & _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if not connection.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN):  # gloo dies if it cannot listen
                connection.shutdown(socket.SHUT_RDWR)
    _connections.clear()
    for group in list(dist.distributed_c10d._world.pg_map):
        if dist.get_backend(group) == "nccl":
            with contextlib.suppress(RuntimeError):
                group.abort()


def break_store() -> None:
    """Let whatever waits for an answer of the default group's store fail, now and from now on, on this rank."""
    port = store_port()
    for descriptor, _ in _sockets():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as connection:
            if connection.getpeername()[1:2] == (port,):
                connection.shutdown(socket.SHUT_RDWR)


def can_break(group_name: str) -> bool:
    """Whether collectives of a group fail by :func:`break_connections`: not if the user has made it, over gloo."""
    group = _group(group_name)
    backend = "" if group is None else dist.get_backend(group)
    return backend != "gloo" or (group is dist.group.WORLD and backend in _connections.values())


def has_hung_up(rank: int) -> bool:
    """Whether the default group's connection to ``rank`` over gloo is closed, as it is to a process that has ended.

    A message to a rank that lives is not awaited, and that rank need not take it.
    """
    if dist.get_backend() != "gloo":
        return False
    try:
        _probes.append(dist.isend(torch.zeros(1, device="cpu"), rank, tag=_PROBE))
    except RuntimeError:
        return True
    return False


def connections_of(group_name: str) -> list[int] | None:
    """The sockets of gloo's connections in this process, for all groups like this one.

    None over another backend, or where there is an accelerator, since gloo waits for what that computes. For a group
    that the user has made, they are all sockets of the process.
    """
    group = _group(group_name)
    if group is None or torch.accelerator.is_available():
        return None
    if any(group._get_backend(device).name() != "gloo" for device in group._device_types):
        return None
    backend, sockets = dist.get_backend(group), _sockets()
    if backend != "gloo":
        sockets &= {each for each, made_by in _connections.items() if made_by == backend}
    return [descriptor for descriptor, _ in sockets]


def store_port() -> int:
    """The port that the default group's store is served at; 0 if it has none."""
    return int(getattr(innermost_store(dist.distributed_c10d._get_default_store()), "port", 0))


def members(group_name: str) -> tuple[int, ...]:
    """The global ranks of a process group; none if there is no such group."""
    group = _group(group_name)
    return () if group is None else tuple(dist.get_process_group_ranks(group))


def operation_counts(without: set[str]) -> dict[str, int]:
    """How many operations of each group this rank has started, by the group's name, as far as groups count them."""
    counts = {}
    for group in _groups():
        with contextlib.suppress(RuntimeError, AttributeError):
            device = torch.device("cuda" if dist.get_backend(group) == "nccl" else "cpu")
            backend: Any = group._get_backend(device)
            probes = len(_probes) if group is dist.group.WORLD else 0
            counts[_name(group)] = int(backend._get_sequence_number_for_group()) - probes
    return {name: count for name, count in counts.items() if name not in without}


def own_connection() -> dist.Store:
    """Another connection to the default group's store, for waits that may be long: a store serves one at a time.

    Raises:
        DistNetworkError: it could not be made for some seconds; the store's own timeout, which may be minutes, is for
            what is waited for.
    """
    store: Any = dist.distributed_c10d._get_default_store()  # whose timeout and clone() the stubs lack
    innermost, whole = innermost_store(store), store.timeout
    innermost.set_timeout(min(whole, timedelta(seconds=_CONNECTING)))
    try:
        made: dist.Store = store.clone()
    finally:
        innermost.set_timeout(whole)
    made.set_timeout(whole)
    return made


def innermost_store(store: dist.Store) -> dist.Store:
    """The store below its prefixes."""
    while isinstance(store, dist.PrefixStore):
        store = store.underlying_store
    return store


def _groups() -> list[dist.ProcessGroup]:
    return list(dist.distributed_c10d._world.pg_map)


def _group(name: str) -> dist.ProcessGroup | None:
    return next((each for each in _groups() if _name(each) == name), None)


def _name(group: dist.ProcessGroup) -> str:
    return str(group.group_name)


def _sockets() -> set[tuple[int, int]]:
    """The sockets of this process, by number and inode, so that a number that is used again is another."""
    found = set()
    for name in os.listdir("/dev/fd") if os.path.isdir("/dev/fd") else ():
        with contextlib.suppress(OSError, ValueError):
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found.add((int(name), status.st_ino))
    return found
