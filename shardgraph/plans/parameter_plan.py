"""The plan of one parameter, and plans of many as patterns of names."""

from __future__ import annotations

import fnmatch
import glob
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

from shardgraph.arguments import BOOL, TEXT, check_fields, of_plan, one_of, sequence_of
from shardgraph.errors import PlanError
from shardgraph.mesh import Mesh
from shardgraph.sizes import divisors

REPLICATE = "replicate"
SHARD = "shard(0)"
AUTO = "auto"
OWN = "none"
GRADIENTS = ("all_reduce", "reduce_scatter", OWN)


def split_text(dim: int, blocks: int = 1) -> str:
    """``"split(1)"``, or ``"split(1, blocks=3)"``: the placement of a parameter that operators use sharded."""
    return f"split({dim})" if blocks == 1 else f"split({dim}, blocks={blocks})"


def parse_split(placement: str) -> tuple[int, int] | None:
    """The dimension and blocks of :func:`split_text`; None for another placement."""
    match = re.fullmatch(r"split\((\d+)(?:, *blocks=([1-9]\d*))?\)", placement)
    return (int(match[1]), int(match[2] or 1)) if match else None


_PLACEMENTS = sequence_of(f"placements, one per mesh axis, such as ({SHARD!r},)", TEXT)

_FIELDS = {
    "placements": _PLACEMENTS,
    "gradient": of_plan(one_of(GRADIENTS)),
    "reshard_after_forward": of_plan(BOOL),
    "offload": of_plan(BOOL),
}


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
        ``"all_reduce"``: each rank holds the whole summed gradient (DDP, ZeRO-1). ``"none"``: it is not reduced, and
        the parameter, which is replicated, stays a plain tensor.
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

    def __post_init__(self) -> None:
        check_fields(self, "", **_FIELDS)

    @property
    def shard_axis(self) -> int | None:
        """The mesh axis (by position) that shards the parameter, or None."""
        return self.placements.index(SHARD) if SHARD in self.placements else None

    @property
    def splits(self) -> dict[int, tuple[int, int]]:
        """``(dimension, blocks)`` by the position of each mesh axis that splits the parameter."""
        return {i: split for i, p in enumerate(self.placements) if (split := parse_split(p)) is not None}

    def on(self, axes: Sequence[str]) -> str:
        """The placements along mesh axes of these names, and when it is gathered, as text."""
        where = ", ".join(f"{placement} over {axis}" for placement, axis in zip(self.placements, axes, strict=True))
        again = ""
        if self.shard_axis is not None:
            again = "; gathered again in backward" if self.reshard_after_forward else "; kept for backward"
        again += "; in host memory" if self.offload else ""
        return f"{where or 'whole'}; gradient {self.gradient}{again}"

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


def fitted(entry: ParameterPlan, fqn: str, shape: Sequence[int], mesh: Mesh) -> ParameterPlan:
    """``entry``, unsharded along data axes if a parameter of global ``shape`` has no rows to shard.

    Raises:
        PlanError: a split dimension does not divide by the number of ranks; the message says which numbers work.
    """
    for position, (dim, blocks) in entry.splits.items():
        axis, ranks = mesh[position]
        rows = shape[dim] if dim < len(shape) else 0
        if not rows or rows % (blocks * ranks):
            sizes = [] if rows % blocks else divisors(rows // blocks)
            works = f"an axis of {' or '.join(map(str, sizes))} ranks" if sizes else "another size of the axis"
            raise PlanError(
                f"{fqn!r} of shape {list(shape)} cannot be {entry.placements[position]!r} over {axis!r}, which has "
                f"{ranks} ranks: the dimension must be a multiple of {blocks * ranks}. "
                f"Use {works}, another dimension, or 'replicate'"
            )
    if entry.shard_axis is not None and not (len(shape) and math.prod(shape)):
        return unsharded(entry)
    return without_shards_of_blocks(entry)


def in_patterns(entries: Mapping[str, ParameterPlan]) -> tuple[tuple[str, ParameterPlan], ...]:
    """The entries as few patterns: the most common one for all, then the exceptions, layers together."""
    if not entries:
        return ()
    common, _ = Counter(entries.values()).most_common(1)[0]
    alone = {fqn: glob.escape(fqn) for fqn in entries}  # keys of an nn.ModuleDict may be any text
    of_layers = {fqn: re.sub(r"(?<=\.)\d+(?=\.)", "*", pattern) for fqn, pattern in alone.items()}
    together = defaultdict(set)
    for fqn, entry in entries.items():
        together[of_layers[fqn]].add(entry)
    patterns = {"*": common}
    for fqn, entry in entries.items():
        if entry != common:
            patterns[of_layers[fqn] if len(together[of_layers[fqn]]) == 1 else alone[fqn]] = entry
    plan_of = {fqn: entry for pattern, entry in patterns.items() for fqn in fnmatch.filter(entries, pattern)}
    return (*patterns.items(), *((alone[fqn], entry) for fqn, entry in entries.items() if plan_of[fqn] != entry))
