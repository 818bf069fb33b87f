"""FairScale's MEVO is a plain projection and loss, which ``loss_chunk`` computes without all scores at once."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardgraph.arguments import POSITIVE, TENSOR, WHOLE, checked, number, one_of
from shardgraph.errors import ShardGraphError

_FINITE = number("a number", math.isfinite)


class MemoryEfficientVocabOutput(nn.Module):
    """``fairscale.experimental.nn.MEVO``: scores of a vocabulary, and their cross-entropy.

    Compiled with ``loss_chunk``, or a ``memory`` for which it is chosen, neither scores nor their gradients are ever
    there for all rows; uncompiled they are.

    Args:
        proj_weight: [words, width]; may be that of an embedding.
        tile_factor: has no effect: ``loss_chunk`` says how many bytes of scores there are at once.
        reduction: ``"sum"`` or ``"mean"``.
        margin: with a ``scale``, what is subtracted from the cosine of the right word.
        scale: the loss is of cosines, times this: the large margin cosine loss (Wang et al. 2018, "CosFace",
            https://arxiv.org/abs/1801.09414, equation 4).

    Raises:
        ShardGraphError: there is no such reduction.
    """

    @checked(proj_weight=TENSOR, tile_factor=WHOLE, reduction=one_of(["sum", "mean"]), margin=_FINITE, scale=POSITIVE)
    def __init__(
        self,
        proj_weight: nn.Parameter,
        tile_factor: int = 16,
        reduction: str = "sum",
        margin: float = 0.35,
        scale: float | None = None,
    ) -> None:
        super().__init__()
        self.proj_weight, self.reduction, self.margin, self.scale = proj_weight, reduction, margin, scale

    def forward(self, input: Tensor, target: Tensor | None = None) -> Tensor:
        """The loss of ``input`` [..., width] and ``target`` [...], in float32; without a target the scores.

        Raises:
            ShardGraphError: there is no target in training.
        """
        if target is None:
            if self.training:
                raise ShardGraphError("MEVO computes a loss in training: give it the target")
            return F.linear(input, self.proj_weight)
        rows, words = input.flatten(0, -2), target.flatten()
        if self.scale is None:
            scores = F.linear(rows, self.proj_weight)
        else:
            cosines = F.linear(F.normalize(rows, dim=1), F.normalize(self.proj_weight, dim=1))
            right = torch.arange(len(self.proj_weight), device=words.device) == words.unsqueeze(1)
            scores = (cosines - self.margin * right) * self.scale
        return F.cross_entropy(scores.float(), words, reduction=self.reduction)


MEVO = MemoryEfficientVocabOutput
