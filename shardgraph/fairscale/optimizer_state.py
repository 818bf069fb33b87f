"""The state of an optimizer of shards, whole and back again, in torch's format of an unsharded optimizer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardgraph.errors import CheckpointError
from shardgraph.module import checkpoint
from shardgraph.module.optimizer_state import placed_like

_NUMBERS = "param_id_map"
"""The key of what FairScale adds to torch's format: the number of each parameter by its name."""


def gathered(model: nn.Module, optimizer: torch.optim.Optimizer, recipient: int | None) -> dict[str, Any] | None:
    """The state of ``optimizer`` with whole tensors in CPU memory, on rank ``recipient``, or on all if it is None."""
    keep = recipient is None or not dist.is_initialized() or dist.get_rank() == recipient
    state = optimizer.state_dict()
    names = {id(parameter): name for name, parameter in model.named_parameters()}
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    whole = {
        number: {
            key: checkpoint.gathered(value, keep) if isinstance(value, torch.Tensor) else value
            for key, value in entries.items()
        }
        for number, entries in state["state"].items()
    }
    numbers = {names[id(parameter)]: number for number, parameter in enumerate(parameters) if id(parameter) in names}
    return {**state, "state": whole, _NUMBERS: numbers} if keep else None


def own_shard(model: nn.Module, state: Mapping[str, Any]) -> dict[str, Any]:
    """The state that :func:`gathered` returned, with this rank's shards in the place of whole tensors.

    Raises:
        CheckpointError: the state is of parameters that ``model`` does not have.
    """
    parameters, numbers = dict(model.named_parameters()), state[_NUMBERS]
    if unknown := [name for name in numbers if name not in parameters]:
        raise CheckpointError(
            f"the optimizer's state is of {', '.join(map(repr, unknown[:4]))}, which this model does not have: load it "
            "for the model that it was gathered from"
        )
    names = {number: name for name, number in numbers.items()}
    shards = {
        number: {key: placed_like(parameters[names[number]], value) for key, value in entries.items()}
        for number, entries in state["state"].items()
    }
    return {"state": shards, "param_groups": state["param_groups"]}
