"""L-BFGS steps on all parameters at once: whole ones, on every rank.

It takes products over all parameters, evaluates the model several times in a step and compares the losses. So ranks
have the same whole parameters, gradients and mean loss, decide alike, and each writes its shards before an evaluation.
Every rank holds the history of the whole model, as without sharding.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn, optim
from torch.distributed.tensor import DTensor

from shardgraph.module.checkpoint import sharded_like
from shardgraph.torch_api import local_tensor


def step_on_all(optimizer: optim.LBFGS, original: Callable[..., Any], closure: Callable[[], Any]) -> Any:
    """The ``original`` step of an optimizer, all of whose parameters are DTensors of one mesh; returns its loss, which
    is the mean over ranks."""
    (group,) = optimizer.param_groups
    parameters: list[Any] = group["params"]
    twins = [nn.Parameter(_whole(parameter.detach()), parameter.requires_grad) for parameter in parameters]
    mesh = parameters[0].device_mesh

    def on_shards() -> torch.Tensor:
        _write(parameters, twins)
        group["params"] = parameters  # whose gradients the closure clears
        loss = torch.as_tensor(closure()).detach().clone()
        group["params"] = twins
        for axis in range(mesh.ndim):
            dist.all_reduce(loss, group=mesh.get_group(axis))
        for parameter, twin in zip(parameters, twins, strict=True):
            twin.grad = None if parameter.grad is None else _whole(parameter.grad)
        return loss / mesh.size()

    states, first = optimizer.state, parameters[0]
    group["params"] = optimizer._params = twins
    optimizer.state = type(states)(dict, {twins[0]: states[first]} if first in states else {})
    try:
        loss = original(optimizer, on_shards)
    finally:
        states[first] = optimizer.state[twins[0]]
        optimizer.state, group["params"], optimizer._params = states, parameters, parameters
    _write(parameters, twins)
    return loss


@torch.no_grad()
def _write(parameters: list[Any], twins: list[nn.Parameter]) -> None:
    for parameter, twin in zip(parameters, twins, strict=True):
        local_tensor(parameter).copy_(local_tensor(sharded_like(twin.detach(), parameter)))


def _whole(value: torch.Tensor) -> torch.Tensor:
    return value.full_tensor().clone() if isinstance(value, DTensor) else value
