"""What one rank makes for all that need the same, sent through the process group's store.

Ranks need not ask for the same things, and none waits for a rank that does not: the first to ask for something makes
it, and who asks later takes it.
"""

from __future__ import annotations

import contextlib
from collections import Counter, deque
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from shardgraph.runtime.store_waits import read_once_more, wait_for

_MOST_BYTES = 4 << 20  # of a message; a store takes 8 MiB
_MOST_RANKS = 512  # one store serves them in the time that a capture takes
_POSTED = 16  # things that a rank has made and others may still take


class FirstMade:
    """Things by key, each made by the one of ``ranks`` ranks that is the first to ask for it.

    Each rank makes its own without a ``store``, among more ranks than one store serves, and once a thing could not be
    sent.
    """

    def __init__(self, store: Any = None, rank: int = 0, ranks: int = 1, timeout: float = 0.0) -> None:
        self._store: Any = store if ranks <= _MOST_RANKS else None
        self._rank, self._ranks, self._timeout = rank, ranks, timeout
        self._asked = Counter[str]()  # times that this rank has asked for a key: the next time it is another thing
        self._posted = deque[str]()  # the latest last

    @property
    def alone(self) -> bool:
        """Whether this rank makes its own."""
        return self._store is None

    def get(self, topic: str, key: str, make: Callable[[], bytes]) -> bytes:
        """``make()`` of the rank that was the first to ask for this key, called ``topic`` in messages. It must not wait
        for another rank. Nothing if it raised an error, or has made none within the timeout.

        Raises:
            RankFailedError: that rank, or another one, has failed.
        """
        if self._store is None:
            return make()
        self._asked[key] += 1
        name = f"made/{key}/{self._asked[key]}"
        data = b""
        try:
            first = int(self._store.compare_set(f"{name}/by", "", str(self._rank)))
        except dist.DistError:  # the store is gone: the next agreement tells why
            first = self._rank
        if first == self._rank:
            try:
                data = make()
            finally:
                self._post(name, data)
                self._alone_without(data)
            return data
        with contextlib.suppress(dist.DistError):  # it took too long
            wait_for(self._store, name, self._timeout, topic, [first])
            data = self._taken(name)
        self._alone_without(data)
        return data

    def _alone_without(self, data: bytes) -> None:
        """Nobody waits in vain another time: what comes next could not be sent either, as a rule."""
        if not data:
            self._store = None

    def _post(self, name: str, data: bytes) -> None:
        """Post what was made. What no rank takes is forgotten after some others, so that a store does not grow."""
        with contextlib.suppress(dist.DistError):
            self._store.set(name, data if len(data) <= _MOST_BYTES else b"")
            self._posted.append(name)
            if len(self._posted) > _POSTED and self._store.check([old := self._posted.popleft()]):
                self._store.set(old, b"")

    def _taken(self, name: str) -> bytes:
        """What was posted, which the last rank that takes it deletes."""
        data: bytes = self._store.get(name)
        read_once_more(self._store, self._ranks - 1, name, f"{name}/by")
        return data
