"""Finds which parameters of a model are experts, from how they are used."""

from __future__ import annotations

import torch
from torch import fx

from shardgraph.errors import PlanError
from shardgraph.ir import Parameter, placeholders
from shardgraph.ir.attributes import ROLE
from shardgraph.passes.experts.problem import ExpertOptions
from shardgraph.passes.experts.rules import same_on_all_ranks
from shardgraph.passes.sharding.layout_rules import order_of
from shardgraph.sizes import divisors

aten = torch.ops.aten

_PERMUTATIONS = (aten.permute.default, aten.transpose.int)
_SIZES = (aten.view.default, aten._unsafe_view.default, aten.expand.default)
_WITHIN_ROWS = (aten._to_copy.default, aten.clone.default, aten.detach.default, aten.alias.default)


def find_experts(gm: fx.GraphModule, axis: str, parts: int) -> set[str]:
    """Names of the parameters with one expert per row (dim 0), to be sharded over ``parts`` ranks of ``axis``.

    These are the three-dimensional parameters that ``bmm`` multiplies, batched over dim 0, with values that depend on
    the batch, and the biases that are combined row by row with the result.

    Raises:
        PlanError: there are no experts, or their number is not a multiple of ``parts``.
    """
    matrices = _matrices(gm)
    if not matrices:
        raise PlanError(
            f"the axis {axis!r} is for experts, and this model has none that can be found: no parameter of three "
            "dimensions is multiplied with the batch by bmm over its first, as those of shardgraph.nn.MoE are "
            "(experts that are picked by index are not: docs/moe.md says what divides those). Use a plan without 'ep', "
            "or write 'split(0)' for the experts' parameters in the plan"
        )
    counts = {fqn: node.meta["val"].shape[0] for fqn, node in matrices.items()}
    for fqn, count in counts.items():
        if count % parts:
            works = divisors(*counts.values())
            raise PlanError(
                f"{fqn!r} has {count} experts, which {parts} ranks of {axis!r} cannot divide equally: "
                f"{'give the axis ' + ' or '.join(map(str, works)) + ' ranks' if works else 'no size of it can'}"
            )
    legal = ExpertOptions(gm, parts, matrices)
    known = [role for role, node in placeholders(gm).items() if legal.known.get((node, 0))]
    return {role.fqn for role in known if isinstance(role, Parameter)}


def _matrices(gm: fx.GraphModule) -> dict[str, fx.Node]:
    common = same_on_all_ranks(gm)
    from_parameter: dict[fx.Node, fx.Node] = {}
    matrices: dict[str, fx.Node] = {}
    for node in gm.graph.nodes:
        role = ROLE.get(node)
        if isinstance(role, Parameter) and node.meta["val"].dim() == 3:
            from_parameter[node] = node
        elif _keeps_experts(node):
            if node.args[0] in from_parameter:
                from_parameter[node] = from_parameter[node.args[0]]
        elif node.target in (aten.bmm.default, aten.baddbmm.default):
            factors = node.args[-2:]
            for factor, other in (factors, factors[::-1]):
                if factor in from_parameter and other not in common:
                    matrices[ROLE.of(from_parameter[factor]).fqn] = from_parameter[factor]
    return matrices


def _keeps_experts(node: fx.Node) -> bool:
    """Whether row ``e`` of the result has the elements of row ``e`` of the operand, in three dimensions again."""
    if node.target in _SIZES:  # of the sizes that there are, as torch.vmap writes them
        return bool(node.args[0].meta["val"].shape == node.meta["val"].shape)
    return node.target in _WITHIN_ROWS or (node.target in _PERMUTATIONS and order_of(node)[0] == 0)
