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
from typing import Any

import torch
from torch import fx

from shardgraph.passes.sharding.axis_builder import AxisBuilder
from shardgraph.passes.sharding.lowerings import lowering
from shardgraph.passes.sharding.options import Option, named_arguments, results
from shardgraph.passes.sharding.placements import blocks

aten = torch.ops.aten

_ROWS = 2  # the sequence dimension: tensors are [batch, heads, positions, width]
_TO_THE_END = 2**63 - 1
_MASKS = ("attn_mask", "attn_bias")
_OUTPUT_GRADIENTS = ("grad_out", "grad_out_")


@lowering
def ring_attention(write: AxisBuilder, node: fx.Node, option: Option, given: list[fx.Node]) -> list[Any]:
    """Attention per step, merged by log-sum-exp."""
    ring = _Ring(write, node, given)
    pair = [ring.call["key"], ring.call["value"]]
    total: list[fx.Node] = []
    own: list[Any] = []
    for step in range(write.parts):
        sent = ring.start_pair(pair) if step + 1 < write.parts else None
        made, hidden = ring.attend(step, pair)
        part = ring.back_in_place(step, made[:2], first=True, fill=(0.0, -torch.inf))
        if hidden is not None:
            part = _nothing_seen(write, part[0], part[1], hidden)
        part = [ring.accumulated(part[0]), part[1]]
        total = _merged(write, *total, *part) if total else part
        own = own or made
        if sent is not None:
            pair = ring.receive(sent, pair)
    output, logarithm = total
    if ring.mask is not None:  # for a query that sees no key the kernel returns 0 too
        nothing = write.call(aten.eq.Scalar, logarithm, -torch.inf)
        logarithm = write.call(aten.masked_fill.Scalar, logarithm, nothing, 0.0)
    return [ring.cast(output, results(node)[0].dtype), logarithm, *own[2:]]


@lowering
def ring_attention_backward(write: AxisBuilder, node: fx.Node, option: Option, given: list[fx.Node]) -> list[Any]:
    """Query gradients are accumulated locally, those of keys and values as they pass by."""
    ring = _Ring(write, node, given)
    pair = [ring.call["key"], ring.call["value"]]
    of_queries: fx.Node | None = None
    going: fx.Node | None = None
    own: list[Any] = []
    for step in range(write.parts):
        sent = ring.start_pair(pair) if step + 1 < write.parts else None
        own, _ = ring.attend(step, pair)
        (queries,) = ring.back_in_place(step, own[:1], first=True)
        pair_gradients = ring.back_in_place(step, own[1:3], first=False)
        queries = ring.accumulated(queries)
        of_queries = queries if of_queries is None else write.call(aten.add.Tensor, of_queries, queries)
        summed = ring.packed([ring.accumulated(gradient) for gradient in pair_gradients])
        if going is not None:
            summed = write.call(aten.add.Tensor, write.wait(going), summed)
        going = write.send(summed)
        if sent is not None:
            pair = ring.receive(sent, pair)
    assert of_queries is not None and going is not None
    home = ring.unpacked(write.wait(going), pair)
    rest = [None for _ in own[3:]]
    dtype = results(node)[0].dtype
    return [*(ring.cast(gradient, dtype) for gradient in (of_queries, *home)), *rest]


class _Ring:
    """One attention, forward or backward, with this rank's operands."""

    def __init__(self, write: AxisBuilder, node: fx.Node, given: list[fx.Node]) -> None:
        self.write, self.node = write, node
        self.call: dict[str, Any] = named_arguments(node, given)
        self.mask = next((self.call[name] for name in _MASKS if self.call.get(name) is not None), None)
        self.causal = bool(self.call.get("is_causal"))
        self.rows = self.call["query"].meta["val"].shape[_ROWS]
        self.later: dict[int, fx.Node] = {}

    # -- communication -----------------------------------------------------------------------------

    def start_pair(self, pair: list[fx.Node]) -> fx.Node:
        """Start sending keys and values to the next rank."""
        return self.write.send(self.packed(pair))

    def receive(self, sent: fx.Node, like: list[fx.Node]) -> list[fx.Node]:
        """Wait for the keys and values of the previous rank."""
        return self.unpacked(self.write.wait(sent), like)

    def packed(self, tensors: list[fx.Node]) -> fx.Node:
        """Several tensors flattened into one, to be sent in one message."""
        flat = [self.write.view(tensor, (tensor.meta["val"].numel(),)) for tensor in tensors]
        return self.write.call(aten.cat.default, flat)

    def unpacked(self, flat: fx.Node, like: list[fx.Node]) -> list[fx.Node]:
        """The tensors packed by :meth:`packed`, with the shapes of ``like``."""
        shapes = [tuple(tensor.meta["val"].shape) for tensor in like]
        sizes = [tensor.meta["val"].numel() for tensor in like]
        split = self.write.call(aten.split_with_sizes.default, flat, sizes)
        pieces = [self.write.call(operator.getitem, split, index) for index in range(len(like))]
        return [self.write.view(piece, shape) for piece, shape in zip(pieces, shapes, strict=True)]

    # -- one step ----------------------------------------------------------------------------------

    def attend(self, step: int, pair: list[fx.Node]) -> tuple[list[Any], fx.Node | None]:
        """The kernel's results for the current keys and values, and a mask of the queries that see none of them."""
        call = self.call | {"key": pair[0], "value": pair[1]}
        hidden = None
        if self.mask is not None:
            name = next(name for name in _MASKS if name in call)
            call[name] = self._columns(step)
            hidden = self.write.call(aten.eq.Scalar, self.write.call(aten.amax.default, call[name], [-1]), -torch.inf)
        if self.causal and step:
            call |= self._below_the_diagonal(step, call)
        return self._kernel(call), hidden

    def _columns(self, step: int) -> fx.Node:
        """The attention mask's columns for the current keys."""
        mask, keys = self.mask, self.call["key"].meta["val"].shape[_ROWS]
        assert mask is not None
        last = mask.meta["val"].dim() - 1
        if mask.meta["val"].shape[last] == 1:
            return mask
        return self.write.part(mask, blocks(last, keys), step)

    def _later(self, step: int) -> fx.Node:
        if step not in self.later:
            self.later[step] = self.write.from_later(step)
        return self.later[step]

    def _below_the_diagonal(self, step: int, call: dict[str, Any]) -> dict[str, Any]:
        """All queries but the first and all keys but the last, if the keys are those of a higher rank."""
        later = self._later(step)
        fewer = self.write.call(operator.sub, self.rows, later)
        of_queries = ("query", "out", "logsumexp", *_OUTPUT_GRADIENTS)
        found = {
            name: self.write.call(aten.slice.Tensor, call[name], _ROWS, later, _TO_THE_END)
            for name in of_queries
            if name in call
        }
        for name in ("key", "value"):
            found[name] = self.write.call(aten.slice.Tensor, call[name], _ROWS, 0, fewer)
        return found | {name: fewer for name in ("max_q", "max_k") if name in call}

    def back_in_place(
        self, step: int, tensors: list[fx.Node], *, first: bool, fill: tuple[float, ...] = (0.0, 0.0)
    ) -> list[fx.Node]:
        """Results with the row that :meth:`attend` left out, the first or the last, padded with ``fill``."""
        if not self.causal or not step:
            return list(tensors)
        later = self._later(step)
        pad = [later, 0] if first else [0, later]
        found = []
        for tensor, value in zip(tensors, fill, strict=False):
            inner = [0, 0] * (tensor.meta["val"].dim() - 1 - _ROWS)
            found.append(self.write.call(aten.constant_pad_nd.default, tensor, [*inner, *pad], value))
        return found

    def _kernel(self, call: dict[str, Any]) -> list[Any]:
        arguments = [argument for argument in self.node.target._schema.arguments if argument.name in call]
        if "max_q" in call and isinstance(call["max_q"], int):
            call = call | {"max_q": self.rows, "max_k": self.rows}
        args = [call[argument.name] for argument in arguments if not argument.kwarg_only]
        kwargs = {argument.name: call[argument.name] for argument in arguments if argument.kwarg_only}
        made = self.write.call(self.node.target, *args, **kwargs)
        return [
            self.write.call(operator.getitem, made, index) if isinstance(value, torch.Tensor) else None
            for index, value in enumerate(made.meta["val"])
        ]

    # -- precision ---------------------------------------------------------------------------------

    def accumulated(self, tensor: fx.Node) -> fx.Node:
        """In the precision for accumulation over steps: at least single."""
        dtype = tensor.meta["val"].dtype
        return self.cast(tensor, torch.promote_types(dtype, torch.float32))

    def cast(self, tensor: fx.Node, dtype: torch.dtype) -> fx.Node:
        """Cast to ``dtype`` if needed."""
        if tensor.meta["val"].dtype == dtype:
            return tensor
        return self.write.call(aten._to_copy.default, tensor, dtype=dtype)


def _nothing_seen(write: AxisBuilder, out: fx.Node, logarithm: fx.Node, hidden: fx.Node) -> list[fx.Node]:
    """Empty sums for the ``hidden`` queries, which see no key of a step: the kernels' values for them are arbitrary."""
    out = write.call(aten.masked_fill.Scalar, out, write.call(aten.unsqueeze.default, hidden, -1), 0.0)
    return [out, write.call(aten.masked_fill.Scalar, logarithm, hidden, -torch.inf)]


def _merged(write: AxisBuilder, out: fx.Node, logarithm: fx.Node, more: fx.Node, its: fx.Node) -> list[fx.Node]:
    """Two steps' outputs averaged, weighted by their sums of exponentials, and the combined log-sum-exp."""
    # For a query that has seen no key in either, the difference is NaN; both its outputs are 0.
    apart = write.call(aten.nan_to_num.default, write.call(aten.sub.Tensor, its, logarithm), 0.0)
    weight = write.call(aten.unsqueeze.default, write.call(aten.sigmoid.default, apart), -1)
    return [write.call(aten.lerp.Tensor, out, more, weight), write.call(aten.logaddexp.default, logarithm, its)]
