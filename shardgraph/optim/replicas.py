"""What optimizers of replicas that train by themselves have in common."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from shardgraph.errors import ShardGraphError
from shardgraph.module.replaced import adopt
from shardgraph.module.sharded import ShardedModule
from shardgraph.torch_api import local_tensor


class OfReplicas(torch.optim.Optimizer):
    """Wraps the optimizer of this rank's replica of a module; groups, state and hooks are those of the wrapped one.

    Raises:
        ShardGraphError: the module has no replicas.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, module: ShardedModule) -> None:
        _check_module(module)
        adopt(optimizer)
        self.optimizer, self._module, self._count = optimizer, module, module.plan.copies

    def __getattr__(self, name: str) -> Any:
        if name == "optimizer":  # not set yet
            raise AttributeError(name)
        return getattr(self.optimizer, name)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients."""
        self.optimizer.zero_grad(set_to_none)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add a parameter group, in which replicas are equal."""
        self.optimizer.add_param_group(param_group)

    def _parameters(self) -> Iterator[torch.Tensor]:
        """The parameters of which this rank has elements."""
        for group in self.param_groups:
            yield from (parameter for parameter in group["params"] if local_tensor(parameter).numel())


def _check_module(module: ShardedModule) -> None:
    if not isinstance(module, ShardedModule) or (module.plan.world_size > 1 and not module.plan.replicas):
        name = repr(module.plan.name) if isinstance(module, ShardedModule) else type(module).__name__
        raise ShardGraphError(
            f"replicas train by themselves here, and this module has none (plan {name}, under which gradients are "
            "reduced over all ranks at every step): compile it with plan='local-sgd', or 'local-sgd+' and the plan of "
            "a replica on the inner axes of the mesh, such as 'local-sgd+fsdp'"
        )
