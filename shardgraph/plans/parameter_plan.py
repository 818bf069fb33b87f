"""The plan of one parameter."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from shardgraph.mesh import Mesh

REPLICATE = "replicate"
SHARD = "shard(0)"
AUTO = "auto"
GRADIENTS = ("all_reduce", "reduce_scatter")


def split_text(dim: int, blocks: int = 1) -> str:
    """``"split(1)"``, or ``"split(1, blocks=3)"``: the placement of a parameter that operators use sharded."""
    return f"split({dim})" if blocks == 1 else f"split({dim}, blocks={blocks})"


def parse_split(placement: str) -> tuple[int, int] | None:
    """The dimension and blocks of :func:`split_text`; None for another placement."""
    found = re.fullmatch(r"split\((\d+)(?:, *blocks=([1-9]\d*))?\)", placement)
    return (int(found[1]), int(found[2] or 1)) if found else None


@dataclass(frozen=True)
class ParameterPlan:
    """The placements of one parameter, and how it is gathered and its gradient reduced.

    ``placements``
        One per mesh axis. Along a data axis: ``"replicate"``, or ``"shard(0)"`` (stored in shards, all-gathered before
        use), for at most one axis. Along an operator axis: ``"split(d)"`` (sharded along dimension ``d``, never
        gathered), ``"split(d, blocks=k)"`` (each of ``k`` equal blocks is sharded, as a fused projection of queries,
        keys and values needs), ``"replicate"``, or ``"auto"``. Along the expert axis: ``"split(0)"`` (one expert per
        row; a rank has some of them, and tokens are sent to it), ``"replicate"``, or ``"auto"``.
    ``gradient``
        ``"reduce_scatter"``: each rank receives its shard of the summed gradient (ZeRO-2, ZeRO-3).
        ``"all_reduce"``: each rank holds the whole summed gradient (DDP, ZeRO-1).
    ``reshard_after_forward``
        Free the gathered parameter after forward and gather it again in backward (ZeRO-3), instead of
        keeping it (ZeRO-1, ZeRO-2). For a replicated parameter: likewise its copy in the computation's precision.
    ``offload``
        Keep it in host memory between uses, with its gradient and optimizer state; the optimizer updates it there. It
        is copied to the device before it is gathered or used, and again in backward unless it is kept.
    """

    placements: tuple[str, ...]
    gradient: str = "reduce_scatter"
    reshard_after_forward: bool = True
    offload: bool = False

    @property
    def shard_axis(self) -> int | None:
        """The mesh axis (by position) that shards the parameter, or None."""
        return next((i for i, p in enumerate(self.placements) if p == SHARD), None)

    @property
    def splits(self) -> dict[int, tuple[int, int]]:
        """``(dimension, blocks)`` by the position of each mesh axis that splits the parameter."""
        found = {i: parse_split(placement) for i, placement in enumerate(self.placements)}
        return {i: split for i, split in found.items() if split is not None}

    def local_shape(self, shape: Sequence[int], mesh: Mesh) -> tuple[int, ...]:
        """The shape of a rank's part along operator axes, which data axes then shard; ``shape`` is the global one."""
        local = list(shape)
        for position, (dim, _) in self.splits.items():
            local[dim] //= mesh[position][1]
        return tuple(local)


def without_shards_of_blocks(entry: ParameterPlan) -> ParameterPlan:
    """``entry``, unsharded along data axes if its rows are split in several blocks: DTensor cannot express a shard of
    the rest of each block."""
    in_blocks = any(dim == 0 and blocks > 1 for dim, blocks in entry.splits.values())
    return unsharded(entry) if in_blocks and entry.shard_axis is not None else entry


def offloaded(entry: ParameterPlan) -> ParameterPlan:
    """``entry`` in host memory; if it is not stored in shards, it is copied again for backward."""
    return replace(entry, offload=True, reshard_after_forward=entry.reshard_after_forward or entry.shard_axis is None)


def unsharded(entry: ParameterPlan) -> ParameterPlan:
    """``entry`` without sharding along data axes."""
    placements = tuple(REPLICATE if placement == SHARD else placement for placement in entry.placements)
    return replace(entry, placements=placements, gradient="all_reduce")
