"""A model's fingerprint, which must be equal on all ranks before it is sharded."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import torch
from torch import nn

_SPREAD = 4096  # elements of a larger tensor that are hashed


def fingerprint(model: nn.Module, may_differ: Callable[[str], bool] = lambda name: False) -> str:
    """The names, shapes, dtypes and hashed values of the model's parameters, one line each.

    Ranks may have different values of those whose names ``may_differ`` is true for.
    """
    lines = [
        f"{name}: {list(p.shape)} {p.dtype} {'' if may_differ(name) else f'values {digest(p)}'}"
        for name, p in model.named_parameters()
    ]
    return "\n".join([type(model).__name__, *lines])


@torch.no_grad()
def digest(tensor: torch.Tensor) -> str:
    """A hash of a tensor's bytes, or of those of 4096 evenly spread elements; ``"meta"`` for a tensor on ``meta``.

    Bytes are hashed, not summed: sums of floats depend on the order of addition, and so on the processor.
    """
    if tensor.is_meta:
        return "meta"
    flat = tensor.detach().reshape(-1)
    if flat.numel() > _SPREAD:
        flat = flat[torch.arange(_SPREAD, device=flat.device) * (flat.numel() - 1) // (_SPREAD - 1)]
    return hashlib.sha256(flat.contiguous().view(torch.uint8).cpu().numpy().tobytes()).hexdigest()[:16]
