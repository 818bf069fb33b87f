"""How ranks end after a checkpoint, for their job to be started again on another number of ranks.

The process that has started them writes the number into their store, and they look there when a checkpoint is whole.
"""

from __future__ import annotations

from collections.abc import Callable

import torch.distributed as dist

from shardgraph.runtime.exchange import Ranks
from shardgraph.torch_api import default_store, innermost_store

_KEY = "shardgraph/launch/other ranks"


class StartAgain(BaseException):
    """What ends a rank whose job is to be started again."""


def tell(store: dist.TCPStore, running: int, wanted: Callable[[], int]) -> None:
    """Tell the ``running`` ranks of ``store`` whether they are as many as ``wanted()``."""
    count = wanted()
    store.set(_KEY, "" if count == running else str(count))


def told(timeout: float) -> bool:
    """Whether this job is to be started again. All ranks must call it, hear the same, and wait for each other for
    ``timeout`` seconds."""
    if not dist.is_initialized() or not (store := innermost_store(default_store())).check([_KEY]):  # nobody tells
        return False
    ranks = Ranks(timeout)
    ranks.to_first("a checkpoint", None)
    return bool(ranks.from_first("a checkpoint", bool(store.get(_KEY)) if ranks.is_first else None))
