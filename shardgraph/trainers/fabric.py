"""Lightning Fabric: a strategy whose ``setup`` compiles the model under a plan."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.strategies import DDPStrategy
from lightning.fabric.strategies.strategy import _BackwardSyncControl
from torch import nn

from shardgraph.api.compile import compile
from shardgraph.errors import ShardGraphError
from shardgraph.module import checkpoint
from shardgraph.module.first_rank import take_from_first_rank
from shardgraph.module.gradient_norm import clip_grad_norm_
from shardgraph.module.replaced import adopt
from shardgraph.module.sharded import ShardedModule
from shardgraph.plans.plan import Plan
from shardgraph.trainers.batches import check_lightning_precision, check_options, check_own_batches
from shardgraph.trainers.whole_optimizer import WholeOptimizer


class ShardGraphFabricStrategy(DDPStrategy):
    """A strategy for ``lightning.fabric.Fabric`` that trains under a plan, in the place of ``"ddp"``.

    ::

        fabric = Fabric(strategy=ShardGraphFabricStrategy("fsdp"), devices=2)
        fabric.launch()
        model, optimizer = fabric.setup(model, optimizer)

    Every rank takes the first one's weights; parameters become shards in place.

    Args:
        plan: of :func:`shardgraph.compile`, for a run in which every rank has a batch of its own: ``"ddp"``,
            ``"zero1"``, ``"zero2"``, ``"fsdp"``, ``"hsdp"``, ``"ep"``, a :class:`Plan` or a plan file.
        options: further ones of :func:`shardgraph.compile`, such as ``{"recompute": "full"}``.
        ddp: the arguments of ``DDPStrategy`` about launching, by name: ``cluster_environment``, ``timeout``, ...

    Raises:
        ShardGraphError: they ask for what cannot be under a plan; the message says what can.
    """

    def __init__(
        self, plan: str | Path | Plan = "fsdp", *, options: Mapping[str, Any] | None = None, **ddp: Any
    ) -> None:
        self.plan, self.options = plan, dict(options or {})
        check_options(self.options, "Fabric")
        super().__init__(**ddp)
        self._backward_sync_control = _NoSync()

    def setup_module(self, module: nn.Module) -> Any:
        """The model, compiled."""
        check_lightning_precision(self.precision.precision, "Fabric")
        check_own_batches(self.plan, self.options.get("mesh"), "Fabric")
        take_from_first_rank(module)
        return compile(module, self.plan, **self.options)

    def module_to_device(self, module: nn.Module) -> None:
        """Leave it where it is: shards are put on the device when it is compiled."""

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        """The optimizer, which trains shards from now on."""
        adopt(optimizer)
        return optimizer

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float | int,
        norm_type: float | int = 2.0,
        error_if_nonfinite: bool = True,
    ) -> torch.Tensor:
        """By the norm of the gradients of all ranks' shards."""
        self.precision.unscale_gradients(optimizer)
        return clip_grad_norm_(self.precision.main_params(optimizer), max_norm, norm_type, error_if_nonfinite)

    def get_module_state_dict(self, module: nn.Module) -> dict[str, Any]:
        """Whole tensors in CPU memory, on the first rank; empty on others. All ranks must call it."""
        return dict(checkpoint.full_state_dict(module))

    def load_module_state_dict(self, module: nn.Module, state_dict: dict[str, Any], strict: bool = True) -> None:
        """Load whole tensors: each rank keeps its shards."""
        checkpoint.load_full_state_dict(module, state_dict, strict=strict)

    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of whole tensors, on the first rank. All ranks must call it."""
        return WholeOptimizer(optimizer).state_dict()

    def load_checkpoint(self, path: str | Path, state: Any = None, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """As of Fabric, with optimizers' states of whole tensors."""
        if isinstance(state, torch.optim.Optimizer):
            WholeOptimizer(state).load_state_dict(super().load_checkpoint(path, None, *args, **kwargs))
            return {}
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, *args, **kwargs)
        given = {
            name: WholeOptimizer(each) if isinstance(each, torch.optim.Optimizer) else each
            for name, each in state.items()
        }
        rest = super().load_checkpoint(path, given, *args, **kwargs)
        state.update({name: each for name, each in given.items() if not isinstance(each, WholeOptimizer)})
        return rest


class _NoSync(_BackwardSyncControl):
    """Accumulates gradients without communication."""

    def no_backward_sync(self, module: nn.Module, enabled: bool) -> AbstractContextManager[None]:
        """``no_sync`` of the compiled module."""
        if not enabled:
            return nullcontext()
        if not isinstance(module, ShardedModule):
            raise ShardGraphError("no_backward_sync is of a model that fabric.setup has returned: set it up first")
        return module.no_sync()
