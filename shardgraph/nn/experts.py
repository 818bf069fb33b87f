"""The feed-forward networks of all experts, with batched weights."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardgraph.errors import ShardGraphError, nearest

ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu, "swiglu": F.silu}


class Experts(nn.Module):
    """``act(x @ w_in) @ w_out`` for each expert, or ``(silu(x @ w_gate) * (x @ w_in)) @ w_out`` with ``"swiglu"``.

    (SwiGLU: Shazeer 2020, arXiv:2002.05202, equation 6.) Every parameter has experts in dim 0, and no expert reads the
    rows of another one, so shards of dim 0 are whole experts. With ``E`` experts:

    ======================  =====================
    ``w_in``, ``w_gate``    [E, d_model, d_hidden]
    ``w_out``               [E, d_hidden, d_model]
    ``b_in``, ``b_gate``    [E, d_hidden]
    ``b_out``               [E, d_model]
    ======================  =====================

    Raises:
        ShardGraphError: ``d_hidden`` is below 1, or the activation is none of ``ACTIVATIONS``.
    """

    def __init__(
        self,
        num_experts: int,
        d_model: int,
        d_hidden: int,
        activation: str = "gelu",
        *,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if d_hidden < 1:
            raise ShardGraphError(f"experts with d_hidden={d_hidden} compute nothing: d_hidden must be at least 1")
        if activation not in ACTIVATIONS:
            raise ShardGraphError(
                f"experts have no activation {activation!r}; "
                f"there are {', '.join(ACTIVATIONS)}{nearest(activation, ACTIVATIONS)}"
            )
        self.num_experts, self.d_model, self.d_hidden, self.activation = num_experts, d_model, d_hidden, activation

        def parameter(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(num_experts, *shape, device=device, dtype=dtype))

        gated = activation == "swiglu"
        self.w_in = parameter(d_model, d_hidden)
        self.w_gate = parameter(d_model, d_hidden) if gated else None
        self.w_out = parameter(d_hidden, d_model)
        self.b_in = parameter(d_hidden) if bias else None
        self.b_gate = parameter(d_hidden) if bias and gated else None
        self.b_out = parameter(d_model) if bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise each matrix and bias uniformly within ``1 / sqrt(inputs)``, every expert like an ``nn.Linear``."""
        for name, parameter in self.named_parameters():
            bound = 1 / math.sqrt(self.d_hidden if name.endswith("_out") else self.d_model)
            nn.init.uniform_(parameter, -bound, bound)

    def extra_repr(self) -> str:
        """The arguments, for ``print``."""
        return (
            f"{self.num_experts}, {self.d_model}, {self.d_hidden}, activation={self.activation!r}, "
            f"bias={self.b_in is not None}"
        )

    def forward(self, x: Tensor) -> Tensor:
        """Apply expert ``e`` to ``x[e]``: [experts, rows, d_model] to [experts, rows, d_model]."""
        hidden = _affine(x, self.w_in, self.b_in)
        activation = ACTIVATIONS[self.activation]
        if self.w_gate is None:
            hidden = activation(hidden)
        else:
            hidden = activation(_affine(x, self.w_gate, self.b_gate)) * hidden
        return _affine(hidden, self.w_out, self.b_out)


def _affine(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    return torch.bmm(x, weight) if bias is None else torch.baddbmm(bias.unsqueeze(1), x, weight)
