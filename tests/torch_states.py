"""What runs on the ranks for :mod:`tests.test_torch_states`: states got and set by torch's own functions."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard

import shardgraph
from tests.ranks import whole

MESHES = {"tp": {"tp": 2}, "fsdp+tp": {"dp": 2, "tp": 2}, "pp": {"pp": 2}}
OPTIONS: dict[str, tuple[dict[str, bool], dict[str, bool]]] = {
    "whole": ({"full_state_dict": True}, {"full_state_dict": True}),
    "in host memory": ({"cpu_offload": True}, {}),
    "flat": ({"flatten_optimizer_state_dict": True}, {"flatten_optimizer_state_dict": True}),
    "of rank 0": (
        {"full_state_dict": True, "cpu_offload": True},
        {"full_state_dict": True, "broadcast_from_rank0": True},
    ),
    "what is trained": ({"ignore_frozen_params": True}, {"ignore_frozen_params": True, "strict": False}),
    "not strict": ({"full_state_dict": True}, {"full_state_dict": True, "strict": False}),
}
"""How a state is got, and how it is set."""


class Fused(nn.Module):
    """A layer of three in one, which shards of operators have in three blocks of rows, and a frozen bias."""

    def __init__(self) -> None:
        super().__init__()
        self.three, self.out = nn.Linear(8, 18), nn.Linear(6, 8)
        nn.init.zeros_(self.out.bias).requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        one, two, three = self.three(x).chunk(3, -1)
        return self.out(F.silu(one) * torch.tanh(two) + three)


def made(plan: str, seed: int) -> tuple[Any, torch.optim.Optimizer]:
    torch.manual_seed(seed)
    model = Fused().double()
    if plan == "FSDP2":
        fully_shard(model)
    else:
        given = {"mesh": MESHES.get(plan), "loss_fn": F.mse_loss, "example_inputs": (torch.ones(4, 8).double(),)}
        model = shardgraph.compile(model, plan, progress=False, **given)
    return model, torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model: Any, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    """The whole weights after some steps, with one batch on all ranks."""
    x = torch.randn(4, 8, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    for _ in range(steps):
        if isinstance(model, shardgraph.ShardedModule):
            model.train_step(x, target=torch.ones_like(x))  # as a pipeline trains too
        else:
            F.mse_loss(model(x), torch.ones_like(x)).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole(parameter.detach()).clone() for parameter in model.parameters()]


def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


def handed_over(plan: str, how: str) -> tuple[float, list[str]]:
    """How far a model that goes on from another's state is from the other, and the names that it did not know."""
    getting, setting = (StateDictOptions(**options) for options in OPTIONS[how])
    (one, first), (other, second) = made(plan, 0), made(plan, 1)
    train(one, first, 2)
    weights = copy.deepcopy(get_model_state_dict(one, options=getting))
    states = copy.deepcopy(get_optimizer_state_dict(one, first, options=getting))
    if how == "of rank 0" and dist.get_rank():
        assert not weights
    if how == "not strict":
        weights["more"] = torch.ones(2)
    keys = set_model_state_dict(other, weights, options=setting)
    set_optimizer_state_dict(other, second, states, options=setting)
    return apart(train(one, first, 1), train(other, second, 1)), list(keys.unexpected_keys)


def taken_by_a_pipeline() -> float:
    """How far the weights of a pipeline's stages are from those of another, whose whole state rank 0 alone had."""
    (one, _), (other, _) = made("pp", 0), made("pp", 1)
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_model_state_dict(other, one.full_state_dict(), options=options)
    return apart(*([whole(each.detach()) for each in model.parameters()] for model in (one, other)))


def saved_beside_training(plan: str, folder: str) -> float:
    """How far a model is from another, which trained on while its state was written, where it goes on from that."""
    (one, first), (other, second) = made(plan, 0), made(plan, 1)
    train(one, first, 2)
    weights, states = get_state_dict(one, first)
    writing = dcp.async_save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    expected = train(one, first, 1)
    writing.result()
    dist.barrier()
    weights, states = get_state_dict(other, second)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(other, second, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return apart(train(other, second, 1), expected)
