"""Waits for keys of a store that others set, in which the one who waits has a look at other things now and then."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch.distributed as dist

from shardgraph.runtime import watch

ASKING = 3  # looks after which ranks that have not come are asked whether they are there
_LOOK = 0.5  # seconds between two looks of a rank that waits at whether the others come
_PAUSES = 0.001, 0.1  # the shortest and the longest seconds between two looks for a key


def looks(store: dist.Store, keys: Sequence[str], timeout: float) -> Iterator[int]:
    """Wait for keys; give the turn, by number, to the caller now and then. Torch warns of its own waits that end so.

    Raises:
        DistStoreError: one is not there after ``timeout`` seconds.
    """
    start = time.monotonic()
    pause, longest = _PAUSES
    look, number = start + min(_LOOK, timeout), 0
    while not store.check(list(keys)):
        now = time.monotonic()
        if now >= look:
            yield (number := number + 1)
            if now >= start + timeout:
                raise dist.DistStoreError("not there in time")
            look = min(now + _LOOK, start + timeout)
        time.sleep(pause)
        pause = min(1.2 * pause, longest)


def read_once_more(store: dist.Store, readers: int, *keys: str) -> None:
    """Count this rank among so many ``readers`` of keys, the last of which deletes them."""
    count = f"{keys[0]}/read"
    if store.add(count, 1) == readers:
        for key in (*keys, count):
            store.delete_key(key)


def wait_for(store: dist.Store, key: str, timeout: float, topic: str, by: Sequence[int]) -> None:
    """Wait up to ``timeout`` seconds for a key that ranks ``by`` will set; look now and then whether one has failed.

    Raises:
        DistStoreError: it is not there in time.
        RankFailedError: a rank has failed.
    """
    with watch.agreeing(topic) as waiting:
        waiting.absent = by
        for look in looks(store, [key], timeout):
            watch.look_after(by, topic, ask=look % ASKING == 0)
