"""Optimizers that compute with whole tensors step on whole tensors, few at a time, on every rank that has a shard.

Adafactor takes means of rows and columns, Muon products of the whole gradient. On shards they would do so with those of
a rank; torch has no rules to do it on every kind of DTensor, and rounds otherwise where it has. So the values, the
gradients and the state of some parameters are gathered, all ranks compute the same update, and each keeps its shard.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn, optim
from torch.distributed.tensor import DTensor, Replicate

from shardgraph import torch_api
from shardgraph.cost_models.optimizers import UPDATED_TOGETHER
from shardgraph.module.checkpoint import sharded_like
from shardgraph.runtime.host import is_on_host
from shardgraph.torch_api import local_tensor


def whole_kinds() -> list[type[optim.Optimizer]]:
    """The classes of such optimizers, of torch and of what has been imported."""
    imported = getattr(sys.modules.get("transformers.optimization"), "Adafactor", None)
    return [optim.Adafactor, optim.Muon, *([imported] if imported else [])]


def step_on_whole(
    optimizer: optim.Optimizer, original: Callable[[optim.Optimizer], Any], at_once: bool = False
) -> None:
    """The ``original`` step of an optimizer, all of whose parameters are DTensors; on these in host memory.

    It is called for some parameters after others, unless ``at_once``: for all of them.
    """
    parameters: list[Any] = [p for group in optimizer.param_groups for p in group["params"] if p.grad is not None]
    if any(is_on_host(local_tensor(parameter)) for parameter in parameters):
        original(optimizer)
        return
    for some in [parameters] if at_once else _portions(parameters):
        with _whole(optimizer, some):
            original(optimizer)


def _portions(parameters: Sequence[Any]) -> Iterator[list[Any]]:
    """Parameters in order, as many at a time as are not larger than the largest, or than a small portion."""
    most = max(UPDATED_TOGETHER, *(parameter.nbytes for parameter in parameters))
    some: list[Any] = []
    for parameter in parameters:
        if some and sum(each.nbytes for each in some) + parameter.nbytes > most:
            yield some
            some = []
        some.append(parameter)
    yield some


@contextmanager
def _whole(optimizer: optim.Optimizer, chosen: Sequence[Any]) -> Iterator[None]:
    """Within, the optimizer has these parameters alone, whole, with their gradients and their state."""
    before, states = [(group, group["params"]) for group in optimizer.param_groups], optimizer.state
    twins = {id(parameter): _twin(parameter) for parameter in chosen}
    for group, parameters in before:
        group["params"] = [twins[id(parameter)] for parameter in parameters if id(parameter) in twins]
    optimizer.state = defaultdict(dict)
    for parameter in chosen:
        if parameter in states:
            optimizer.state[twins[id(parameter)]] = {name: _gathered(v) for name, v in states[parameter].items()}
    try:
        yield
        new = optimizer.state
    finally:
        optimizer.state = states
        for group, parameters in before:
            group["params"] = parameters
    for parameter in chosen:
        twin = twins[id(parameter)]
        local_tensor(parameter).copy_(local_tensor(sharded_like(twin.detach(), parameter)))
        states[parameter] = _kept(new[twin], states.get(parameter, {}), parameter)


def _twin(parameter: Any) -> nn.Parameter:
    twin = nn.Parameter(_gathered(parameter.detach()), parameter.requires_grad)
    twin.grad = _gathered(parameter.grad)
    return twin


def _gathered(value: Any) -> Any:
    """A value of all ranks in one plain tensor; what is no DTensor as it is."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def _kept(new: Mapping[str, Any], before: Mapping[str, Any], parameter: Any) -> dict[str, Any]:
    """The state of a whole parameter as that of its shards: what has its shape is sharded as it is."""
    mesh, kept = parameter.device_mesh, {}
    for name, value in new.items():
        if not isinstance(value, torch.Tensor) or not value.dim():
            kept[name] = value
            continue
        whole = [Replicate()] * mesh.ndim
        placed = (
            sharded_like(value, parameter)
            if value.shape == parameter.shape
            else torch_api.placed(value, mesh, whole, value.shape)
        )
        known, local = before.get(name), local_tensor(placed)
        if isinstance(known, DTensor) and known.placements == placed.placements:  # the same object, as in torch
            local_tensor(known).copy_(local)
            placed = known
        elif local.untyped_storage().nbytes() > local.nbytes:  # all of it would be kept
            placed = torch_api.as_placed(local.clone(), placed)
        kept[name] = placed
    return kept
