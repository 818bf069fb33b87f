"""Lowers a choice of options to a graph over local shards."""

from __future__ import annotations

import operator
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from shardgraph import ir, torch_api
from shardgraph.errors import GraphInvariantError
from shardgraph.ir import Gradient, Parameter, add_output, outputs
from shardgraph.ir.attributes import (
    EQUALS,
    MADE_BY,
    PLACEMENTS,
    RECOMPUTE,
    ROLE,
    SUBJECT,
    Change,
    captured_name,
    carried,
)
from shardgraph.passes.analysis.names import module_of
from shardgraph.passes.analysis.random_state import draws
from shardgraph.passes.builder import can_view
from shardgraph.passes.sharding.axis_builder import AxisBuilder
from shardgraph.passes.sharding.legal import Value, placed_operands, value_of
from shardgraph.passes.sharding.lowerings import LOWERINGS
from shardgraph.passes.sharding.options import Option, is_operation, operands, results
from shardgraph.passes.sharding.placements import PARTIAL, REPLICATE, cut_of, is_cut, local_shape, written

aten = torch.ops.aten

_NUMBERS = frozenset({ir.first_row, ir.from_later, operator.sub})
"""Operators that return a rank-dependent number of another axis, and those computed from it."""
_ALONG_ANOTHER_AXIS = ir.COLLECTIVES | {ir.WAIT, ir.local_part, ir.first_only}


def lower(
    gm: fx.GraphModule, chosen: Mapping[fx.Node, Option], write: AxisBuilder, biased: Collection[fx.Node] = ()
) -> list[str]:
    """Rewrite ``gm`` in place with ``write``: every operation on this rank's shards, with redistribution between them.

    ``chosen`` has an option for every node except the output and ``getitem`` nodes. ``biased`` are the additions of a
    bias that was taken out of a product or convolution, and that goes back where nothing is reduced in between. Returns
    the parameters whose gradients are left partial, to be reduced together with the sum over batches.

    Raises:
        GraphInvariantError: an operation on local shards does not have the shape or dtype that its option implies.
    """
    return _Lowering(gm, chosen, write, biased).run()


class _Lowering:
    def __init__(
        self, gm: fx.GraphModule, chosen: Mapping[fx.Node, Option], write: AxisBuilder, biased: Collection[fx.Node]
    ) -> None:
        self.gm, self.chosen, self.write, self.biased = gm, chosen, write, biased
        self.shards: dict[Value, dict[Placement, fx.Node]] = {}
        self.scalars: dict[fx.Node, fx.Node] = {}
        self.parameters: dict[Parameter, Placement] = {}
        self.summands: list[str] = []

    def run(self) -> list[str]:
        for node in self.gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                placement = self.chosen[node].results[0]
                assert placement is not None
                self._keep(node, 0, placement, self.write.placeholder(node, placement))
                if isinstance(role := ROLE.get(node), Parameter):
                    self.parameters[role] = placement
            elif node.target in _NUMBERS:
                self.scalars[node] = self.write.graph.node_copy(node, self.scalars.__getitem__)
            elif is_operation(node):
                self._operation(node)
        add_output(self.write.graph, [(role, self._result(role, value)) for role, value in outputs(self.gm)])
        for node in reversed(self.write.graph.nodes):
            if node.op == "call_function" and not node.users:
                self.write.graph.erase_node(node)
        self.gm.graph = self.write.graph
        return self.summands

    def _operation(self, node: fx.Node) -> None:
        option = self.chosen[node]
        if ir.is_wait(node):  # nothing may use a collective's result before: it is placed again after the wait
            started = next(iter(self.shards[value_of(operands(node)[0])]))
            option = replace(option, operands=(started,), results=(started,))
        labels = carried(Change.DIVIDED, node)
        self.write.labels = labels | {SUBJECT: f"{node.name} of {module_of(node) or 'the model'}"}
        shards = [self._placed(value, placement) for value, placement in placed_operands(node, option)]
        self.write.labels = labels
        if option.lowering:
            outs = LOWERINGS[option.lowering](self.write, node, option, shards)
            for out in filter(None, outs):
                MADE_BY.set(out, self.write.maker)
        else:
            outs = self._on_shards(node, option, shards)
        for index, (value, placement, out) in enumerate(zip(results(node), option.results, outs, strict=True)):
            if placement is None or out is None:
                continue
            shape = local_shape(placement, value.shape, self.write.parts)
            if tuple(out.meta["val"].shape) != shape or out.meta["val"].dtype != value.dtype:
                raise GraphInvariantError(
                    f"{node.format_node()} as {written(placement)} gives {out.meta['val']}, and {shape} is due"
                )
            self._keep(node, index, placement, out)

    def _on_shards(self, node: fx.Node, option: Option, shards: list[fx.Node]) -> list[Any]:
        """The operation itself, on local shards and with local sizes."""
        if node in self.biased and (whole := _with_bias(*shards)):
            return [self.write.named(node.name, *whole, {})]
        if draws(node):
            wholes = [operand.meta["val"] for operand in operands(node)]
            shards = [self.write.laid_out(shard, whole) for shard, whole in zip(shards, wholes, strict=True)]
        if node.target is aten.cat.default and results(node)[0].numel():
            # One without elements is never divided: torch ignores its shape if that is [0], and minds its dtype.
            shards = [shard if shard.meta["val"].numel() else self.write.view(shard, (0,)) for shard in shards]
        remaining = iter(shards)
        args, kwargs = pytree.tree_map_only(
            fx.Node,
            lambda n: next(remaining) if isinstance(n.meta.get("val"), torch.Tensor) else self.scalars[n],
            (self._sizes(node, option), node.kwargs),
        )
        if node.target in _ALONG_ANOTHER_AXIS:
            return [self.write.on(node, shards[0])]
        if node.target in (aten.view.default, aten._unsafe_view.default):
            args = (args[0] if can_view(args[0], args[1]) else self.write.contiguous(args[0]), args[1])
        copy = self.write.named(node.name, node.target, args, kwargs)
        if isinstance(node.meta["val"], torch.Tensor):
            return [copy]
        taken = _nodes_of_results(node)
        return [self._result_of(copy, k, taken[k]) if k in taken else None for k in range(len(option.results))]

    def _result_of(self, copy: fx.Node, index: int, taken: fx.Node) -> fx.Node:
        """One of several results of an operation on shards, named as the node that takes it."""
        self.write.labels = carried(Change.DIVIDED, taken)
        return self.write.named(taken.name, operator.getitem, (copy, index), {})

    def _sizes(self, node: fx.Node, option: Option) -> tuple[Any, ...]:
        """The arguments, with sizes replaced by those of the local results."""
        args, cut, parts = list(node.args), option.results[0], self.write.parts
        if cut is None or cut == REPLICATE:
            return node.args
        shape = results(node)[0].shape
        if (position := torch_api.size_arguments().get(node.target)) is not None:
            args[position] = list(local_shape(cut, shape, parts))
        splits = is_cut(cut) and node.target in (aten.split.Tensor, aten.split_with_sizes.default)
        if splits and cut_of(cut)[0] == (args[2] if len(args) > 2 else 0) % len(shape):
            args[1] = args[1] // parts if isinstance(args[1], int) else [size // parts for size in args[1]]
        return tuple(args)

    def _keep(self, node: fx.Node, index: int, placement: Placement, part: fx.Node) -> None:
        divided = PLACEMENTS.get(_nodes_of_results(node).get(index, node), {})
        if placement != REPLICATE:
            divided = {**divided, self.write.axis: placement}
        if divided:
            PLACEMENTS.set(part, divided)
        self.shards[node, index] = {placement: part}

    def _placed(self, value: Value, after: Placement) -> fx.Node:
        """The value with placement ``after``; redistributed at most once."""
        shards, (maker, index) = self.shards[value], value
        if after not in shards:
            before, shard = next(iter(shards.items()))
            first = len(self.write.graph.nodes)
            shards[after] = self.write.place(shard, before, after, results(maker)[index].shape)
            for node in list(self.write.graph.nodes)[first:]:
                MADE_BY.set(node, self.write.maker)
                if is_cut(before) and after == REPLICATE:
                    RECOMPUTE.set(node, True)  # all-gathered again in backward instead of saved
            whole = _nodes_of_results(maker).get(index) if maker.op == "call_function" else None
            if after == REPLICATE and whole is not None and (name := captured_name(whole)):
                EQUALS.set(shards[after], name)
                if whole in PLACEMENTS:  # along other axes
                    PLACEMENTS.set(shards[after], PLACEMENTS.of(whole))
        return shards[after]

    def _result(self, role: Any, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        self.write.labels = {SUBJECT: str(role)}
        placement: Placement = REPLICATE
        if isinstance(role, Gradient) and isinstance(role.of, Parameter):
            self.write.labels = {SUBJECT: f"gradient of {role.of.fqn}"}
            placement = self.write.gradient(self.parameters[role.of])
            if placement == REPLICATE and PARTIAL in self.shards[value_of(value)]:
                self.summands.append(role.of.fqn)
                placement = PARTIAL
        return self._placed(value_of(value), placement)


def _with_bias(product: fx.Node, bias: fx.Node) -> tuple[Any, tuple[Any, ...]] | None:
    """The operator, with its arguments, that gives the product or convolution and adds its bias."""
    if product.target is aten.mm.default:
        return aten.addmm.default, (bias, *product.args)
    if product.target is aten.convolution.default and bias.target is aten.view.default:
        images, weight, _, *rest = product.args
        if (vector := bias.args[0]).meta["val"].dim() == 1:  # else it was gathered
            return aten.convolution.default, (images, weight, vector, *rest)
    return None  # it was reduced or moved


def _nodes_of_results(node: fx.Node) -> dict[int, fx.Node]:
    """The nodes that have a node's values: itself, or those that take the several results of an operation."""
    if node.op != "call_function" or isinstance(node.meta["val"], torch.Tensor):
        return {0: node}
    return {int(str(user.args[1])): user for user in node.users if user.target is operator.getitem}
