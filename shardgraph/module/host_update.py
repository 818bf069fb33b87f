"""Updates of parameters in host memory: each by one of torch's fused kernels, as ZeRO-Offload's optimizer does.

torch's default for them is an operation for each term of the formula, so that a core reads and writes everything many
times over: AdamW takes 3 to 15 times as long. J. Ren et al., "ZeRO-Offload: democratizing billion-scale model
training", https://arxiv.org/abs/2101.06840, section 5.1.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from shardgraph.runtime.host import is_on_host
from shardgraph.torch_api import local_tensor


@contextmanager
def fused_on_host(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Within, the optimizer's groups of parameters in host memory step by torch's fused kernels, if it has them and the
    user has chosen no implementation."""
    fused = [group for group in optimizer.param_groups if _can_be_fused(group, optimizer.state)]
    for group in fused:
        group["fused"] = True
    try:
        yield
    finally:
        for group in fused:
            group["fused"] = None


def _can_be_fused(group: Mapping[str, Any], state: Mapping[Any, Mapping[str, Any]]) -> bool:
    if group.get("fused", False) is not None or group.get("foreach") is not None:
        return False  # chosen, or there is no such kernel
    if group.get("capturable") or group.get("differentiable"):
        return False
    shards = [local_tensor(parameter) for parameter in group["params"] if parameter.grad is not None]
    counters = [state[p]["step"] for p in group["params"] if "step" in state.get(p, {})]
    counted = all(isinstance(each, torch.Tensor) and each.dtype == torch.float32 for each in counters)
    return counted and bool(shards) and all(is_on_host(shard) and shard.is_floating_point() for shard in shards)
