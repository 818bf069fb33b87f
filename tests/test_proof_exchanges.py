"""Every collective, and what takes a rank's part: what the proof says that ranks have afterwards, they have.

Operands are held in the ways of ``tests/test_proof_rules.py``. The exchanges are run on all ranks' tensors at once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from shardgraph import ir
from shardgraph.ir.rank_operations import chunk_bounds
from shardgraph.mesh import axes_of
from shardgraph.proof import ring  # noqa: F401 (it registers)
from shardgraph.proof.collectives import EXCHANGES
from shardgraph.proof.held import Held, UntypedError
from shardgraph.proof.terms import Terms
from tests.held_values import Values
from tests.held_ways import MESH, Way, held, ways
from tests.rule_cases import Operand, real

Locals = list[Tensor]

# -- exchanges of all ranks ------------------------------------------------------------------------------------


def _all_reduce(values: Values, local: Locals, operation: str, group: str) -> Locals:
    for axis in axes_of(group):
        stacks = [torch.stack([local[other] for other in values.along(rank, axis)]) for rank in values.ranks]
        local = [stack.sum(0) if operation == "sum" else stack.amax(0) for stack in stacks]
    return local


def _reduce_scatter(values: Values, local: Locals, operation: str, size: int, axis: str) -> Locals:
    total = _all_reduce(values, local, operation, axis)
    return [each.chunk(size)[rank[axis]] for rank, each in zip(values.ranks, total, strict=True)]


def _all_gather(values: Values, local: Locals, size: int, axis: str) -> Locals:
    return [torch.cat([local[other] for other in values.along(rank, axis)]) for rank in values.ranks]


def _all_to_all(values: Values, local: Locals, received: Sequence[int], sent: Sequence[int], axis: str) -> Locals:
    rows = [each.split(sent) for each in local]
    return [torch.cat([rows[other][rank[axis]] for other in values.along(rank, axis)]) for rank in values.ranks]


def _on_each(function: Callable[..., Tensor]) -> Callable[..., Locals]:
    """An operation of a rank's tensor, and its coordinates."""

    def run(values: Values, local: Locals, *args: Any) -> Locals:
        return [function(each, rank, *args) for each, rank in zip(local, values.ranks, strict=True)]

    return run


def _rows(rank: dict[str, int], rows: int, axis: str) -> slice:
    return slice(*chunk_bounds(rows, MESH[axis], rank[axis]))


def _trimmed(padded: Tensor, rank: dict[str, int], rows: int, axis: str) -> Tensor:
    own = _rows(rank, rows, axis)
    return padded[: own.stop - own.start]


RUN: dict[Any, Callable[..., Locals]] = {
    ir.ALL_REDUCE: _all_reduce,
    ir.REDUCE_SCATTER: _reduce_scatter,
    ir.ALL_GATHER: _all_gather,
    ir.ALL_TO_ALL: _all_to_all,
    ir.first_only: _on_each(lambda full, rank, axis: full * (rank[axis] == 0)),
    ir.pad_shard: _on_each(lambda shard, rank, rows: ir.pad_shard(shard, rows)),
    ir.trim_shard: _on_each(_trimmed),
    ir.local_chunk: _on_each(lambda full, rank, rows, axis: full[_rows(rank, rows, axis)]),
    ir.local_part: _on_each(
        lambda full, rank, dim, blocks, axis: ir.take_part(full, dim, blocks, MESH[axis], rank[axis])
    ),
}

WITHOUT = {ir.send: "gives a rank another's value, which only rules of ring attention go on with"}

# -- programs of exchanges -------------------------------------------------------------------------------------

Step = tuple[Any, ...]
"""An exchange and its arguments but the first."""

EVEN, UNEVEN = real(4, 6, 8), real(5, 6)
PROGRAMS: dict[str, tuple[Operand, list[Step]]] = {
    "a sum": (EVEN, [(ir.ALL_REDUCE, "sum", "tp")]),
    "a sum over data": (EVEN, [(ir.ALL_REDUCE, "sum", "dp")]),
    "a sum over two axes": (EVEN, [(ir.ALL_REDUCE, "sum", "dp+tp")]),
    "a maximum": (EVEN, [(ir.ALL_REDUCE, "max", "tp")]),
    "a sum, scattered": (EVEN, [(ir.REDUCE_SCATTER, "sum", 2, "tp")]),
    "a sum over data, scattered": (EVEN, [(ir.REDUCE_SCATTER, "sum", 2, "dp")]),
    "a sum of what one rank has": (EVEN, [(ir.first_only, "tp"), (ir.ALL_REDUCE, "sum", "tp")]),
    "parts together": (EVEN, [(ir.ALL_GATHER, 2, "tp")]),
    "batches together": (EVEN, [(ir.ALL_GATHER, 2, "dp")]),
    "parts and batches together": (EVEN, [(ir.ALL_GATHER, 2, "tp"), (ir.ALL_GATHER, 2, "dp")]),
    "a part": (EVEN, [(ir.local_part, 1, 1, "tp")]),
    "a part of a part": (EVEN, [(ir.local_part, 0, 1, "tp"), (ir.local_part, 0, 1, "dp")]),
    "a part of each block, and all": (EVEN, [(ir.local_part, 2, 2, "tp"), (ir.ALL_GATHER, 2, "tp")]),
    "rows there and back": (
        EVEN,
        [(ir.ALL_TO_ALL, [2, 2], [2, 2], "tp"), (ir.ALL_TO_ALL, [2, 2], [2, 2], "tp")],
    ),
    "batches there and back": (
        EVEN,
        [(ir.ALL_TO_ALL, [2, 2], [2, 2], "dp"), (ir.ALL_TO_ALL, [2, 2], [2, 2], "dp")],
    ),
    "rows": (EVEN, [(ir.local_chunk, 4, "tp"), (ir.ALL_GATHER, 2, "tp")]),
    "rows that do not divide": (
        UNEVEN,
        [(ir.local_chunk, 5, "tp"), (ir.pad_shard, 3), (ir.ALL_GATHER, 2, "tp")],
    ),
    "a sum, scattered, that does not divide": (
        UNEVEN,
        [(ir.pad_shard, 6), (ir.REDUCE_SCATTER, "sum", 2, "tp"), (ir.trim_shard, 5, "tp"), (ir.pad_shard, 3)],
    ),
}


class Exchanged:
    """A program of exchanges, typed and run step by step."""

    def __init__(self) -> None:
        self.terms, self.values = Terms(), Values(MESH)

    def accepts(self, operand: Operand, steps: Sequence[Step], way: Way) -> bool:
        """Whether every step is typed.

        Raises:
            AssertionError: ranks do not have what a type says.
        """
        pair = held(self.terms, self.values, operand, 0, way)
        if pair is None:
            return False
        said, _ = pair
        local = self.values.placed(said, 0)
        for target, *args in steps:
            try:
                typed = EXCHANGES[target](self.terms, MESH.__getitem__, said, *args)
                if not isinstance(typed, Held):  # what only rules of ring attention go on with
                    return False
                local, before, said = RUN[target](self.values, local, *args), said, typed
            except (UntypedError, RuntimeError):  # refused, or of other sizes
                return False
            assert self._has(said, local), f"{target} of {before} is not {said}"
        return True

    def _has(self, said: Held, local: Locals) -> bool:
        if said.uneven is not None:  # the rows that a rank lacks are zeros of the term
            local = [ir.pad_shard(each, max(map(len, local))) for each in local]
        equal = map(torch.allclose, self.values.combined(said, local), self.values.held(said))
        return self.values.alike(said, local) and all(equal)


@pytest.mark.parametrize("name", PROGRAMS)
def test_ranks_have_what_is_said_after_exchanges(name):
    operand, steps = PROGRAMS[name]
    run = Exchanged()
    accepted = sum(run.accepts(operand, steps, way) for (way,) in [[Way()], *ways([operand], 60)])
    assert accepted


def test_every_exchange_is_in_a_program():
    run = {target for _, steps in PROGRAMS.values() for target, *_ in steps}
    assert set(EXCHANGES) == run | set(WITHOUT)
