"""Lowers a choice of options to a graph over local shards."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from shardgraph import ir, torch_api
from shardgraph.errors import GraphInvariantError
from shardgraph.ir import Gradient, Parameter, add_output, outputs
from shardgraph.ir.attributes import EQUALS, MADE_BY, PLACEMENTS, RECOMPUTE, ROLE, SUBJECT, Change, carried
from shardgraph.passes.analysis.modules import module_of
from shardgraph.passes.sharding.axis_builder import AxisBuilder
from shardgraph.passes.sharding.legal import Value, value_of
from shardgraph.passes.sharding.lowerings import LOWERINGS
from shardgraph.passes.sharding.options import Option, operands, results
from shardgraph.passes.sharding.placements import PARTIAL, REPLICATE, cut_of, is_cut, local_shape, written

aten = torch.ops.aten

_NUMBERS = frozenset({ir.first_row, ir.from_later, operator.sub})
"""Operators that return a rank-dependent number of another axis, and those computed from it."""
_ALONG_ANOTHER_AXIS = ir.COLLECTIVES | {ir.WAIT, ir.local_part, ir.first_only}


def lower(gm: fx.GraphModule, chosen: Mapping[fx.Node, Option], write: AxisBuilder) -> list[str]:
    """Rewrite ``gm`` in place with ``write``: every operation on this rank's shards, with redistribution between them.

    ``chosen`` has an option for every node except the output and ``getitem`` nodes. Returns the parameters whose
    gradients are left partial, to be reduced together with the sum over batches.

    Raises:
        GraphInvariantError: an operation on local shards does not have the shape or dtype that its option implies.
    """
    lowering = _Lowering(gm, chosen, write)
    lowering.run()
    return lowering.summands


class _Lowering:
    def __init__(self, gm: fx.GraphModule, chosen: Mapping[fx.Node, Option], write: AxisBuilder) -> None:
        self.gm, self.chosen, self.write, self.axis = gm, chosen, write, write.axis
        self.made: dict[Value, dict[Placement, fx.Node]] = {}
        self.scalars: dict[fx.Node, fx.Node] = {}
        self.parameters: dict[Parameter, Placement] = {}
        self.summands: list[str] = []

    def run(self) -> None:
        for node in self.gm.graph.nodes:
            if node.op in ("placeholder", "get_attr"):
                placement = self.chosen[node].results[0]
                assert placement is not None
                self._keep(node, 0, placement, self.write.placeholder(node, placement))
                if isinstance(role := ROLE.get(node), Parameter):
                    self.parameters[role] = placement
            elif node.target in _NUMBERS:
                self.scalars[node] = self.write.graph.node_copy(node, self.scalars.__getitem__)
            elif node.op == "call_function" and node.target is not operator.getitem:
                self._operation(node)
        results = [(role, self._result(role, value)) for role, value in outputs(self.gm)]
        add_output(self.write.graph, results)
        for node in reversed(self.write.graph.nodes):
            if node.op == "call_function" and not node.users:
                self.write.graph.erase_node(node)
        self.gm.graph = self.write.graph

    # -- one operation -----------------------------------------------------------------------------

    def _operation(self, node: fx.Node) -> None:
        option = self.chosen[node]
        labels = carried(Change.DIVIDED, node)
        moved = f"{node.name} of {module_of(node) or 'the model'}"
        self.write.labels = labels | {SUBJECT: moved}
        given = [
            self._placed(value_of(operand), wanted)
            for operand, wanted in zip(operands(node), option.operands, strict=True)
        ]
        self.write.labels = labels
        if option.lowering:
            made = LOWERINGS[option.lowering](self.write, node, option, given)
            for part in filter(None, made):
                MADE_BY.set(part, self.write.maker)
        else:
            made = self._same(node, option, given)
        self._check(node, option, made)
        for index, (placement, part) in enumerate(zip(option.results, made, strict=True)):
            if placement is not None:
                self._keep(node, index, placement, part)

    def _same(self, node: fx.Node, option: Option, given: list[fx.Node]) -> list[Any]:
        """The operation itself, on local shards and with local sizes."""
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
            wholes = [operand.meta["val"] for operand in operands(node)]
            given = [self.write.laid_out(part, whole) for part, whole in zip(given, wholes, strict=True)]
        places = iter(given)
        args, kwargs = pytree.tree_map_only(
            fx.Node,
            lambda n: next(places) if isinstance(n.meta.get("val"), torch.Tensor) else self.scalars[n],
            (self._sizes(node, option), node.kwargs),
        )
        if node.target in _ALONG_ANOTHER_AXIS:
            return [self.write.on(node, given[0])]
        if node.target in (aten.view.default, aten._unsafe_view.default):
            args = (self.write.contiguous(args[0]) if _cannot_view(args[0], args[1]) else args[0], args[1])
        copy = self.write.named(node.name, node.target, args, kwargs)
        if isinstance(node.meta["val"], torch.Tensor):
            return [copy]
        self.write.labels = {**self.write.labels, MADE_BY: self.write.maker}
        return [
            None if placement is None else self.write.call(operator.getitem, copy, index)
            for index, placement in enumerate(option.results)
        ]

    def _sizes(self, node: fx.Node, option: Option) -> tuple[Any, ...]:
        """The arguments, with sizes replaced by those of the local results."""
        args = list(node.args)
        cut = option.results[0]
        if cut is None or cut == REPLICATE:
            return tuple(args)
        if node.target in torch_api.size_arguments():
            args[torch_api.size_arguments()[node.target]] = list(
                local_shape(cut, results(node)[0].shape, self.write.parts)
            )
        if is_cut(cut) and node.target in (aten.split.Tensor, aten.split_with_sizes.default):
            dim, _ = cut_of(cut)
            whole = results(node)[0].dim()
            if dim == (args[2] if len(args) > 2 else 0) % whole:
                sizes = args[1]
                parts = self.write.parts
                args[1] = sizes // parts if isinstance(sizes, int) else [size // parts for size in sizes]
        return tuple(args)

    def _check(self, node: fx.Node, option: Option, made: list[Any]) -> None:
        for value, placement, part in zip(results(node), option.results, made, strict=True):
            if placement is None:
                continue
            expected = local_shape(placement, value.shape, self.write.parts)
            if tuple(part.meta["val"].shape) != expected or part.meta["val"].dtype != value.dtype:
                raise GraphInvariantError(
                    f"{node.format_node()} as {written(placement)} gives {part.meta['val']}, and {expected} is due"
                )

    # -- values ------------------------------------------------------------------------------------

    def _keep(self, node: fx.Node, index: int, placement: Placement, part: fx.Node) -> None:
        if placement != REPLICATE:
            PLACEMENTS.set(part, {**PLACEMENTS.get(part, {}), self.axis: placement})
        self.made[node, index] = {placement: part}

    def _placed(self, value: Value, wanted: Placement) -> fx.Node:
        """The value with placement ``wanted``; redistributed at most once."""
        here = self.made[value]
        if wanted not in here:
            before, part = next(iter(here.items()))
            first = len(self.write.graph.nodes)
            whole = results(value[0])[value[1]]
            here[wanted] = self.write.place(part, before, wanted, whole.shape)
            for node in list(self.write.graph.nodes)[first:]:
                MADE_BY.set(node, self.write.maker)
                if is_cut(before) and wanted == REPLICATE:
                    RECOMPUTE.set(node, True)  # all-gathered again in backward instead of saved
            if wanted == REPLICATE and value[0].op == "call_function" and value[1] == 0:
                EQUALS.set(here[wanted], value[0].name)
        return here[wanted]

    def _result(self, role: Any, value: Any) -> Any:
        if not isinstance(value, fx.Node):
            return value
        self.write.labels = {SUBJECT: str(role)}
        wanted: Placement = REPLICATE
        if isinstance(role, Gradient) and isinstance(role.of, Parameter):
            self.write.labels = {SUBJECT: f"gradient of {role.of.fqn}"}
            wanted = self.write.gradient(self.parameters[role.of])
            if wanted == REPLICATE and PARTIAL in self.made[value_of(value)]:
                self.summands.append(role.of.fqn)
                wanted = PARTIAL
        return self._placed(value_of(value), wanted)


def _cannot_view(tensor: fx.Node, shape: list[int]) -> bool:
    """Whether the tensor's strides rule out a view in another shape."""
    try:
        torch.empty_strided(tensor.meta["val"].shape, tensor.meta["val"].stride(), device="meta").view(shape)
    except RuntimeError:
        return True
    return False
