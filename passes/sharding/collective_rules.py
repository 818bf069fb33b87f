"""Options of another axis's collectives, in a graph that has already been sharded along that axis.

All ranks of such a collective have the same shard along this axis, so a dimension that the collective neither splits
nor concatenates may be sharded, and sums may be partial.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from torch.distributed.tensor import Shard

from shardgraph import ir
from shardgraph.passes.sharding.options import Operation, Option, results
from shardgraph.passes.sharding.placements import PARTIAL
from shardgraph.passes.sharding.rules import rule


@rule(ir.ALL_REDUCE, ir.WAIT, ir.first_only)
def elementwise(operation: Operation) -> Iterator[Option]:
    """Elementwise over ranks."""
    return _along(operation, range(len(operation.result)))


@rule(ir.ALL_GATHER, ir.REDUCE_SCATTER, ir.ALL_TO_ALL)
def rows_exchanged(operation: Operation) -> Iterator[Option]:
    """Whole rows go to other ranks."""
    return _along(operation, range(1, len(operation.result)))


@rule(ir.local_part)
def part_taken(operation: Operation) -> Iterator[Option]:
    """One dimension is already sharded."""
    taken = operation.node.args[1]
    return _along(operation, (dim for dim in range(len(operation.result)) if dim != taken))


def _along(operation: Operation, dims: Iterable[int]) -> Iterator[Option]:
    for dim in dims:
        yield Option((Shard(dim),), (Shard(dim),))
    if "max" not in operation.node.args and results(operation.node)[0].is_floating_point():
        yield Option((PARTIAL,), (PARTIAL,))
