"""The first rank's values for a model that every rank has built by itself."""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from shardgraph.runtime.agreement import Agreement
from shardgraph.runtime.device import current_device, group_device_type


@torch.no_grad()
def take_from_first_rank(model: nn.Module, timeout: float = 300.0) -> None:
    """Give every rank the first one's parameters and buffers, as DistributedDataParallel does; those on ``meta`` stay.

    All ranks must call it; without a process group it does nothing.

    Raises:
        RankMismatchError: ranks have different models, or one does not call this in ``timeout`` seconds.
    """
    if not dist.is_initialized():
        return
    named = [*model.named_parameters(), *model.named_buffers()]
    with Agreement(dist.group.WORLD, timeout).on_all_ranks("the model") as lines:
        lines += [f"{name}: {list(each.shape)} {each.dtype}{' meta' * each.is_meta}" for name, each in named]
    device = current_device(group_device_type())
    for _, tensor in named:
        if not tensor.is_meta:
            sent = tensor.detach().to(device).contiguous()
            dist.broadcast(sent, src=0)
            tensor.copy_(sent)
