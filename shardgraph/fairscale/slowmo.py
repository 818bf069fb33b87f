"""FairScale's SlowMoDistributedDataParallel is the plan ``"local-sgd"`` with :class:`shardgraph.SlowMo`."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardgraph.api.compile import compile
from shardgraph.arguments import BOOL, MODEL, POSITIVE, WHOLE, checked, one_of
from shardgraph.errors import expect
from shardgraph.optim.gossip import StochasticGradientPush
from shardgraph.optim.local_sgd import MOMENTUM, SlowMo


class SlowMoDistributedDataParallel(nn.Module):
    """``fairscale.experimental.nn.data_parallel.SlowMoDistributedDataParallel``: each node trains a copy of ``module``,
    whose gradients its ranks average; call :meth:`perform_slowmo` after each step of the optimizer.

    ``.module`` is the compiled module. Slow momentum is sharded over all nodes.

    Args:
        module: any module, equal on all ranks; its parameters are replaced in place.
        nprocs_per_node: ranks that share a copy.
        broadcast_buffers: has no effect: buffers are averaged over the ranks of a node in forward, and over nodes with
            the parameters.
        slowmo_base_algorithm: what copies do between outer steps: ``"localsgd"``, or ``"sgp"`` for
            :class:`shardgraph.StochasticGradientPush`.
        slowmo_momentum: of the outer step.
        slowmo_memory_efficient: has no effect: slow momentum is always sharded.
        slowmo_frequency: steps between outer steps.
        slowmo_lr: of the outer step.
        slowmo_num_shards: has no effect: there are as many shards as nodes.
        localsgd_frequency: steps between averages of the parameters, with ``"localsgd"``.
        options: of :func:`shardgraph.compile`.

    Raises:
        ShardGraphError: an option cannot be.
    """

    @checked(
        module=MODEL,
        nprocs_per_node=WHOLE,
        broadcast_buffers=BOOL,
        slowmo_base_algorithm=one_of(["localsgd", "sgp"]),
        slowmo_momentum=MOMENTUM,
        slowmo_memory_efficient=BOOL,
        slowmo_frequency=WHOLE,
        slowmo_lr=POSITIVE,
        slowmo_num_shards=WHOLE,
        localsgd_frequency=WHOLE,
    )
    def __init__(
        self,
        module: nn.Module,
        nprocs_per_node: int,
        broadcast_buffers: bool = True,
        slowmo_base_algorithm: str = "localsgd",
        slowmo_momentum: float = 0.5,
        slowmo_memory_efficient: bool = True,
        slowmo_frequency: int = 48,
        slowmo_lr: float = 1.0,
        slowmo_num_shards: int = 32,
        localsgd_frequency: int = 3,
        **options: Any,
    ) -> None:
        super().__init__()
        gossips = slowmo_base_algorithm == "sgp"
        ranks = dist.get_world_size() if dist.is_initialized() else 1
        expect(ranks % nprocs_per_node == 0, "nprocs_per_node", nprocs_per_node, f"a divisor of the {ranks} ranks")
        mesh = {"nodes": ranks // nprocs_per_node, "dp": nprocs_per_node}
        self.module = compile(module, "local-sgd+ddp", mesh=mesh, **options)
        trained = [{"params": [each]} for each in self.module.parameters() if each.requires_grad]
        base: torch.optim.Optimizer = torch.optim.SGD(trained, lr=0.0)  # in whose place another one steps
        self.slowmo = SlowMo(
            StochasticGradientPush(base, self.module) if gossips else base,
            self.module,
            frequency=slowmo_frequency,
            momentum=slowmo_momentum,
            lr=slowmo_lr,
            average_frequency=None if gossips else localsgd_frequency,
        )

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, on this rank's part of the batch."""
        if self.training:
            self.slowmo.begin()
        return self.module(*args, **kwargs)

    def perform_slowmo(self, optimizer: torch.optim.Optimizer) -> None:
        """Average the copies, or do the outer step, if it is due. All ranks must call it after each optimizer step."""
        rates = {parameter: group["lr"] for group in optimizer.param_groups for parameter in group["params"]}
        for group in self.slowmo.param_groups:
            group["lr"] = rates.get(group["params"][0], 0.0)
        if isinstance(self.slowmo.optimizer, StochasticGradientPush):
            self.slowmo.optimizer.exchange()
        self.slowmo.advance()
