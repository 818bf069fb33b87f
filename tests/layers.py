"""Layers of torch with weights that are computed anew at every call, or kept in a list, and what runs of them on each
rank."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.utils import parametrizations, parametrize, remove_weight_norm, spectral_norm, weight_norm

import shardgraph
from tests import recurrent
from tests.ranks import difference, train


class Reparametrized(nn.Module):
    """Two layers, the first of which computes its weight from something else."""

    def __init__(self, how: Callable[[nn.Module], nn.Module]) -> None:
        super().__init__()
        self.first, self.second = how(nn.Linear(6, 8)), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.second(torch.tanh(self.first(x))).square().mean()}


REPARAMETRIZED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "weight_norm of hooks": weight_norm,
    "spectral_norm of hooks": spectral_norm,
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "orthogonal by exponentials": lambda layer: parametrizations.orthogonal(layer, orthogonal_map="matrix_exp"),
}


def reparametrized(name: str) -> nn.Module:
    """A model in double precision, always with the same values."""
    torch.manual_seed(0)
    return Reparametrized(REPARAMETRIZED[name]).double()


def compiled(model: nn.Module, plan: str, *call: torch.Tensor) -> Any:
    """The model under a plan, for which ``call`` is an example if all ranks have the same batch."""
    return shardgraph.compile(model, plan, progress=False, example_inputs=call if plan == "tp" else None)


def trained(plan: str, name: str) -> tuple[float, float, float, int]:
    """Errors after some steps: of losses, gradients and weights, of buffers, of the output in eval mode; and how many
    programs were compiled for training."""
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    original, sharded = reparametrized(name), compiled(reparametrized(name), plan, x)
    error = train(sharded, original, ((x,), {}))
    count = sum(map(len, sharded._programs.kept.values()))
    buffers = zip(sharded.buffers(), original.buffers(), strict=True)
    worst = max(((mine - theirs).abs().max().item() for mine, theirs in buffers), default=0.0)
    with torch.no_grad():
        evaluated = (sharded.eval()(x)["loss"] - original.eval()(x)["loss"]).abs().item()
    return error, worst, evaluated, count


def without_weight_norm(kind: str) -> float:
    """The error of training after what computed the weight was removed, on whole parameters."""
    name = {"hooks": "weight_norm of hooks", "parametrization": "weight_norm"}[kind]
    original, sharded = reparametrized(name), shardgraph.compile(reparametrized(name), "fsdp", progress=False)
    x = torch.randn(8, 6, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    train(sharded, original, ((x,), {}), steps=1)
    with sharded.unsharded():
        for model in (sharded, original):
            if kind == "hooks":
                remove_weight_norm(model.first)
            else:
                parametrize.remove_parametrizations(model.first, "weight")
    return train(sharded, original, ((x,), {}))


def recurrently(plan: str, name: str) -> dict[str, Any]:
    """A recurrent model that trains, has its layers called by themselves, and is copied."""
    original, call = recurrent.make(name, 8)
    sharded = compiled(copy.deepcopy(original.double()), plan, *call)
    facts: dict[str, Any] = {"trained": train(sharded, original, (call, {}))}
    x = torch.randn(2, 3, 6, dtype=torch.float64)
    facts["called"] = (sharded.layers(x)[0] - original.layers(x)[0]).abs().max().item()
    listed, own = sharded.layers._flat_weights, [*sharded.layers.parameters()]
    facts["listed"] = all(any(each is parameter for parameter in own) for each in listed)
    facts["copied"] = train(copy.deepcopy(sharded), copy.deepcopy(original), (call, {}), steps=2)
    with sharded.unsharded():
        facts["whole"] = difference(sharded, original, gradients=False)
    facts["after"] = train(sharded, original, (call, {}), steps=2)
    assert dist.is_initialized()
    return facts
