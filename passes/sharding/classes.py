"""Names operations, and groups the same operation in equal layers into one class, so that it is decided once."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Hashable, Mapping

import torch
from torch import fx
from torch.distributed.tensor.placement_types import Placement

from shardgraph.ir import Parameter
from shardgraph.ir.attributes import ROLE
from shardgraph.passes.analysis.names import module_of, names_of
from shardgraph.passes.sharding.options import operands, operations
from shardgraph.plans.annotations.constrain import CONSTRAIN


def written_names(gm: fx.GraphModule) -> dict[fx.Node, str]:
    """The names that rules use for the operations of a graph."""
    return {node: f"{module}/{kind}.{number}" for node, (module, kind, number) in names_of(operations(gm)).items()}


def pattern_of(name: str) -> str:
    """The pattern that matches an operation in every layer: numbers in its module's name become wildcards."""
    module, _, operation = name.partition("/")
    return re.sub(r"(?<![^.])\d+(?![^.])", "*", module) + "/" + operation


def classes_of(gm: fx.GraphModule, fixed: Mapping[str, Placement], least: int = 3) -> dict[fx.Node, Hashable]:
    """A key for every node; nodes with equal keys do the same in layers that run the same operations.

    Layers are modules whose names differ in one number, such as ``model.layers.7``. To be grouped, each must hold at
    least two matrices, and all must have the same operations in the same order, and the same annotations and ``fixed``
    placements (parameters by name). There are at least ``least`` of them.
    """
    layers: dict[str, dict[str, list[fx.Node]]] = defaultdict(lambda: defaultdict(list))
    for node in gm.graph.nodes:
        role = ROLE.get(node)
        parts = (role.fqn if isinstance(role, Parameter) else module_of(node)).split(".")
        for at, part in enumerate(parts):
            if part.isdigit():
                layers[".".join(parts[:at])][part].append(node)
    keys: dict[fx.Node, Hashable] = {}
    for stack in sorted(layers, key=len):  # outer stacks first: a layer may contain stacks of its own
        alike: dict[Hashable, list[list[fx.Node]]] = defaultdict(list)
        for nodes in layers[stack].values():
            alike[tuple(_kind(node, fixed) for node in nodes)].append(nodes)
        for number, members in enumerate(alike.values()):
            matrices = [n for n in members[0] if isinstance(ROLE.get(n), Parameter) and n.meta["val"].dim() > 1]
            if len(members) >= least and len(matrices) > 1:
                for nodes in members:
                    for position, node in enumerate(nodes):
                        keys.setdefault(node, (stack, number, position))
    return {node: keys.get(node, node.name) for node in gm.graph.nodes}


def _kind(node: fx.Node, fixed: Mapping[str, Placement]) -> Hashable:
    values = [node.meta.get("val"), *(operand.meta["val"] for operand in operands(node))]
    forms = tuple((v.shape, v.dtype) if isinstance(v, torch.Tensor) else None for v in values)
    constants = str(fx.map_arg((node.args, node.kwargs), lambda n: None))
    role = ROLE.get(node)
    placed = fixed.get(role.fqn) if isinstance(role, Parameter) else None
    marks = tuple(str(user.args[1:]) for user in node.users if user.target is CONSTRAIN)
    return node.op, str(node.target) if node.op == "call_function" else "", forms, constants, placed, marks
