"""Random numbers by sample: what is drawn for a row of the batch is the same on any number of ranks.

Each rank draws for the rows of all ranks' batches, in their order, and takes those of its own: what the original model
would draw for the whole batch. All generators stay in step with its, so a checkpoint has one state for any number of
ranks. It costs the drawing of all rows on each rank, and a message in each forward, about how many rows others have.
"""

from __future__ import annotations

import operator
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx

from shardgraph import ir, torch_api
from shardgraph.errors import RankMismatchError, ShardGraphError
from shardgraph.ir.copies import library
from shardgraph.passes.analysis.random_state import draws
from shardgraph.passes.program import Program
from shardgraph.passes.sharding.batch_rows import Rows, drawn_rows
from shardgraph.plans.plan import Plan
from shardgraph.runtime.executor import State, mesh_rank

RANDOM = ("ranks", "samples")

aten = torch.ops.aten

library.define("ones_for_all_rows(Tensor like, int dim, int blocks) -> Tensor")
library.define("own_rows(Tensor whole, int dim, int blocks) -> Tensor")

_ONES = torch.ops.shardgraph.ones_for_all_rows.default
_OWN = torch.ops.shardgraph.own_rows.default

_here: tuple[int, int, int] = (0, 1, 1)  # where this rank's rows begin and end, and how many all ranks have


@contextmanager
def _on(start: int, stop: int, total: int) -> Iterator[None]:
    global _here
    before, _here = _here, (start, stop, total)
    try:
        yield
    finally:
        _here = before


@torch.library.impl(library, "ones_for_all_rows", "CompositeExplicitAutograd")
def _ones(like: torch.Tensor, dim: int, blocks: int) -> torch.Tensor:
    """Ones in the shape of ``like``, with the rows of all ranks, in the same order of strides."""
    start, stop, total = _here
    shape = list(like.shape)
    shape[dim] = shape[dim] // (stop - start) * total
    order = sorted(range(like.dim()), key=lambda d: (-like.stride()[d], d))
    made = like.new_ones([shape[d] for d in order])
    return made.permute([order.index(d) for d in range(like.dim())])


@torch.library.impl(library, "own_rows", "CompositeExplicitAutograd")
def _own(whole: torch.Tensor, dim: int, blocks: int) -> torch.Tensor:
    """This rank's rows of a tensor with those of all."""
    start, stop, total = _here
    each = whole.shape[dim] // (blocks * total)
    parts = whole.unflatten(dim, (blocks, total * each)).narrow(dim + 1, start * each, (stop - start) * each)
    return parts.flatten(dim, dim + 1).clone(memory_format=torch.preserve_format)


def check_random(random: str, plan: Plan, backend: str, padded: bool) -> None:
    """Raise ShardGraphError unless random numbers can be drawn like that."""
    why = None
    if random == "samples":
        if not plan.is_of_data or plan.copies > 1:
            why = f"under plan {plan.name!r} ranks share a batch, or train copies of their own: use 'ddp', 'fsdp', "
            why += "'hsdp', 'zero1' or 'zero2'"
        elif backend != "eager":
            why = f"backend {backend!r} compiles what draws into its kernels: use 'eager'"
        elif padded:
            why = "with lengths= numbers would be drawn for what is padded too: leave lengths out"
    if why is not None:
        raise ShardGraphError(f"random='samples' draws the numbers of all ranks' batches, and {why}")


class SampleRows:
    """How a program draws by sample."""

    def __init__(self, program: Program, state: State) -> None:
        self._drawn, self._rows = drawn_rows(program.joint), program.joint.rows
        self._plan, self._state = program.plan, state
        alike = sorted((name, str(rows)) for name, rows in self._drawn.items())
        self._digest = zlib.crc32(repr(alike).encode())

    def in_graph(self, gm: fx.GraphModule) -> fx.GraphModule:
        """A copy of a graph that draws for the rows of all ranks."""
        return _rewritten(gm, self._drawn)

    @contextmanager
    def drawing(self) -> Iterator[None]:
        """Run forward in the body. All ranks must."""
        if self._state.joining is not None:
            raise ShardGraphError(
                "random='samples' draws the numbers of all ranks' batches, and inside of join() some have none: have "
                "equally many batches on all ranks, or compile with random='ranks'"
            )
        mesh, counts, rank = self._state.mesh, [self._rows], 0
        if mesh is not None and self._plan.data_size > 1:
            group = torch_api.group_along(mesh, tuple(axis for axis, _ in self._plan.data_mesh))
            mine = torch.tensor([self._rows, self._digest], device=self._state.device)
            gathered = mine.new_empty(self._plan.data_size * 2)
            torch_api.all_gather(gathered, mine, group=group)
            both = gathered.tolist()
            counts, digests, rank = both[::2], both[1::2], self._plan.data_rank(mesh_rank(mesh))
            if len({*digests}) > 1:
                raise RankMismatchError(
                    "random='samples': ranks draw other random numbers in this call: forward takes other branches, or "
                    "inputs differ in more than their rows. Give all ranks inputs that are alike but for their rows"
                )
        start = sum(counts[:rank])
        with _on(start, start + counts[rank], sum(counts)):
            yield


def _rewritten(gm: fx.GraphModule, drawn: Mapping[str, Rows | None]) -> fx.GraphModule:
    gm = ir.copy_graph(gm)
    graph = gm.graph
    for node in [node for node in graph.nodes if draws(node)]:
        rows = drawn[node.name]
        if rows is None:
            continue
        like = node.args[0]
        with graph.inserting_before(node):
            whole = _call(graph, _ONES, (like, rows.dim, rows.blocks), like.meta["val"])
        node.args = (whole, *node.args[1:])
        if node.target is not aten.native_dropout.default:
            _own_after(graph, node, rows)
            continue
        _, probability, training = node.args
        scale = 0.0 if probability == 1 else 1.0 / (1.0 - probability)
        kept, mask = (next((user for user in node.users if user.args[1] == i), None) for i in (0, 1))
        with graph.inserting_after(node):
            made = mask or _call(graph, operator.getitem, (node, 1), node.meta["val"][1])
        own = _own_after(graph, made, rows)
        if kept is not None:
            with graph.inserting_after(own):
                times = _call(graph, aten.mul.Tensor, (like, own), like.meta["val"])
            with graph.inserting_after(times):
                scaled = _call(graph, aten.mul.Scalar, (times, scale if training else 1.0), kept.meta["val"])
            kept.replace_all_uses_with(scaled)
            graph.erase_node(kept)
    return gm


def _own_after(graph: fx.Graph, node: fx.Node, rows: Rows) -> fx.Node:
    """This rank's rows of what a node has drawn, in its place everywhere."""
    with graph.inserting_after(node):
        own = _call(graph, _OWN, (node, rows.dim, rows.blocks), node.meta["val"])
    node.replace_all_uses_with(own, delete_user_cb=lambda user: user is not own)
    return own


def _call(graph: fx.Graph, target: Any, args: tuple[Any, ...], value: Any) -> fx.Node:
    node = graph.call_function(target, args)
    node.meta["val"] = value
    return node
