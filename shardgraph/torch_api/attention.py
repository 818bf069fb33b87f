"""Attention's kernels for each kind of device, behind one signature.

``forward(query, key, value, mask, is_causal, scale)`` returns the output, in the memory layout of the queries, and the
log-sum-exp of the scores, contiguous ``[batch, heads, queries]``. ``backward(grad, query, key, value, out, logsumexp,
mask, is_causal, scale)`` returns the gradients of queries, keys and values, in memory with positions before heads. Keys
and values may have fewer heads; a mask is added to the scores and may be broadcast. Devices that have no kernels, or
none for a precision, use the formula (Dao et al., 2022, https://arxiv.org/abs/2205.14135, appendix B).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F

from shardgraph.torch_api.tensors import with_strides

aten = torch.ops.aten
Tensor = torch.Tensor


Gradients = tuple[Tensor, Tensor, Tensor]


class Attention(NamedTuple):
    """The two directions of attention on one kind of device."""

    forward: Callable[..., tuple[Tensor, Tensor]]
    backward: Callable[..., Gradients]


def attention_on(device_type: str) -> Attention:
    """Attention for ``"cpu"``, ``"cuda"`` or any other type of device."""
    return _ON_DEVICE.get(device_type, _BY_FORMULA)


# -- CPU ---------------------------------------------------------------------------------------------------


def _cpu(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    mask, is_causal, scale = options
    out, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(
        *map(unit_stride, (query, key, value)), 0.0, is_causal, attn_mask=mask, scale=scale
    )
    return out, logsumexp.contiguous()


def _cpu_backward(grad: Tensor, *call: Any) -> Gradients:
    query, key, value, out, logsumexp, mask, is_causal, scale = call
    grad, query, key, value, out = map(unit_stride, (grad, query, key, value, out))
    return aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, query, key, value, out, logsumexp, 0.0, is_causal, attn_mask=mask, scale=scale
    )


def unit_stride(tensor: Tensor) -> Tensor:
    """The tensor with adjacent elements along its last dimension, which all kernels require."""
    return tensor if tensor.stride(-1) == 1 else tensor.contiguous()


# -- CUDA --------------------------------------------------------------------------------------------------


def _cuda(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    mask, is_causal, scale = options
    if not _has_kernel(query, mask):
        return _formula(query, key, value, *options)
    q, k, v = map(_padded_width, (query, key, value))
    if _flash(query, key, mask, is_causal):
        out, logsumexp, *_ = aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, scale=scale)
    else:
        k, v = (_repeated(tensor, query.shape[1]) for tensor in (k, v))
        bias = _aligned(mask, query, key)
        out, logsumexp, *_ = aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, is_causal, scale=scale
        )
    like = torch.empty_like(unit_stride(query), device="meta")
    return with_strides(out.narrow(-1, 0, query.shape[-1]), like.stride()), logsumexp.narrow(
        -1, 0, query.shape[2]
    ).contiguous()


def _cuda_backward(grad: Tensor, *call: Any) -> Gradients:
    query, key, value, out, logsumexp, mask, is_causal, scale = call
    if not _has_kernel(query, mask):
        return _formula_backward(grad, *call)
    heads, rows = query.shape[1:3]
    grad, q, k, v, out = map(_padded_width, (grad, query, key, value, out))
    if _flash(query, key, mask, is_causal):
        state = torch.empty(2, dtype=torch.uint64, device=query.device)  # of random numbers, unused without dropout
        lengths = (None, None, rows, key.shape[2])
        gradients = aten._scaled_dot_product_flash_attention_backward(
            grad, q, k, v, out, logsumexp.contiguous(), *lengths, 0.0, is_causal, state, state.select(0, 0), scale=scale
        )
    else:
        state = torch.empty((), dtype=torch.int64, device=query.device)
        k, v = (_repeated(tensor, heads) for tensor in (k, v))
        # This kernel reads the log-sum-exp in blocks of 32 queries; infinity gives missing ones no weight. In 16 bits
        # it takes the output's positions to lie before its heads, whatever its strides: another's values are garbage.
        rows_padded = F.pad(logsumexp, (0, -rows % 32), value=torch.inf)
        out = out.transpose(1, 2).contiguous().transpose(1, 2)
        bias, wanted = _aligned(mask, query, key), [True, True, True, False]
        gradients = aten._scaled_dot_product_efficient_attention_backward(
            grad, q, k, v, bias, out, rows_padded, state, state, 0.0, wanted, is_causal, scale=scale
        )
    shapes = (query.shape, key.shape, value.shape)
    summed = (_summed(gradient.narrow(-1, 0, s[-1]), s[1]) for gradient, s in zip(gradients, shapes, strict=False))
    of_query, of_key, of_value = (with_strides(each, positions_first(each).stride()) for each in summed)
    return of_query, of_key, of_value


def _has_kernel(query: Tensor, mask: Tensor | None) -> bool:
    return query.dtype is not torch.float64 and (mask is None or mask.dtype == query.dtype)


@functools.cache
def has_flash(device: torch.device) -> bool:
    return torch.version.hip is not None or torch.cuda.get_device_capability(device) >= (8, 0)


def _flash(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    """Whether FlashAttention computes it: its causal mask starts at the last key, not at the first."""
    half = query.dtype in (torch.float16, torch.bfloat16)
    square = not is_causal or query.shape[2] == key.shape[2]
    return half and mask is None and square and query.shape[-1] <= 256 and has_flash(query.device)


def _padded_width(tensor: Tensor) -> Tensor:
    """Heads widened with zeros to a multiple of 8, which changes no score."""
    missing = -tensor.shape[-1] % 8
    return F.pad(tensor, (0, missing)) if missing else unit_stride(tensor)


def _repeated(tensor: Tensor, heads: int) -> Tensor:
    return tensor if tensor.shape[1] == heads else tensor.repeat_interleave(heads // tensor.shape[1], 1)


def _summed(gradient: Tensor, heads: int) -> Tensor:
    """The gradient of ``heads`` heads from that of their repetitions."""
    return gradient if gradient.shape[1] == heads else gradient.unflatten(1, (heads, -1)).sum(2)


def _aligned(mask: Tensor | None, query: Tensor, key: Tensor) -> Tensor | None:
    """The mask for every batch, head and query, in rows of a multiple of 16 elements."""
    if mask is None:
        return None
    keys = key.shape[2]
    rows = mask.expand(*mask.shape[:-1], keys)
    padded = F.pad(rows, (0, -keys % 16)) if keys % 16 else rows.contiguous()
    return padded.narrow(-1, 0, keys).expand(*query.shape[:3], keys)


def positions_first(tensor: Tensor) -> Tensor:
    """An empty tensor of this shape, on no device, in which positions lie before heads."""
    batch, heads, rows, width = tensor.shape
    return torch.empty(batch, rows, heads, width, device="meta").transpose(1, 2)


# -- any device --------------------------------------------------------------------------------------------


def _formula(query: Tensor, key: Tensor, value: Tensor, *options: Any) -> tuple[Tensor, Tensor]:
    query, key, value = map(unit_stride, (query, key, value))
    scores = _scores(query, key, *options)
    logsumexp = scores.logsumexp(-1)
    logsumexp = logsumexp.masked_fill(logsumexp == -torch.inf, 0.0)  # of a query that sees no key
    weights = (scores - logsumexp.unsqueeze(-1)).exp()
    out = weights @ _repeated(value, query.shape[1]).to(weights.dtype)
    return torch.empty_like(query).copy_(out), logsumexp


def _formula_backward(grad: Tensor, *call: Any) -> Gradients:
    query, key, value, out, logsumexp, mask, is_causal, scale = call
    heads, weights = query.shape[1], (_scores(query, key, mask, is_causal, scale) - logsumexp.unsqueeze(-1)).exp()
    wide: Any = [tensor.to(weights.dtype) for tensor in (grad, out, query)]
    grad_wide, out_wide, query_wide = wide
    key_wide, value_wide = (_repeated(tensor, heads).to(weights.dtype) for tensor in (key, value))
    of_weights = grad_wide @ value_wide.transpose(-1, -2)
    of_scores = weights * (of_weights - (grad_wide * out_wide).sum(-1, keepdim=True)) * scale
    of_key = _summed(of_scores.transpose(-1, -2) @ query_wide, key.shape[1])
    of_value = _summed(weights.transpose(-1, -2) @ grad_wide, value.shape[1])
    gradients = (of_scores @ key_wide, of_key, of_value)
    of_query, of_key, of_value = (
        with_strides(each.to(query.dtype), positions_first(each).stride()) for each in gradients
    )
    return of_query, of_key, of_value


def _scores(query: Tensor, key: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    dtype = torch.promote_types(query.dtype, torch.float32)
    scores = query.to(dtype) @ _repeated(key, query.shape[1]).to(dtype).transpose(-1, -2) * scale
    if is_causal:
        later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=scores.device).triu(1)
        scores = scores.masked_fill(later, -torch.inf)
    return scores if mask is None else scores + mask


_BY_FORMULA = Attention(_formula, _formula_backward)
_ON_DEVICE = {"cpu": Attention(_cpu, _cpu_backward), "cuda": Attention(_cuda, _cuda_backward)}
