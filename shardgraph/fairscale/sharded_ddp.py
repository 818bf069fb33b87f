"""FairScale's ShardedDDP is the plan ``"ddp"`` under an optimizer that is sharded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardgraph.api.compile import compile
from shardgraph.arguments import BOOL, GROUP, MODEL, OPTIMIZER, Kind, checked, whole
from shardgraph.errors import ShardGraphError
from shardgraph.module.first_rank import take_from_first_rank
from shardgraph.optim.sharded import ShardedOptimizer
from shardgraph.plans.precision import Precision
from shardgraph.torch_api import local_tensor

_PREFIX = "module."


class ShardedDataParallel(nn.Module):
    """``fairscale.nn.ShardedDataParallel``: ``module`` compiled for data-parallel ranks, whose optimizers are
    :class:`~shardgraph.fairscale.OSS`.

    ``.module`` is the compiled module, and names in :meth:`state_dict` begin with it, as in FairScale and DDP. Every
    rank has whole parameters and whole, averaged gradients: the optimizers' state is what is sharded. What
    ``requires_grad`` says may change between steps.

    Args:
        module: any module; its parameters are replaced in place, for the optimizers too.
        sharded_optimizer: the optimizer of the module's parameters, or several.
        process_group: all ranks; a model on some of them is launched on these alone.
        broadcast_buffers: has no effect: what forward writes to buffers is averaged over ranks.
        sync_models_at_startup: give every rank the first one's parameters and buffers.
        reduce_buffer_size: has no effect: reductions of small gradients are merged, up to the plan's ``bucket``.
        auto_refresh_trainable: has no effect: what is trainable is seen at each call.
        reduce_fp16: reduce gradients in float16.
        warn_on_trainable_params_changed: has no effect.
        options: of :func:`shardgraph.compile`, such as ``gradient_statistics=True``.
    """

    @checked(
        module=MODEL,
        sharded_optimizer=OPTIMIZER | Kind("several of them", lambda value: isinstance(value, Iterable)),
        process_group=GROUP,
        broadcast_buffers=BOOL,
        sync_models_at_startup=BOOL,
        reduce_buffer_size=whole(0),
        auto_refresh_trainable=BOOL,
        reduce_fp16=BOOL,
        warn_on_trainable_params_changed=BOOL,
    )
    def __init__(
        self,
        module: nn.Module,
        sharded_optimizer: ShardedOptimizer | Iterable[ShardedOptimizer],
        process_group: dist.ProcessGroup | None = None,
        broadcast_buffers: bool = True,
        sync_models_at_startup: bool = True,
        reduce_buffer_size: int = 2**23,
        auto_refresh_trainable: bool = True,
        reduce_fp16: bool = False,
        warn_on_trainable_params_changed: bool = False,
        **options: Any,
    ) -> None:
        super().__init__()
        optimizers = [sharded_optimizer] if isinstance(sharded_optimizer, torch.optim.Optimizer) else sharded_optimizer
        optimizers = list(optimizers)
        _check(optimizers, process_group)
        if sync_models_at_startup:
            take_from_first_rank(module)
        if reduce_fp16:
            options = {"precision": Precision(reduce="float16"), **options}
        self.module = compile(module, "ddp", **options)
        for optimizer in optimizers:
            optimizer.refresh()

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, on this rank's part of the batch."""
        return self.module(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(super().__getattr__("module"), name)

    def no_sync(self) -> AbstractContextManager[None]:
        """Accumulate gradients without communication; the next backward outside reduces their sum."""
        return self.module.no_sync()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear gradients, and those accumulated under :meth:`no_sync`."""
        self.module.zero_grad(set_to_none)

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As of FairScale: plain tensors, whole on every rank, under names that begin with ``module.``."""
        state = super().state_dict(*args, **kwargs)
        for name, value in state.items():
            state[name] = local_tensor(value) if isinstance(value, DTensor) else value
        return state

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load what :meth:`state_dict` returned, here or in FairScale."""
        own = {name.removeprefix(_PREFIX): value for name, value in state_dict.items()}
        return self.module.load_state_dict(own, strict, assign)


def _check(optimizers: list[Any], group: dist.ProcessGroup | None) -> None:
    others = [type(each).__name__ for each in optimizers if not isinstance(each, ShardedOptimizer)]
    if others or not optimizers:
        raise ShardGraphError(
            f"ShardedDataParallel(): sharded_optimizer is {', '.join(others) or 'none'}; it may be an OSS or several: "
            "wrap the class, as OSS(model.parameters(), optim=Adam, lr=1e-3), or use shardgraph.compile(model, 'fsdp')"
        )
    if group is not None and dist.get_world_size(group) != dist.get_world_size():
        raise ShardGraphError(
            f"process_group has {dist.get_world_size(group)} of {dist.get_world_size()} ranks, and a model is compiled "
            "on all: launch the ranks of the group alone, or give shardgraph.compile a plan on a mesh of all"
        )
