"""Expert parallelism: experts are sharded over the ranks of a mesh axis, and tokens are exchanged by all-to-all.

Each rank of the axis has its own batch, as in GShard (Lepikhin et al., 2020, https://arxiv.org/abs/2006.16668) and
DeepSpeed-MoE (Rajbhandari et al., 2022, https://arxiv.org/abs/2201.05596): outside the experts it is a data axis.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from torch import fx
from torch.distributed.tensor import Shard

from shardgraph.ir.operations import makes_view
from shardgraph.passes.base import Context, Pass
from shardgraph.passes.experts.exchange import ExchangeBuilder
from shardgraph.passes.experts.find import find_experts
from shardgraph.passes.experts.problem import ExpertPlacements
from shardgraph.passes.sharding.activations import choose
from shardgraph.passes.sharding.legal import placed_operands
from shardgraph.passes.sharding.lower import lower
from shardgraph.passes.sharding.options import Option
from shardgraph.passes.sharding.placements import REPLICATE
from shardgraph.passes.sharding.shard_operators import record_placement, replicate_undecided
from shardgraph.plans.plan import AUTO


@dataclass(frozen=True)
class DivideExperts(Pass):
    """Takes a joint graph; gives one in which every rank of ``axis`` has its shard of the experts.

    Parameters that the plan splits along the axis are the experts; if the plan does not decide,
    :func:`~shardgraph.passes.experts.find.find_experts` does. Experts process the tokens of all ranks, sent by
    all-to-all and returned by another, so their gradients are sums over the ranks of the axis. An axis of one rank
    leaves the graph as it is.

    Must not change: the graph's inputs and outputs, except for experts and their gradients.
    """

    axis: str

    name = "divide-experts"
    provides = frozenset({"divided-experts"})
    excludes = frozenset({"divided-experts", "sharded-parameters", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        parts, position = context.sizes[self.axis], context.plan.axes.index(self.axis)
        if parts == 1:
            replicate_undecided(context, position)
            return
        undecided = {fqn for fqn, entry in context.parameters.items() if entry.placements[position] == AUTO}
        experts = {fqn for fqn, entry in context.parameters.items() if position in entry.splits}
        if undecided:
            experts |= undecided & find_experts(gm, self.axis, parts)
        for fqn in context.parameters:
            record_placement(context, fqn, position, Shard(0) if fqn in experts else REPLICATE)
        chosen = choose(gm, ExpertPlacements(gm, parts, experts), self.axis, context)
        _note_gathered(chosen, context)
        lower(gm, chosen, ExchangeBuilder(fx.Graph(), context.values, self.axis))


def _note_gathered(chosen: dict[fx.Node, Option], context: Context) -> None:
    """Note the operations for which the weights of all experts are gathered."""
    users: Counter[str] = Counter()
    for node, option in chosen.items():
        for (source, index), placement in placed_operands(node, option):
            if placement == REPLICATE and isinstance(chosen[source].results[index], Shard):
                user = node
                while makes_view(user.target) and user.users:
                    user = next(iter(user.users))
                users[str(user.target)] += 1
    for name, count in users.items():
        context.notes.append(
            f"{name} x{count}: no rule says how it may be done on a part of the experts, so weights of all experts are "
            "gathered for it"
        )
