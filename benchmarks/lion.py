"""Lion (Chen et al., 2023, https://arxiv.org/abs/2302.06675), which torch does not have, as users write it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn


class Lion(torch.optim.Optimizer):
    """The sign of a momentum."""

    def __init__(self, params: Iterable[nn.Parameter], lr: float = 1e-4, weight_decay: float = 0.1) -> None:
        super().__init__(params, {"lr": lr, "betas": (0.9, 0.99), "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: None = None) -> None:
        for group in self.param_groups:
            fast, slow = group["betas"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if not state:
                    state["momentum"] = torch.zeros_like(parameter)
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.add_(state["momentum"].lerp(parameter.grad, 1 - fast).sign_(), alpha=-group["lr"])
                state["momentum"].lerp_(parameter.grad, 1 - slow)
