"""What is made once: kept on disk for the next start, and sent to other ranks that would make the same at this one.

A rank that cannot read what it is given makes its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch

from shardgraph.cache import entries
from shardgraph.cache.digests import NoDigest
from shardgraph.cache.values import NotStorable
from shardgraph.torch_api import NotStored

log = logging.getLogger(__name__)
T = TypeVar("T")
CANNOT = (NoDigest, NotStorable, NotStored, RecursionError)
"""What is raised where something cannot be kept, or can no longer be read."""


class Ranks(Protocol):
    """Ranks that send each other what one of them has made; see :class:`shardgraph.runtime.first_made.FirstMade`."""

    @property
    def alone(self) -> bool:
        """Whether each rank makes its own."""

    def get(self, topic: str, key: str, make: Callable[[], bytes]) -> bytes:
        """``make()`` of the rank that was the first to ask for this key; nothing if it has made none in time."""


def shared(ranks: Ranks | None) -> bool:
    """Whether anyone else would read an entry: a later start, or another rank."""
    return entries.directory() is not None or not (ranks is None or ranks.alone)


def made_once(
    topic: str,
    name: str,
    make: Callable[[], T],
    entry: Callable[[T], tuple[Mapping[str, Any], list[torch.Tensor]]],
    read: Callable[[entries.Parts, list[torch.Tensor]], T | None],
    ranks: Ranks | None,
) -> T:
    """``make()``; or what ``read`` makes of the entry called ``name``, if one is on disk or another rank has made it.

    ``topic`` is what it is called in messages; ``entry`` are the parts and tensors of what was made.
    """
    path = entries.path_of(name)
    if path is not None and (found := _read(topic, entries.read(path), read)) is not None:
        return found
    made: list[T] = []

    def send() -> bytes:
        made.append(make())
        return _encoded(topic, path, lambda: entry(made[0]))

    sent = send() if ranks is None else ranks.get(topic, name, send)
    if not made and sent and (found := _read(topic, sent, read)) is not None:
        if path is not None and not path.exists():  # the other rank is on another host
            _write(topic, path, sent)
        return found
    if not made:
        send()
    return made[0]


def _read(topic: str, data: bytes | None, read: Callable[[entries.Parts, list[torch.Tensor]], T | None]) -> T | None:
    """What an entry is, None if there is none that holds."""
    try:
        return None if data is None else read(*entries.decoded(data))
    except CANNOT as error:
        log.warning("%s is made again: %s", topic, error)
        return None


def _encoded(topic: str, path: Path | None, entry: Callable[[], tuple[Mapping[str, Any], list[torch.Tensor]]]) -> bytes:
    """The entry of what was made, which is on disk from now on; nothing where it cannot be described."""
    try:
        data = entries.encoded(*entry())
    except CANNOT as error:
        log.info("%s is not kept: %s", topic, error)
        return b""
    except Exception as error:  # a model that no one thought of: it was captured all the same
        log.warning("%s is not kept: %s: %s", topic, type(error).__name__, error)
        return b""
    if path is not None:
        _write(topic, path, data)
    return data


def _write(topic: str, path: Path, data: bytes) -> None:
    try:
        entries.write(path, data)
    except OSError as error:
        log.warning("%s cannot be kept in %s: %s", topic, path.parent, error.strerror)
