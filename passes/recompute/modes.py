"""Recomputation modes by name: which operations of every layer backward recomputes."""

from __future__ import annotations

from torch import fx

from shardgraph.ir import Parameter
from shardgraph.ir.attributes import ROLE
from shardgraph.passes.analysis.costs import node_cost
from shardgraph.passes.recompute.values import Values
from shardgraph.passes.sharding.options import moves_data


def operations_of(mode: str, gm: fx.GraphModule, values: Values) -> set[fx.Node]:
    """The operations that ``mode``, ``"full"`` or ``"selective"``, recomputes.

    ``"full"`` recomputes each whole layer from its inputs (Chen et al., 2016, https://arxiv.org/abs/1604.06174).
    ``"selective"`` saves matmuls with weights, convolutions, fused attention and collective results, which take long
    to recompute for their bytes, and recomputes the rest, including the inside of unfused attention (Korthikanti et
    al., 2022, https://arxiv.org/abs/2205.05198). Both save layer outputs and what must not be computed twice.
    """
    kept = values.once | values.leaving()
    operations = {node for node in values.makes if values.layer[node] and node not in kept}
    if mode == "full":
        return operations
    kinds = {node: node_cost(node).kind for node in operations}
    expensive = {node for node, kind in kinds.items() if kind in ("attention", "convolution", "collective")}
    products = (node for node, kind in kinds.items() if kind == "matmul")
    return operations - expensive - {node for node in products if any(map(_is_weight, node.all_input_nodes))}


def _is_weight(node: fx.Node) -> bool:
    """Whether the node is a parameter, or a view or cast of one."""
    while moves_data(node):
        node = node.args[0]  # type: ignore[assignment]
    return isinstance(ROLE.get(node), Parameter)
