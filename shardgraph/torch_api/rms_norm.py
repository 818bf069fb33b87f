"""RMS norm's kernels for each kind of device, behind one signature.

``forward(x, normalized_shape, weight, eps)`` returns the output and the reciprocals of the root mean squares, in at
least single precision; ``backward(grad, x, normalized_shape, rstd, weight)`` the gradients of the input and of the
weight. All are contiguous. PyTorch has a fused kernel for a GPU; elsewhere the formula is computed, to the same bits as
``torch.rms_norm`` there (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

aten = torch.ops.aten
Tensor = torch.Tensor


class RMSNorm(NamedTuple):
    """The two directions of RMS norm on one kind of device."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., tuple[Tensor, Tensor | None]]


def rms_norm_on(device_type: str) -> RMSNorm:
    """RMS norm for ``"cuda"`` or any other type of device."""
    return _FUSED if device_type == "cuda" else _BY_FORMULA


def _fused(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    return aten._fused_rms_norm(x, list(normalized_shape), weight, eps)


def _fused_backward(
    grad: Tensor, x: Tensor, normalized_shape: Sequence[int], rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    wanted = [True, weight is not None]
    of_x, of_weight = aten._fused_rms_norm_backward(grad, x, list(normalized_shape), rstd, weight, wanted)
    return of_x, None if weight is None else of_weight


def _formula(x: Tensor, normalized_shape: Sequence[int], weight: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    dims = list(range(-len(normalized_shape), 0))
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    rstd = wide.pow(2).mean(dims, keepdim=True).add_(eps).rsqrt_()
    normal = torch.mul(wide, rstd).contiguous()
    return (normal if weight is None else normal.mul_(weight)).to(x.dtype), rstd


def _formula_backward(
    grad: Tensor, x: Tensor, normalized_shape: Sequence[int], rstd: Tensor, weight: Tensor | None
) -> tuple[Tensor, Tensor | None]:
    dims = list(range(-len(normalized_shape), 0))
    normal = x.to(rstd.dtype) * rstd
    of_normal = grad.to(rstd.dtype)
    of_weight = None
    if weight is not None:
        rows = list(range(x.dim() - len(normalized_shape)))
        products = normal * of_normal
        of_weight = (products.sum(rows) if rows else products).to(weight.dtype)
        of_normal = of_normal * weight
    along = (normal * of_normal).mean(dims, keepdim=True)
    return torch.addcmul(of_normal, normal, along, value=-1).mul_(rstd).to(x.dtype).contiguous(), of_weight


_FUSED = RMSNorm(_fused, _fused_backward)
_BY_FORMULA = RMSNorm(_formula, _formula_backward)
