"""What the ranks of another axis exchange, once a graph has been divided along that axis.

All ranks that meet there have the same part along this axis, so a dimension that the exchange does not cut or join may
be cut, and sums may be sums of summands.
"""

from __future__ import annotations

from collections.abc import Iterator

from torch.distributed.tensor import Shard

from shardgraph import ir
from shardgraph.passes.sharding.options import Operation, Option, results
from shardgraph.passes.sharding.placements import PARTIAL
from shardgraph.passes.sharding.rules import rule


@rule(ir.ALL_REDUCE, ir.WAIT, ir.first_only)
def elementwise(operation: Operation) -> Iterator[Option]:
    """Every element for itself."""
    yield from _along(operation, range(len(operation.result)))


@rule(ir.ALL_GATHER, ir.REDUCE_SCATTER, ir.ALL_TO_ALL)
def rows_exchanged(operation: Operation) -> Iterator[Option]:
    """Rows go to other ranks, whole."""
    yield from _along(operation, range(1, len(operation.result)))


@rule(ir.local_part)
def part_taken(operation: Operation) -> Iterator[Option]:
    """One dimension is cut already."""
    taken = operation.args[1]
    yield from _along(operation, (dim for dim in range(len(operation.result)) if dim != taken))


def _along(operation: Operation, dims: Iterator[int] | range) -> Iterator[Option]:
    for dim in dims:
        yield Option((Shard(dim),), (Shard(dim),))
    if "max" not in operation.args and results(operation.node)[0].is_floating_point():
        yield Option((PARTIAL,), (PARTIAL,))
