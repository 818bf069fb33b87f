"""A copy of a model whose parameters are shards."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgraph.module.local_step import step_on_shard
from shardgraph.torch_api import as_placed, local_tensor


@torch.no_grad()
def copied_model(model: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """A deep copy, in which each shard has memory of its own; ``memo`` is that of ``copy.deepcopy``.

    As torch's copies of parameters, those of shards have neither hooks nor gradients.
    """
    for parameter in model.parameters():
        if isinstance(parameter, DTensor) and id(parameter) not in memo:
            values = as_placed(local_tensor(parameter).clone(), parameter)
            memo[id(parameter)] = made = nn.Parameter(values, parameter.requires_grad)
            step_on_shard(made)
    return copy.deepcopy(model, memo)
