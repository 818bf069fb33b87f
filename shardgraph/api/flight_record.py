"""``shardgraph.flight_record``: the last collectives of a run."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch.distributed as dist

from shardgraph.arguments import PATH, checked
from shardgraph.runtime.watch import flight, translated


@translated
@checked(path=PATH)
def flight_record(path: str | Path | None = None) -> list[dict[str, Any]]:
    """The last 100 collectives of this rank, oldest first; with ``path``, a file of all ranks too.

    Each is a dictionary with its ``kind``, mesh ``axis``, ``bytes``, ``value`` (the parameter, or what else it moves),
    source ``line``, ``call`` (the number of the graph's run, the same on all ranks) and ``place`` in it, and the times
    when it ``started`` and ``finished``, in seconds since 1970; ``finished`` is None while it is not awaited.

    Those outside of graphs, of clipping, saves and the user, are what torch keeps over gloo: ``call`` is 0, ``place``
    the number in the ``group``, ``value`` the type and sizes of what comes out, and ``done`` says whether it has come.
    Messages between two ranks are left out.

    With ``path``, all ranks must call it, and rank 0 writes what ``shardgraph flight PATH`` reads. After a failure of a
    rank such a file is written by itself, and the error names it.

    Raises:
        OSError: rank 0 cannot write the file; the others have gone on.
        RankFailedError: with ``path``, another rank has failed.
    """
    own = flight.records()
    if path is not None:
        several = dist.is_initialized() and dist.get_world_size() > 1
        first = not several or dist.get_rank() == 0
        ranks: list[Any] = [own]
        if several:
            ranks = [None] * dist.get_world_size()
            dist.gather_object(own, ranks if first else None, dst=0)
        if first:
            Path(path).write_text(json.dumps({"failure": "", "ranks": dict(enumerate(ranks))}))
    return own
