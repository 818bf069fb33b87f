"""Texts between ranks, over connections of their own to the store where the process group met.

Not collectives: for any backend, beside the training's own communication on another thread, also after the process
group has ended; and a rank that fails can still say so. Texts are JSON or names: nothing is unpickled.
"""

from __future__ import annotations

import itertools
import json
import zlib
from collections.abc import Callable, Mapping
from typing import Any

import torch.distributed as dist

from shardgraph.errors import RankMismatchError, ShardGraphError
from shardgraph.runtime import watch
from shardgraph.runtime.store_waits import looks
from shardgraph.runtime.watch.wording import named, unreachable
from shardgraph.torch_api import own_connection

_FAILED = b"!"
_MARGIN = 5.0  # seconds that ranks allow the first one beyond the timeout, to say which rank is missing
_connected: tuple[Any, dist.Store] | None = None  # and the group that it is of
_numbers = itertools.count()  # all ranks make them in the same order


class Ranks:
    """The ranks that do something together. Each waits for the others ``timeout`` seconds at a time, and raises an
    ``error`` of this class if one does not come.

    All ranks make one and call its methods in the same order. Alone, without a process group, nothing is sent.
    """

    def __init__(self, timeout: float, error: type[ShardGraphError] = RankMismatchError) -> None:
        self.rank, self.count, self._timeout, self._error = 0, 1, timeout, error
        self._round = 0
        self._store: Any = None
        if not dist.is_initialized() or dist.get_world_size() == 1 or dist.get_backend() == "fake":
            return
        self.rank, self.count = dist.get_rank(), dist.get_world_size()
        prefix = f"shardgraph/exchange/{next(_numbers)}"
        watch.begin()
        watch.introduced("saving or loading")
        self._store = self._reached("the store", lambda: dist.PrefixStore(prefix, _connection()))

    @property
    def is_first(self) -> bool:
        """Whether this rank writes what ranks have in common."""
        return self.rank == 0

    def to_first(self, topic: str, value: Any) -> list[Any]:
        """What all ranks give, in JSON's types, on the first rank; empty on the others. Then comes :meth:`from_first`.

        Raises:
            ShardGraphError: a rank did not give anything in time; the others hear it in :meth:`from_first`.
        """
        self._round += 1
        if self.count == 1:
            return [value]
        if self.rank:
            self._reached(
                topic, lambda: self._store.compare_set(f"{self._round}/{self.rank}", "", _packed([topic, value]))
            )
            return []
        keys = [f"{self._round}/{rank}" for rank in range(1, self.count)]
        try:
            self._await(topic, dict(enumerate(keys, start=1)), self._timeout)
        except dist.DistError:
            absent = [rank for rank, key in enumerate(keys, start=1) if not self._reached(topic, self._has(key))]
            message = (
                f"{named(absent)} did not come to {topic} "
                f"within {self._timeout:g} s: it has ended, makes another call, or is busy: look at its output, or "
                "allow more time with timeout="
            )
            self._reached(topic, lambda: self._store.set(f"{self._round}/first", _FAILED + message.encode()))
            raise self._error(message) from None
        posts = [_unpacked(post) for post in self._reached(topic, lambda: self._store.multi_get(keys))]
        if differing := [(rank, other) for rank, (other, _) in enumerate(posts, start=1) if other != topic]:
            rank, other = differing[0]
            message = (
                f"the ranks are not at the same point: rank 0 at {topic}; rank {rank} at {other}. All ranks must "
                "make the same calls in the same order"
            )
            self._reached(topic, lambda: self._store.set(f"{self._round}/first", _FAILED + message.encode()))
            raise self._error(message)
        given = [value, *(each for _, each in posts)]
        read = [*keys, *([f"{self._round - 1}/first"] if self._round > 1 else [])]  # that one by all ranks
        self._reached(topic, lambda: [self._store.delete_key(key) for key in read])
        return given

    def from_first(self, topic: str, value: Any = None) -> Any:
        """What the first rank gives, on all ranks; called after :meth:`to_first`.

        Raises:
            ShardGraphError: it gave nothing in time, or has told what is wrong.
        """
        if self.count == 1:
            return value
        key = f"{self._round}/first"
        if self.is_first:
            self._reached(topic, lambda: self._store.compare_set(key, "", b"=" + _packed(value)))
            return value
        try:
            self._await(topic, {0: key}, self._timeout + _MARGIN)
        except dist.DistError as error:
            raise self._error(
                f"rank 0 did not get as far as rank {self.rank} at {topic} within {self._timeout:g} s: it has ended or "
                "is busy: look at its output, or allow more time with timeout="
            ) from error
        post = self._reached(topic, lambda: self._store.get(key))
        if post.startswith(_FAILED):
            raise self._error(post[1:].decode())
        return _unpacked(post[1:])

    def gather(self, topic: str, value: Any) -> list[Any]:
        """What all ranks give, on all ranks.

        Raises:
            ShardGraphError: a rank did not come in time.
        """
        given = self.to_first(topic, value)
        result: list[Any] = self.from_first(topic, given)
        return result

    def _await(self, topic: str, keys: Mapping[int, str], timeout: float) -> None:
        """Wait for the keys of some ranks, and look now and then who has not come, and whether one has failed.

        Raises:
            DistError: one does not come in time, or the store is gone.
            RankFailedError: a rank has failed.
        """
        with watch.agreeing(topic) as waiting:
            waiting.absent = list(keys)
            for _ in looks(self._store, list(keys.values()), timeout):
                waiting.absent = [rank for rank in waiting.absent if not self._store.check([keys[rank]])]
                watch.look_after(waiting.absent, topic, ask=False)

    def _has(self, key: str) -> Callable[[], bool]:
        return lambda: self._store.check([key])

    def _reached(self, topic: str, call: Callable[[], Any]) -> Any:
        try:
            with watch.agreeing(topic) as waiting:  # an answer of the store, by the process that serves it
                waiting.absent, waiting.answer = [0] if self.rank else [], True
                return call()
        except dist.DistError as error:
            raise self._error(unreachable(self.rank, topic, str(error))) from error


def _connection() -> dist.Store:
    """The connection of all exchanges of the default group, of which none waits inside of the store: one for each save
    of a long job would be more than the store can have."""
    global _connected
    if _connected is None or _connected[0] is not dist.group.WORLD:
        _connected = dist.group.WORLD, own_connection()
    return _connected[1]


def _packed(value: Any) -> bytes:
    return zlib.compress(json.dumps(value).encode(), 1)


def _unpacked(post: bytes) -> Any:
    return json.loads(zlib.decompress(post))
