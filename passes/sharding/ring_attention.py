"""Ring attention over sharded sequences: keys and values travel round the ranks while queries stay.

In every step a rank attends to the keys and values that it currently has, while it sends them to the next rank. Softmax
over all keys follows from the softmax over some at a time and its log-sum-exp (Milakov and Gimelshein, 2018,
https://arxiv.org/abs/1805.02867); Liu, Zaharia and Abbeel made a ring of it (2023, https://arxiv.org/abs/2310.01889).
Given the output and log-sum-exp of the whole softmax, the kernel's backward returns each step's exact contribution. The
gradients of keys and values travel with them, and return home in one extra step.

Sequences are sharded in stripes: of ``n`` ranks, rank ``r`` has the tokens ``r``, ``n + r``, ``2n + r``, so that under
a causal mask all have equal work in every step (Brandon et al., 2023, https://arxiv.org/abs/2311.09431). Its queries
see the keys of rank ``s`` under a causal mask on local positions, without the diagonal if ``s`` is greater than ``r``:
then the causal kernel runs on all queries but the first and all keys but the last.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.passes.sharding.axis_builder import AxisBuilder
from shardgraph.passes.sharding.lowerings import lowering
from shardgraph.passes.sharding.options import Option, named_arguments, results
from shardgraph.passes.sharding.placements import blocks
from shardgraph.passes.sharding.rules import OF_QUERIES

aten = torch.ops.aten

_ROWS = 2  # the sequence dimension: tensors are [batch, heads, positions, width]


@lowering
def ring_attention(write: AxisBuilder, node: fx.Node, option: Option, tensors: list[fx.Node]) -> list[Any]:
    """Attention per step, merged by log-sum-exp."""
    ring = _Ring(write, node, tensors)
    total: fx.Node | None = None
    for step, pair in ring.steps():
        kernel_results, hidden = ring.attend(step, pair)
        out, logarithm = ring.padded(kernel_results, first=True, fill=(0.0, -torch.inf))
        if hidden is not None:  # queries that see no key of this step: the kernels' values for them are arbitrary
            column = write.call(aten.unsqueeze.default, hidden, -1)
            out = write.call(aten.masked_fill.Scalar, out, column, 0.0)
            logarithm = write.call(aten.masked_fill.Scalar, logarithm, hidden, -torch.inf)
        out = ring.accumulated(out)
        if total is None:
            total, total_logarithm = out, logarithm
            continue
        # Outputs are averaged, weighted by their sums of exponentials. For a query that has seen no key in either, the
        # difference is NaN; both its outputs are 0.
        difference = write.call(aten.nan_to_num.default, write.call(aten.sub.Tensor, logarithm, total_logarithm), 0.0)
        weight = write.call(aten.unsqueeze.default, write.call(aten.sigmoid.default, difference), -1)
        total = write.call(aten.lerp.Tensor, total, out, weight)
        total_logarithm = write.call(aten.logaddexp.default, total_logarithm, logarithm)
    assert total is not None
    if ring.mask is not None:  # for a query that sees no key the kernel returns 0 too
        unseen = write.call(aten.eq.Scalar, total_logarithm, -torch.inf)
        total_logarithm = write.call(aten.masked_fill.Scalar, total_logarithm, unseen, 0.0)
    return [write.converted(total, results(node)[0].dtype), total_logarithm]


@lowering
def ring_attention_backward(write: AxisBuilder, node: fx.Node, option: Option, tensors: list[fx.Node]) -> list[Any]:
    """Query gradients are accumulated locally, those of keys and values as they pass by."""
    ring = _Ring(write, node, tensors)
    query_gradient: fx.Node | None = None
    sent: fx.Node | None = None
    for step, pair in ring.steps():
        (of_queries, *of_pair), _ = ring.attend(step, pair)
        (of_queries,) = ring.padded([of_queries], first=True)
        of_pair = ring.padded(of_pair, first=False)
        of_queries = ring.accumulated(of_queries)
        query_gradient = of_queries if step == 0 else write.call(aten.add.Tensor, query_gradient, of_queries)
        summed = ring.packed([ring.accumulated(gradient) for gradient in of_pair])
        if sent is not None:
            summed = write.call(aten.add.Tensor, write.wait(sent), summed)
        sent = write.send(summed)
    assert query_gradient is not None and sent is not None
    gradients = [query_gradient, *ring.unpacked(write.wait(sent))]
    return [write.converted(gradient, results(node)[0].dtype) for gradient in gradients]


class _Ring:
    """One attention, forward or backward, with this rank's operands."""

    def __init__(self, write: AxisBuilder, node: fx.Node, tensors: list[fx.Node]) -> None:
        self.write, self.node = write, node
        self.call: dict[str, Any] = named_arguments(node, tensors)
        self.pair = [self.call["key"], self.call["value"]]
        self.mask = self.call["attn_mask"]
        self.later: fx.Node | None = None  # 1 if the current keys are those of a higher rank, else 0

    def steps(self) -> Iterator[tuple[int, list[fx.Node]]]:
        """The steps with their keys and values, which are sent on while a step computes."""
        pair = self.pair
        for step in range(self.write.parts - 1):
            sent = self.write.send(self.packed(pair))
            yield step, pair
            pair = self.unpacked(self.write.wait(sent))
        yield self.write.parts - 1, pair

    def packed(self, tensors: list[fx.Node]) -> fx.Node:
        """Several tensors flattened into one, to be sent in one message."""
        flat = [self.write.view(tensor, (tensor.meta["val"].numel(),)) for tensor in tensors]
        return self.write.call(aten.cat.default, flat)

    def unpacked(self, flat: fx.Node) -> list[fx.Node]:
        """Keys and values, or their gradients, that :meth:`packed` put together."""
        values = [tensor.meta["val"] for tensor in self.pair]
        split = self.write.call(aten.split_with_sizes.default, flat, [value.numel() for value in values])
        pieces = [self.write.call(operator.getitem, split, index) for index in range(2)]
        return [self.write.view(piece, tuple(value.shape)) for piece, value in zip(pieces, values, strict=True)]

    def attend(self, step: int, pair: list[fx.Node]) -> tuple[list[fx.Node], fx.Node | None]:
        """The kernel's results for the current keys and values, and a mask of the queries that see none of them."""
        call = self.call | {"key": pair[0], "value": pair[1]}
        hidden = None
        if self.mask is not None:
            last, keys = self.mask.meta["val"].dim() - 1, self.pair[0].meta["val"].shape[_ROWS]
            if self.mask.meta["val"].shape[last] > 1:  # the columns for the current keys
                call["attn_mask"] = self.write.part(self.mask, blocks(last, keys), step)
            highest = self.write.call(aten.amax.default, call["attn_mask"], [-1])
            hidden = self.write.call(aten.eq.Scalar, highest, -torch.inf)
        if (
            call["is_causal"] and step
        ):  # all queries but the first and all keys but the last, if these are of a higher rank
            self.later = self.write.call(ir.from_later, step, self.write.axis)
            fewer = self.write.call(operator.sub, self.call["query"].meta["val"].shape[_ROWS], self.later)
            ends = dict.fromkeys(OF_QUERIES, (self.later, 2**63 - 1)) | dict.fromkeys(("key", "value"), (0, fewer))
            for name in ends:
                if name in call:
                    call[name] = self.write.call(aten.slice.Tensor, call[name], _ROWS, *ends[name])
        args = [call[argument.name] for argument in self.node.target._schema.arguments]
        outs = self.write.call(self.node.target, *args)
        return [self.write.call(operator.getitem, outs, index) for index in range(len(outs.meta["val"]))], hidden

    def padded(self, tensors: list[fx.Node], *, first: bool, fill: tuple[float, ...] = (0.0, 0.0)) -> list[fx.Node]:
        """Results with the row that :meth:`attend` left out, the first or the last, padded with ``fill``."""
        if self.later is None:
            return tensors
        pad = [self.later, 0] if first else [0, self.later]
        inner = [[0, 0] * (tensor.meta["val"].dim() - 1 - _ROWS) for tensor in tensors]
        pads = zip(tensors, inner, fill, strict=False)
        return [self.write.call(aten.constant_pad_nd.default, t, [*dims, *pad], value) for t, dims, value in pads]

    def accumulated(self, tensor: fx.Node) -> fx.Node:
        """In the precision for accumulation over steps: at least single."""
        dtype = tensor.meta["val"].dtype
        return self.write.converted(tensor, torch.promote_types(dtype, torch.float32))
