"""The placement problem of a joint graph: legal options, costs and constraints."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from typing import ClassVar

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from shardgraph.ir import Gradient, Input, Parameter, outputs, placeholders
from shardgraph.ir.attributes import ROLE
from shardgraph.passes.analysis.costs import node_costs
from shardgraph.passes.sharding import ring_attention  # noqa: F401 (registers lowerings)
from shardgraph.passes.sharding.choose import Placements
from shardgraph.passes.sharding.constraints import Constraints
from shardgraph.passes.sharding.dtensor_rules import Refused
from shardgraph.passes.sharding.legal import Legal, Value, placed_values, reached, value_of
from shardgraph.passes.sharding.options import Option, is_operation, moves_data, results
from shardgraph.passes.sharding.placements import PARTIAL, REPLICATE, blocks, cut_of, is_cut
from shardgraph.passes.sharding.pricing import PlacementPrices
from shardgraph.passes.sharding.rules import RINGS
from shardgraph.passes.sharding.sequences import connected, input_sequences, stripes


class OperatorPlacements(Placements):
    """The legal options of a joint graph's operations over ``parts`` ranks under ``constraints``, and their costs.

    ``style`` is the axis's, see :class:`shardgraph.plans.plan.Plan`. ``refused`` counts what DTensor's strategies
    refuse. ``rings``: attention may pass keys and values round the ranks; only one axis of a plan may, since its steps
    are not attention over whole sequences, which another ring would divide.

    Raises:
        PlanError: the style is ``"context"`` and the sequences cannot be sharded.
    """

    ends_as: ClassVar = {REPLICATE: "result"}

    def __init__(
        self, gm: fx.GraphModule, parts: int, style: str, constraints: Constraints, refused: Refused, rings: bool = True
    ) -> None:
        self._marks, self._sequence = constraints.marks, style != "whole"
        self._weights, self._gradients = _weights(gm), _gradients(gm)
        self._of_vectors = _of_vectors(gm)
        self._marked = {value_of(mark.args[0]) for mark in constraints.marks}
        self._prices = PlacementPrices(node_costs(gm, fused=False), parts, self._sequence)
        self._steps = 1.0 if style == "context" else self._prices.steps  # the context's parameters are always whole
        starts = stripes(gm, parts) if style == "context" else {}
        activations = constraints.cut_activations()
        required = constraints.cut_parameters(gm) | activations
        legal = Legal(gm, parts, starts | {v: {cut, *starts.get(v, ())} for v, cut in required.items()}, refused)
        sequences = connected(legal, starts) if starts else {}
        barred = {} if starts else _barred(legal, _unsharded_dimensions(gm, parts, self._sequence), activations)

        def possible(node: fx.Node, option: Option) -> bool:
            return (rings or option.lowering not in RINGS) and all(
                allowed(v, p) for v, p in placed_values(node, option)
            )

        def allowed(value: Value, placement: Placement) -> bool:
            if starts:
                return not is_cut(placement) or placement in sequences.get(value, ())
            return placement not in barred.get(value, ())

        options: dict[fx.Node, list[Option]] = {}
        for node in gm.graph.nodes:
            if node in self._marks:
                options[node] = [Option((self._marks[node],), (self._marks[node],))]
            elif is_operation(node) or node.op in ("placeholder", "get_attr"):
                every = legal.options(node) if is_operation(node) else _stored(node, constraints.parameters, legal)
                options[node] = [option for option in every if possible(node, option)]
        self.gm, self.options, self.fixed = gm, options, constraints.parameters

    def seconds(self, node: fx.Node, option: Option) -> float:
        """The operation's or the optimizer's."""
        if node in self._marks:
            return 0.0
        return self._prices.operation(node, option) if is_operation(node) else self._prices.parameter(node, option)

    def move(self, value: Value, before: Placement, after: Placement) -> float:
        """Seconds to redistribute a value from one placement to another; infinite if not allowed."""
        node, index = value
        if before != after and node in self._weights and before != REPLICATE:
            return math.inf  # weights are not redistributed: their other operand is gathered instead
        scattered = before == PARTIAL and is_cut(after) and node not in self._weights
        if scattered and not self._sequence and value not in self._marked:
            return math.inf
        steps = self._steps if node in self._gradients else 1.0
        if before == PARTIAL and after == REPLICATE and node in self._of_vectors:
            return steps * self._prices.summed_together(results(node)[index])
        return steps * self._prices.move(before, after, results(node)[index])

    def ends(self) -> Iterator[tuple[Value, Placement | fx.Node]]:
        """Gradients of parameters end as their parameters, all else replicated."""
        owners = placeholders(self.gm)
        for role, value in outputs(self.gm):
            if isinstance(value, fx.Node):
                of_parameter = isinstance(role, Gradient) and isinstance(role.of, Parameter)
                yield value_of(value), owners[role.of] if of_parameter else REPLICATE


def _stored(node: fx.Node, fixed: Mapping[str, Placement], legal: Legal) -> list[Option]:
    """The options of a placeholder or constant: only parameters are sharded."""
    placements: list[Placement] = [REPLICATE]
    if isinstance(role := ROLE.get(node), Parameter):
        placements = [fixed[role.fqn]] if role.fqn in fixed else [REPLICATE, *sorted(legal.cuts[node, 0], key=cut_of)]
    return [Option((), (placement,)) for placement in placements]


def _barred(
    legal: Legal, starts: Mapping[Value, Sequence[Placement]], required: Mapping[Value, Placement]
) -> Mapping[Value, set[Placement]]:
    """Shardings that follow from those in ``starts``, except from the ones that lead to a ``required`` sharding."""
    if not required:
        return reached(legal, starts)
    barred: dict[Value, set[Placement]] = defaultdict(set)
    for start in ({value: [cut]} for value, cuts in starts.items() for cut in cuts):
        follows = reached(legal, start)
        if not any(cut in follows.get(value, ()) for value, cut in required.items()):
            for value, cuts in follows.items():
                barred[value] |= cuts
    return barred


def _unsharded_dimensions(gm: fx.GraphModule, parts: int, sequence: bool) -> dict[Value, list[Placement]]:
    """Input shardings that no operation may follow: along the batch, along the sequence unless ``sequence``, and in
    stripes of the sequence, in which products would have whole weights: that is the context's."""
    inputs = [node for role, node in placeholders(gm).items() if isinstance(role, Input)]
    tensors = [node for node in inputs if isinstance(node.meta.get("val"), torch.Tensor)]
    cuts: dict[Value, list[Placement]] = {(node, 0): [blocks(0, 1)] for node in tensors if node.meta["val"].dim()}
    for (node, index), dim in input_sequences(gm).items():
        length = results(node)[index].shape[dim]
        cuts[node, index] += [] if sequence else [blocks(dim, 1)]
        cuts[node, index] += [blocks(dim, length // parts)] if length % parts == 0 < length else []
    return cuts


def _weights(gm: fx.GraphModule) -> set[fx.Node]:
    """Parameters of at least two dimensions, and their views and casts."""
    weights: set[fx.Node] = set()
    for node in gm.graph.nodes:
        matrix = isinstance(ROLE.get(node), Parameter) and node.meta["val"].dim() > 1
        if matrix or (moves_data(node) and weights.issuperset(node.all_input_nodes)):
            weights.add(node)
    return weights


def _gradients(gm: fx.GraphModule) -> set[fx.Node]:
    """Gradients of parameters of at least two dimensions, and what they are views and casts of."""
    gradients: set[fx.Node] = set()
    for role, value in outputs(gm):
        of_parameter = isinstance(role, Gradient) and isinstance(role.of, Parameter)
        while of_parameter and isinstance(value, fx.Node) and value.meta["val"].dim() > 1:
            gradients.add(value)
            value = value.all_input_nodes[0] if moves_data(value) else None
    return gradients


def _of_vectors(gm: fx.GraphModule) -> set[fx.Node]:
    """Gradients of parameters of one dimension, whose sums over ranks are started together."""
    gradients = [value for role, value in outputs(gm) if isinstance(role, Gradient) and isinstance(role.of, Parameter)]
    return {value for value in gradients if isinstance(value, fx.Node) and value.meta["val"].dim() == 1}
