"""The router of a mixture of experts: the experts of each token, its rows in their buffers, and its weights."""

from __future__ import annotations

import math
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardgraph.errors import ShardGraphError


class Routing(NamedTuple):
    """The routing of ``x`` of shape [groups, tokens, d_model]; choices are in order of preference.

    ``experts`` [groups, k, tokens], int64: the expert of each choice.
    ``positions`` [groups, k, tokens], int64: its row in that expert's buffer of the group; it may be past the end.
    ``kept`` [groups, k, tokens], bool: whether it is not past the end.
    ``weights`` [groups, k, tokens], fp32 or wider: the factor of the expert's result; 0 where not kept.
    ``aux_loss`` [], fp32 or wider: the load-balancing loss.
    """

    experts: Tensor
    positions: Tensor
    kept: Tensor
    weights: Tensor
    aux_loss: Tensor


class TopKGate(nn.Module):
    """The router of :class:`~shardgraph.nn.MoE`: logits ``x @ weight.T`` over experts, of which a token chooses ``k``.

    Routing is independent for each row of dim 0, a *group* in GShard's terms (Lepikhin et al. 2020, arXiv:2006.16668,
    section 2.2).

    * Probabilities are the softmax of the logits over experts, in fp32 also under autocast and for half-precision
      inputs (in fp64 for fp64 inputs).
    * The choices are the ``k`` largest logits, ties broken by the lowest index. With ``sampled``, in training, the
      choices after the first are sampled by their probabilities, without replacement, by adding Gumbel noise to the
      logits, as in FairScale's ``Top2Gate`` (there in evaluation too).
    * An expert processes at most :meth:`capacity` tokens of a group: all first choices, in the order of tokens, before
      any second choice, and so on. Choices beyond the capacity are dropped and contribute 0.
    * The weight of a choice is its probability; with ``normalize_gates`` it is divided by the sum over the token's
      *kept* choices. FairScale does that; GShard (algorithm 1) divides by the sum over the selected ones, so a token
      that lost a choice has a smaller output. With ``k=1`` nothing is divided, because every weight would be 1 and the
      gate would have no gradient from the output: that is Switch (Fedus et al. 2021, arXiv:2101.03961, equation 2).
    * The auxiliary loss is the mean over groups of ``E * sum_e f_e * p_e``, with ``f_e`` the fraction of the group's
      tokens whose first choice is ``e``, dropped or not, and ``p_e`` the mean probability of ``e`` (Switch, equations 4
      to 6, without its factor alpha). It is 1 if tokens are spread evenly; gradients flow through ``p_e``.

    Args:
        d_model: width of a token.
        num_experts: experts to choose from, ``E``.
        k: choices per token.
        capacity_factor: buffer rows of all experts together, in multiples of the group's ``k * tokens`` choices;
            None: nothing is dropped.
        normalize_gates, sampled: as above.
        device, dtype: of the weight, [num_experts, d_model].

    Raises:
        ShardGraphError: a size is below 1, ``k`` is above ``num_experts``, or the factor is not above 0 and finite.
    """

    def __init__(
        self,
        d_model: int,
        num_experts: int,
        k: int = 2,
        capacity_factor: float | None = 1.25,
        *,
        normalize_gates: bool = True,
        sampled: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        for name, size in (("d_model", d_model), ("num_experts", num_experts), ("k", k)):
            if size < 1:
                raise ShardGraphError(f"a gate with {name}={size} has nothing to route: {name} must be at least 1")
        if k > num_experts:
            raise ShardGraphError(
                f"k={k} asks for {k} different experts per token, but num_experts={num_experts}: take k up to "
                f"{num_experts}, or more experts"
            )
        if capacity_factor is not None and not 0 < capacity_factor < math.inf:
            raise ShardGraphError(
                f"capacity_factor={capacity_factor} gives an expert no number of rows: it must be above 0 and finite "
                "(1.25 leaves a quarter to spare), or None to drop no token"
            )
        self.d_model, self.num_experts, self.k = d_model, num_experts, k
        self.capacity_factor, self.normalize_gates, self.sampled = capacity_factor, normalize_gates, sampled
        self.weight = nn.Parameter(torch.empty(num_experts, d_model, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialise the weight uniformly within ``1 / sqrt(d_model)``, like ``nn.Linear``."""
        bound = 1 / math.sqrt(self.d_model)
        nn.init.uniform_(self.weight, -bound, bound)

    def extra_repr(self) -> str:
        """The arguments, for ``print``."""
        return (
            f"{self.d_model}, num_experts={self.num_experts}, k={self.k}, capacity_factor={self.capacity_factor}, "
            f"normalize_gates={self.normalize_gates}, sampled={self.sampled}"
        )

    def capacity(self, tokens: int) -> int:
        """Rows of each expert for a group of ``tokens``: ``ceil(capacity_factor * k * tokens / num_experts)``.

        At least 1, and at most ``tokens``, because no token chooses an expert twice.
        """
        if self.capacity_factor is None:
            return tokens
        rows = self.capacity_factor * self.k * tokens / self.num_experts
        return max(1, min(tokens, math.ceil(rows - 1e-9)))  # 1.1 * 10 is a little more than 11

    def forward(self, x: Tensor) -> Routing:
        """Route ``x`` [groups, tokens, d_model].

        Raises:
            ShardGraphError: ``x`` has another number of dimensions or another width.
        """
        self._check(list(x.shape))
        logits = self._logits(x)
        probabilities = logits.softmax(-1)
        experts, chosen = self._choose(logits)
        positions = _positions(experts, chosen)
        kept = positions < self.capacity(x.shape[1])
        weights = probabilities.gather(2, experts.transpose(1, 2)).transpose(1, 2) * kept
        if self.normalize_gates and self.k > 1:
            weights = weights / weights.sum(1, keepdim=True).clamp_min(torch.finfo(weights.dtype).eps)
        return Routing(experts, positions, kept, weights, _balance(probabilities, chosen[:, 0]))

    def _check(self, shape: list[int]) -> None:
        if len(shape) != 3:
            raise ShardGraphError(
                f"a mixture of experts was given {shape}, and takes [groups, tokens, d_model]: experts have a capacity "
                f"per group; x.view(groups, -1, {self.d_model}) says which tokens share one"
            )
        if shape[-1] != self.d_model:
            raise ShardGraphError(
                f"a mixture of experts with d_model={self.d_model} was given {shape}, whose tokens are {shape[-1]} "
                f"wide: give it [groups, tokens, {self.d_model}], or build it with d_model={shape[-1]}"
            )

    def _logits(self, x: Tensor) -> Tensor:
        """[groups, tokens, num_experts] in fp32 or wider: the 3 digits of bf16 are too few to rank experts."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        device = x.device.type
        has_autocast = torch.amp.is_autocast_available(device)
        with torch.autocast(device, enabled=False) if has_autocast else nullcontext():
            return F.linear(x.to(dtype), self.weight.to(dtype))

    def _choose(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        """The choices [groups, k, tokens], and the same as a mask [groups, k, tokens, num_experts].

        By argmax and mask rather than ``topk``, because argmax breaks ties alike on every device.
        """
        numbers = torch.arange(self.num_experts, device=logits.device)
        scores = logits.detach()
        experts: list[Tensor] = []
        masks: list[Tensor] = []
        for choice in range(self.k):
            if choice == 1 and self.sampled and self.training:
                scores = scores - torch.empty_like(scores).exponential_().log()  # -log(Exp(1)) is Gumbel(0, 1)
            if choice:
                scores = scores.masked_fill(masks[-1], -math.inf)
            experts.append(scores.argmax(-1))
            masks.append(experts[-1].unsqueeze(-1) == numbers)
        return torch.stack(experts, 1), torch.stack(masks, 1)


def _positions(experts: Tensor, chosen: Tensor) -> Tensor:
    """[groups, k, tokens]: the number of earlier choices of the same expert in the group."""
    upto = chosen.flatten(1, 2).cumsum(1, dtype=torch.int32)  # [groups, k * tokens, num_experts], itself included
    own = upto.gather(2, experts.flatten(1, 2).unsqueeze(-1)).view(experts.shape)
    return own.to(torch.int64) - 1


def _balance(probabilities: Tensor, first: Tensor) -> Tensor:
    """The auxiliary loss from probabilities and the mask of first choices, both [groups, tokens, num_experts]."""
    fraction = first.to(probabilities.dtype).mean(1)
    return (fraction * probabilities.mean(1)).sum(-1).mean() * probabilities.shape[-1]
