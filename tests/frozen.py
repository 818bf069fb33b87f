"""What runs on each rank of the tests of parameters that are frozen while a pipeline trains."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

import shardgraph
from tests.ranks import whole


def layers() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 7), nn.ReLU(), nn.Linear(7, 5), nn.ReLU(), nn.Linear(5, 1)).double()


def by_name(module: nn.Module, step: int) -> None:
    for name, parameter in module.named_parameters():
        parameter.requires_grad = name.startswith("4") or step == 2


def by_module(module: Any, step: int) -> None:
    module[0].requires_grad_(step > 0)
    module[2].requires_grad_(step == 2)


def train_step(module: Any, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return module.train_step(x, target=target) if hasattr(module, "train_step") else call(module, x, target)


def call(module: nn.Module, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    loss = nn.functional.mse_loss(module(x), target)
    loss.backward()
    return loss.detach()


FREEZES: dict[str, Callable[[Any, int], None]] = {"by name": by_name, "by module": by_module}
STEPS: dict[str, Callable[..., torch.Tensor]] = {"train_step": train_step, "called": call}


def frozen(freeze: str, step: str, stages: list[str]) -> tuple[float, set[str]]:
    """How far losses and weights are from those of the layers, and whose gradients were there alone.

    With ``stages`` no program is compiled before the first parameters are frozen.
    """
    original, x = layers(), torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    if freeze == "by module":
        original[0].requires_grad_(False)  # and trained later: a program that is compiled then
    sharded: Any = shardgraph.compile(
        copy.deepcopy(original),
        "pp",
        mesh={"pp": 2},
        pipeline=shardgraph.Pipeline(stages=stages),
        loss_fn=nn.functional.mse_loss,
        progress=False,
        **({} if stages else {"example_inputs": (x,), "example_kwargs": {"target": x[:, :1]}}),
    )
    modules = (original, sharded)
    optimizers = [torch.optim.AdamW(each.parameters(), lr=1e-2) for each in modules]
    far, alone = [], set()
    for number in range(4):
        rows = x[: 4 if number == 1 else 8]  # programs of two sizes
        losses, reached = [], []
        for module, optimizer in zip(modules, optimizers, strict=True):
            FREEZES[freeze](module, number)
            losses.append(STEPS[step](module, rows, rows[:, :1]))
            reached.append({name for name, parameter in module.named_parameters() if parameter.grad is not None})
            optimizer.step()
            optimizer.zero_grad()
        far.append((losses[0] - losses[1]).abs().item())
        alone |= reached[1] ^ (reached[0] & {name for name, _ in sharded.named_parameters()})
    theirs = dict(original.named_parameters())
    far += [(whole(p.detach()) - theirs[name].detach()).abs().max().item() for name, p in sharded.named_parameters()]
    return max(far), alone


def trained_by_name_alone() -> None:
    """A rank trains a parameter that was frozen at ``compile``, which the other one does not see."""
    model, x = layers(), torch.randn(8, 6, dtype=torch.float64)
    model[0].requires_grad_(False)
    sharded: Any = shardgraph.compile(model, "pp", mesh={"pp": 2}, example_inputs=(x,), progress=False)
    for _, parameter in sharded.named_parameters():
        parameter.requires_grad_()
    sharded(x).mean().backward()
