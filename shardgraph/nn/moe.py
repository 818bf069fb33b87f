"""A mixture-of-experts layer that can be sharded by a compiler: tokens reach the experts in one batched tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from shardgraph.nn.experts import Experts
from shardgraph.nn.gating import Routing, TopKGate


class MoE(nn.Module):
    """Each token passes through ``k`` of ``num_experts`` feed-forward networks; its result is their weighted sum.

    ``output, aux_loss = moe(x)``, ``x`` and ``output`` [groups, tokens, d_model], ``aux_loss`` a scalar in fp32 to add
    to the loss, times a small factor (Switch: 0.01). It is a result rather than an attribute because a captured graph
    has only results. A token whose choices were all dropped has output 0: the residual is left to the caller.

    This is GShard's layer (Lepikhin et al. 2020, arXiv:2006.16668), like FairScale's ``MOELayer``; :class:`TopKGate`
    defines groups, capacity, weights and the loss. Groups are independent, so ranks that each have some of dim 0
    together compute exactly what one rank would.

    All shapes are static, whatever the routing. Tokens are moved by index, of ``k * tokens`` entries, not by products
    with a one-hot [groups, tokens, experts, capacity] as in GShard, which grows with the square of tokens (a group of
    4096 tokens, 64 experts, ``k=2``: 80 MiB in bf16 for each of two masks). The result is the same sum, since a row of
    a buffer holds at most one token, and no sum depends on an order that may change from run to run.

    One tensor of [experts, capacity * groups, d_model] enters the experts and one leaves them, and the experts are
    ``bmm`` over dim 0 of their weights. With experts sharded on dim 0 and groups on different ranks, an all-to-all at
    each of these two tensors turns a shard of dim 1 into a shard of dim 0 or back. A rule for ``*.experts.*`` in a
    plan means all parameters with experts in dim 0 and no others.

    Args:
        d_model: width of a token.
        d_hidden: width inside an expert.
        num_experts: number of experts.
        k: experts per token.
        capacity_factor: buffer rows of all experts together, in multiples of the group's ``k * tokens`` choices;
            choices beyond that are dropped. None drops nothing: each expert then has rows for, and computes on, all
            tokens.
        activation: ``"gelu"``, ``"silu"``, ``"relu"``, or ``"swiglu"``, which has a third matrix.
        bias: whether experts add biases.
        normalize_gates, sampled: see :class:`TopKGate`.
        device, dtype: of the parameters.

    Raises:
        ShardGraphError: a size is below 1, ``k`` is above ``num_experts``, the factor is not above 0 and finite, or
            there is no such activation.
    """

    def __init__(
        self,
        d_model: int,
        d_hidden: int,
        num_experts: int,
        k: int = 2,
        capacity_factor: float | None = 1.25,
        activation: str = "gelu",
        *,
        bias: bool = False,
        normalize_gates: bool = True,
        sampled: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        options: dict[str, Any] = {"device": device, "dtype": dtype}
        choice: dict[str, Any] = {"normalize_gates": normalize_gates, "sampled": sampled}
        self.gate = TopKGate(d_model, num_experts, k, capacity_factor, **choice, **options)
        self.experts = Experts(num_experts, d_model, d_hidden, activation, bias=bias, **options)

    def reset_parameters(self) -> None:
        """Initialise gate and experts, as the constructor does."""
        self.gate.reset_parameters()
        self.experts.reset_parameters()

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """``(output, aux_loss)`` of ``x`` [groups, tokens, d_model].

        The output has the shape of ``x`` and the dtype of the experts' products: that of ``x``, or autocast's.

        Raises:
            ShardGraphError: ``x`` has another number of dimensions or another width.
        """
        routing: Routing = self.gate(x)
        groups, tokens, width = x.shape
        experts, capacity = self.gate.num_experts, self.gate.capacity(tokens)
        row = _rows(routing, capacity)
        sent = _dispatch(x, row, routing.kept, experts * capacity)
        received = self.experts(sent.view(experts, capacity * groups, width)).view(experts * capacity, groups, -1)
        return _combine(received, row, routing.weights), routing.aux_loss


def _rows(routing: Routing, capacity: int) -> Tensor:
    """[k, tokens, groups]: each choice's row among those of all experts, ``capacity`` each; if dropped, the last of
    its expert."""
    return (routing.experts * capacity + routing.positions.clamp_max(capacity - 1)).permute(1, 2, 0)


def _dispatch(x: Tensor, row: Tensor, kept: Tensor, rows: int) -> Tensor:
    """Tokens in the buffers of their experts, [rows, groups, d_model]; unused rows are 0.

    Groups stay apart, as rows of a batch: a pipeline's microbatches have some of them.
    """
    groups, _, width = x.shape
    # Dropped tokens go to an additional row, which is cut off, so the number of moved tokens is static.
    place = torch.where(kept.permute(1, 2, 0), row, rows), torch.arange(groups, device=x.device)
    tokens = x.transpose(0, 1).expand(len(row), -1, -1, -1)
    return x.new_zeros(rows + 1, groups, width).index_put(place, tokens)[:rows]


def _combine(received: Tensor, row: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of each token's experts, [groups, tokens, d_model]; dropped choices have weight 0."""
    choices = row.flatten(0, 1).unsqueeze(-1).expand(-1, -1, received.shape[-1])
    results = received.gather(0, choices).view(*row.shape, -1)
    # Contiguous, because torch's fake tensors predict other strides for products with permuted bfloat16.
    weights = weights.permute(1, 2, 0).to(results.dtype, memory_format=torch.contiguous_format)
    return (results * weights.unsqueeze(-1)).sum(0).transpose(0, 1)
