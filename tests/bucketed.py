"""What ranks do in tests of buckets."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

import shardgraph
from shardgraph import preset
from tests import ranks

BUCKET = 1 << 20


def parity(name: str, plan: str, mesh: dict[str, int], **fields: Any) -> float:
    """The largest difference to the unsharded model over five steps."""
    model, call = ranks.prepared(name, 2 * world_size())
    original = copy.deepcopy(model)
    chosen = replace(preset(plan, mesh), bucket=BUCKET, **fields)
    return ranks.train(shardgraph.compile(model, chosen), original, call)


def world_size() -> int:
    """The number of ranks."""
    return ranks.dist.get_world_size()


def accumulation(plan: str) -> dict[str, float]:
    """As of :func:`tests.ranks.accumulation`."""
    return ranks.accumulation(replace(preset(plan, {"dp": world_size()}), bucket=BUCKET))  # type: ignore[arg-type]


def ranks_use_other_heads(plan: str) -> dict[str, Any]:
    """As of :func:`tests.ranks.ranks_use_other_heads`."""
    chosen: Any = replace(preset(plan, {"dp": world_size()}), bucket=BUCKET)
    return ranks.ranks_use_other_heads(chosen)
