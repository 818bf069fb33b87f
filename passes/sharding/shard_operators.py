"""Operator sharding: computation is split over the ranks of a mesh axis, as Megatron-LM does by hand.

Placements are chosen for the whole joint graph (:mod:`shardgraph.passes.sharding`), not by layer names.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from shardgraph.errors import PlanError
from shardgraph.ir import Parameter
from shardgraph.ir.attributes import ROLE, Change, carried
from shardgraph.passes.base import Context, Pass
from shardgraph.passes.builder import Builder
from shardgraph.passes.sharding.activations import choose
from shardgraph.passes.sharding.axis_builder import AxisBuilder
from shardgraph.passes.sharding.constraints import Constraints, marks_of
from shardgraph.passes.sharding.dtensor_rules import Refused, notes_of
from shardgraph.passes.sharding.legal import has_rule
from shardgraph.passes.sharding.lower import lower
from shardgraph.passes.sharding.options import operations
from shardgraph.passes.sharding.placements import REPLICATE, blocks, cut_of, divides, is_cut, local_shape
from shardgraph.passes.sharding.problem import OperatorPlacements
from shardgraph.plans.annotations.kinds import Placement as PlacementAnnotation
from shardgraph.plans.annotations.match import matches, written
from shardgraph.plans.parameter_plan import AUTO, split_text
from shardgraph.plans.parameter_plan import REPLICATE as REPLICATE_TEXT
from shardgraph.sizes import format_bytes

aten = torch.ops.aten


@dataclass(frozen=True)
class ShardOperators(Pass):
    """Takes a joint graph; gives one in which every rank of ``axis`` computes its shard.

    All ranks of the axis have the same inputs and results. In the style ``"whole"`` activations between sharded
    products are replicated, with ``"sequence"`` they are sharded along the sequence (Korthikanti et al., 2022,
    https://arxiv.org/abs/2205.05198), and with ``"context"`` only the sequence is sharded
    (:mod:`shardgraph.passes.sharding.ring_attention`). An axis of one rank leaves the graph as it is.

    Must not change: the graph's inputs and outputs, except that parameters and their gradients are sharded. A partial
    gradient stays partial, as ``context.sums`` says.
    """

    axis: str
    style: str = "whole"

    name = "shard-operators"
    provides = frozenset({"sharded-operators"})
    excludes = frozenset({"sharded-parameters", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        parts, position = context.sizes[self.axis], context.plan.axes.index(self.axis)
        if parts == 1:
            replicate_undecided(context, position)
            return
        biased = _free_operands(gm, context)
        _note_unknown(gm, context)
        fixed = {
            fqn: blocks(*entry.splits[position]) if position in entry.splits else REPLICATE
            for fqn, entry in context.parameters.items()
            if position in entry.splits or entry.placements[position] == REPLICATE_TEXT
        }
        constraints = Constraints(fixed, marks_of(gm, self.axis, parts))
        refused = Refused()
        try:
            placements = OperatorPlacements(gm, parts, self.style, constraints, refused, self._rings(context))
            chosen = choose(gm, placements, self.axis, context)
        except PlanError as error:
            if context.plan.activations is not None:  # this error names the operation's rule in the plan
                raise
            raise self._impossible(gm, context, fixed) or error from None
        context.notes.extend(notes_of(refused))
        for node, option in chosen.items():
            if isinstance(role := ROLE.get(node), Parameter):
                record_placement(context, role.fqn, position, option.results[0])
        replicate_undecided(context, position)  # those that the graph does not use
        for fqn in lower(gm, chosen, AxisBuilder(fx.Graph(), context.values, self.axis), biased):
            context.sums[fqn] = (*context.sums.get(fqn, ()), self.axis)

    def _rings(self, context: Context) -> bool:
        """Whether attention may be a ring along this axis: that of the context has it, or else the only one."""
        return self.style == "context" or sum(context.sizes[axis] > 1 for axis, _ in context.plan.operators) == 1

    def _impossible(self, gm: fx.GraphModule, context: Context, fixed: Mapping[str, Placement]) -> PlanError | None:
        """The error for the first parameter annotation that cannot be met even alone."""
        parts, rings = context.sizes[self.axis], self._rings(context)

        def possible(placements: Mapping[str, Placement]) -> bool:
            try:
                OperatorPlacements(gm, parts, self.style, Constraints(placements, {}), Refused(), rings).solve()
            except PlanError:
                return False
            return True

        for pattern, annotation in context.plan.annotations:
            annotated = {fqn: placement for fqn, placement in fixed.items() if matches(pattern, fqn)}
            here = isinstance(annotation, PlacementAnnotation) and annotation.mesh_dim in (None, self.axis)
            if here and annotated and not possible(annotated):
                alone = (fqn for fqn, placement in annotated.items() if not possible({fqn: placement}))
                fqn = next(alone, next(iter(annotated)))
                shape = context.shapes[fqn]
                cuts = [cut for cut in (blocks(dim, 1) for dim in range(len(shape))) if divides(cut, shape, parts)]
                works = [f"shard({cut_of(cut)[0]}, {self.axis!r})" for cut in cuts if possible({fqn: cut})]
                return PlanError(
                    f"{written((pattern, annotation))} cannot be for {fqn!r} of shape {list(shape)}: no operation that "
                    f"uses it can be divided so; {', '.join([*works, f'replicate({self.axis!r})'])} would work"
                )
        return None


def replicate_undecided(context: Context, position: int) -> None:
    """Record that parameters are whole along the axis at ``position``, of which no plan or pass says where they are."""
    for fqn, entry in context.parameters.items():
        if entry.placements[position] == AUTO:
            record_placement(context, fqn, position, REPLICATE)


def record_placement(context: Context, fqn: str, position: int, placement: Placement | None) -> None:
    """Record in the context a parameter's placement along the axis at ``position``, and its local shape."""
    text = REPLICATE_TEXT
    if is_cut(placement):
        text = split_text(*cut_of(placement))
        shape, size = context.shapes[fqn], context.plan.mesh[position][1]
        context.shapes[fqn] = torch.Size(local_shape(placement, shape, size))
    record_text(context, fqn, position, text)


def record_text(context: Context, fqn: str, position: int, text: str) -> None:
    """Record a parameter's placement along the axis at ``position`` as plans write it."""
    entry = context.parameters[fqn]
    placements = (*entry.placements[:position], text, *entry.placements[position + 1 :])
    context.parameters[fqn] = context.plan.storable(fqn, replace(entry, placements=placements))


def _note_unknown(gm: fx.GraphModule, context: Context) -> None:
    """Note operations that every rank computes in full because no rule says how to shard them."""
    unknown: dict[str, list[int]] = defaultdict(list)
    for node in operations(gm):
        value = node.meta.get("val")
        if isinstance(value, torch.Tensor) and value.numel() > 1 and not has_rule(node):
            unknown[str(node.target)].append(value.nbytes)
    for name, sizes in unknown.items():
        context.notes.append(
            f"{name} x{len(sizes)} ({format_bytes(sum(sizes))} of results): no rule says how it may be divided, so "
            "every rank does all of it"
        )


_CONSTANTS = {aten.new_zeros.default: 0, aten.new_ones.default: 1}


def _free_operands(gm: fx.GraphModule, context: Context) -> set[fx.Node]:
    """Rewrite operations so that placements of their operands are independent. Returns the additions of biases.

    A bias is added after its product or convolution: a partial product is reduced before. ``new_zeros`` becomes
    ``full``: the operand that gives it dtype and device may have any placement.
    """
    biased = set()
    for node in list(gm.graph.nodes):
        build = Builder(gm.graph, context.values, carried(Change.REWRITTEN, node), after=node.prev)
        if node.target is aten.addmm.default and not node.kwargs:
            bias, left, right = node.args
            value = build.call(aten.add.Tensor, build.call(aten.mm.default, left, right), bias)
            biased.add(value)
        elif node.target is aten.convolution.default and node.args[2] is not None:
            images, weight, bias, *rest = node.args
            shape = [bias.meta["val"].shape[0], *[1] * (node.meta["val"].dim() - 2)]
            bias = build.call(aten.view.default, bias, shape)
            value = build.call(aten.add.Tensor, build.call(node.target, images, weight, None, *rest), bias)
            biased.add(value)
        elif node.target in _CONSTANTS and not node.kwargs.get("pin_memory"):
            options = {"dtype": node.meta["val"].dtype, "device": node.meta["val"].device}
            value = build.call(aten.full.default, node.args[1], _CONSTANTS[node.target], **options)
        else:
            continue
        node.replace_all_uses_with(value)
        gm.graph.erase_node(node)
    return biased
