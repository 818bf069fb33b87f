"""Assigns the operations of a joint graph to pipeline stages."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import fx

from shardgraph.ir import WAIT, Buffer, Input, Mutation, Parameter, is_collective, outputs, placeholders
from shardgraph.ir.attributes import SEQUENCE
from shardgraph.passes.analysis.random_state import draws
from shardgraph.passes.partition.split import forward_nodes
from shardgraph.passes.sharding.options import moves_data

aten = torch.ops.aten


@dataclass(frozen=True)
class Assignment:
    """``home`` is the stage of each operation; those in ``anywhere`` are computed by every stage that needs them.

    Operations in ``anywhere`` depend only on inputs and buffers, which all ranks have (positions, masks, rotary
    tables), or are views or casts of a parameter. ``inside`` is the forward nodes. ``count`` is the number of stages.
    """

    home: dict[fx.Node, int]
    anywhere: set[fx.Node]
    inside: set[fx.Node]
    count: int


def assign_stages(gm: fx.GraphModule, begins: Sequence[fx.Node]) -> Assignment:
    """Assign every operation to a stage; stage ``i + 1`` begins with the forward operation ``begins[i]``.

    Forward is cut in graph order. A backward operation is in the stage of the operation that it differentiates, and a
    sum of gradients in the stage that computes the last of them, so that one value and not each partial is sent on;
    gradients are only sent to earlier stages.
    """
    inside = forward_nodes(gm)
    order = {node: i for i, node in enumerate(gm.graph.nodes)}
    starts = [order[node] for node in begins]
    anywhere = computed_anywhere(gm)
    home = {node: bisect_right(starts, order[node]) for node in gm.graph.nodes if node in inside}
    for node in gm.graph.nodes:
        if node in inside and node.target is WAIT:
            home[node.args[0]] = home[node]  # a collective is awaited where it starts
    _sink(gm, home, inside, anywhere)
    _assign_backward(gm, home, inside, anywhere, len(begins))
    return Assignment(home, anywhere, inside, len(begins) + 1)


def computed_anywhere(gm: fx.GraphModule) -> set[fx.Node]:
    """The nodes that each stage computes for itself; see :class:`Assignment`."""
    anywhere = {node for role, node in placeholders(gm).items() if isinstance(role, (Input, Buffer, Parameter))}
    anywhere |= {node for node in gm.graph.nodes if node.op == "get_attr"}
    of_parameters = {node for role, node in placeholders(gm).items() if isinstance(role, Parameter)}
    written = {value for role, value in outputs(gm) if isinstance(role, Mutation)}
    for node in gm.graph.nodes:
        if node.op != "call_function" or node in written or draws(node) or is_collective(node) or node.target is WAIT:
            continue
        if anywhere.issuperset(node.all_input_nodes):
            if of_parameters.isdisjoint(node.all_input_nodes):
                anywhere.add(node)
            elif moves_data(node):
                anywhere.add(node)
                of_parameters.add(node)
    return anywhere


def _sink(gm: fx.GraphModule, home: dict[fx.Node, int], inside: set[fx.Node], anywhere: set[fx.Node]) -> None:
    """Move operations that only later stages use there, if their one operand is no larger and can be sent instead."""
    for node in reversed(gm.graph.nodes):
        if node not in inside or node in anywhere or node.op != "call_function":
            continue
        users = [home[user] for user in node.users if user in home]
        if not users or len(users) < len(node.users) or min(users) <= home[node]:
            continue
        operands = [value for value in node.all_input_nodes if value not in anywhere]
        light = moves_data(node) or is_collective(node) or node.target in (WAIT, aten.expand.default)
        if light and len(operands) == 1 and operands[0] in home:
            before, after = (getattr(value.meta.get("val"), "nbytes", 0) for value in (operands[0], node))
            if before <= after:
                home[node] = min(users)


def _assign_backward(
    gm: fx.GraphModule, home: dict[fx.Node, int], inside: set[fx.Node], anywhere: set[fx.Node], last: int
) -> None:
    # A view of a parameter is in no stage of its own, wherever the graph has it.
    numbered = [node for node in gm.graph.nodes if node in inside and node not in anywhere and node in SEQUENCE]
    # The first of a number: an operation that needs no gradient has the number of the last one before it that does.
    forward = {SEQUENCE.of(node): home[node] for node in reversed(numbered)}
    # In the backward of a torch.autograd.Function every operation has the last number of forward.
    shared = max(forward, default=None)
    waiting: list[fx.Node] = []
    for node in gm.graph.nodes:
        if node.op == "placeholder" and node not in anywhere and node not in home:
            home[node] = last  # a tangent
        if node.op != "call_function" or node in inside or node in anywhere:
            continue
        stages = [home[value] for value in node.all_input_nodes if value not in inside and value in home]
        number = SEQUENCE.get(node)
        if node.target is not aten.add.Tensor and number in forward and (stages or number != shared):
            stages.append(forward[number])
        if stages:
            home[node] = min(stages)
        else:
            waiting.append(node)
    for node in reversed(waiting):  # computed from forward values alone: in the stage that uses it
        home[node] = max((home[user] for user in node.users if user in home), default=0)
