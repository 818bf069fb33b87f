"""One captured graph for every device.

PyTorch chooses some kernels while a model is traced, by the device of its tensors. Where the choice changes the
operations, the graphs of a CPU and a GPU differ, and a plan for one does not apply to the other. So capture makes the
same choice everywhere:

* cuDNN's batch norm and recurrent layers are off while tracing: batch norm is PyTorch's native one, recurrent layers
  are written out. (A convolution is one operation anyway, and picks its kernel when it runs.)
* Attention and RMS norm are one operator each (:mod:`shardgraph.ir.fused`), and binding picks the device's kernel.
* Attention that no plan can shard as one kernel, or that not every device has one for, is written out on all: with
  dropout, since each kernel draws for the operands that it has; with a mask that is trained, heads of keys and values
  of unequal widths, or broadcast operands; or where the user asks for PyTorch's ``SDPBackend.MATH`` alone.
* Gradients of sparse embeddings are dense, which the user is told.
"""

from __future__ import annotations

import inspect
import math
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

from shardgraph import ir
from shardgraph.capture.recurrent import WRITTEN_OUT
from shardgraph.torch_api import pytree, tensor_of


@contextmanager
def same_kernels() -> Iterator[None]:
    """Inside, no device replaces an operation by one of its library's.

    ``nn.TransformerEncoderLayer`` in eval mode is not one fused operation either, which no plan could shard or cut.
    """
    fast = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        with torch.backends.cudnn.flags(enabled=False):
            yield
    finally:
        torch.backends.mha.set_fastpath_enabled(fast)


class FusedOperators(TorchFunctionMode):
    """While the traced module is lowered, PyTorch's functions that have no one graph for every plan are replaced.

    A mode, since they are not only in the traced graph but also in regions inside it and in functions left whole.
    """

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        return _REPLACED.get(function, function)(*args, **(kwargs or {}))


def _attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    if dropout_p or not _is_fused(query, key, value, attn_mask, is_causal, enable_gqa):
        with sdpa_kernel(SDPBackend.MATH):
            return F.scaled_dot_product_attention(
                query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
            )
    query, key, value = map(_as_autocast, (query, key, value))
    mask = None if attn_mask is None else _as_autocast(attn_mask)
    if mask is not None and mask.dtype is torch.bool:
        seen, hidden = (torch.scalar_tensor(v, dtype=query.dtype, device=query.device) for v in (0.0, -torch.inf))
        mask = torch.where(mask, seen, hidden)
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    out, _ = ir.fused.ATTENTION(query, key, value, mask, is_causal, scale)
    return out


def _is_fused(
    query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, is_causal: bool, enable_gqa: bool
) -> bool:
    """Whether every device has a fused kernel for it, or its formula. What PyTorch refuses, the tracer already has."""
    operands = (query, key, value)
    if any(tensor.dim() != 4 or not tensor.is_floating_point() or not tensor.numel() for tensor in operands):
        return False
    autocast = torch.is_autocast_enabled(query.device.type)
    heads = query.shape[1] == key.shape[1] or (enable_gqa and query.shape[1] % key.shape[1] == 0)
    shapes = query.shape[0] == key.shape[0] and query.shape[-1] == key.shape[-1] and key.shape == value.shape
    one_dtype = autocast or query.dtype == key.dtype == value.dtype
    if mask is not None:
        known = autocast or mask.dtype in (query.dtype, torch.bool) or (mask.dtype, query.dtype) in _MIXED
        scores = (*query.shape[:3], key.shape[2])
        if is_causal or mask.requires_grad or not (known and _broadcasts(mask.shape, scores)):
            return False
    switches = torch.backends.cuda  # which hold on all devices
    allowed = switches.flash_sdp_enabled() or switches.mem_efficient_sdp_enabled() or switches.cudnn_sdp_enabled()
    return heads and shapes and one_dtype and allowed


def _broadcasts(mask: tuple[int, ...], scores: tuple[int, ...]) -> bool:
    """Whether a mask is of all scores, of queries and keys alone, or the same along dimensions of size 1."""
    if len(mask) not in (2, 4):
        return False
    return all(size in (1, whole) for size, whole in zip(reversed(mask), reversed(scores), strict=False))


def _as_autocast(tensor: Tensor) -> Tensor:
    """An operand in the precision in which PyTorch runs attention under ``torch.autocast``."""
    kind = tensor.device.type
    casts = tensor.is_floating_point() and tensor.dtype is not torch.float64 and torch.is_autocast_enabled(kind)
    return tensor.to(torch.get_autocast_dtype(kind)) if casts else tensor


def _rms_norm(
    input: Tensor, normalized_shape: Sequence[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    if weight is not None and weight.dtype != input.dtype:  # which no fused kernel has
        return torch.rms_norm(input, normalized_shape, weight, eps)
    eps = torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps if eps is None else eps
    out, _ = ir.fused.RMS_NORM(input, list(normalized_shape), weight, eps)
    return out


def _batch_norm(input: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    # Of other strides, such as of transposed positions, kernels give a contiguous result, and the traced value is
    # strided like the input: views of it would be made that the result cannot have. Likewise in backward.
    formats = {4: torch.channels_last, 5: torch.channels_last_3d}
    if input.dim() in formats and input.is_contiguous(memory_format=formats[input.dim()]):
        return F.batch_norm(input, *args, **kwargs)
    result = F.batch_norm(input.contiguous(), *args, **kwargs)
    if result.requires_grad:
        result.register_hook(Tensor.contiguous)  # not an identity around it: an in-place ReLU would write to its view
    return result


def _calling(function: Any, others: dict[str, Any]) -> Callable[..., Any]:
    """A copy of a Python function that calls ``others`` by name: in its own code no mode replaces anything."""
    copied = types.FunctionType(function.__code__, {**function.__globals__, **others}, argdefs=function.__defaults__)
    copied.__kwdefaults__ = function.__kwdefaults__
    return copied


def _of_contiguous(determinant: Callable[..., Any]) -> Callable[..., Any]:
    """Factors the transpose, as of any matrix that is contiguous: what backward solves depends on it."""
    return lambda matrix, *args, **kwargs: determinant(matrix.contiguous(), *args, **kwargs)


def _one_hot(tensor: Tensor, num_classes: int = -1) -> Tensor:
    """With the check of its classes in the operation that writes them, instead of one of its own without a result."""
    if num_classes <= 0:
        return F.one_hot(tensor, num_classes)
    zeros = torch.zeros((*tensor.shape, num_classes), dtype=torch.int64, device=tensor.device)
    return zeros.scatter(-1, tensor.unsqueeze(-1), 1)


def _tensor(data: Any, **options: Any) -> Tensor:
    """Of tensors as the tracer makes it: torch copies what they hold, and those of a trace hold nothing."""
    holds = not isinstance(data, Tensor) and any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(data))
    made: Tensor = tensor_of(data, **options) if holds else torch.tensor(data, **options)
    return made


def _dense(function: Any) -> Callable[..., Tensor]:
    """An embedding whose gradient is dense."""
    signature = inspect.signature(function)

    def embed(*args: Any, **kwargs: Any) -> Tensor:
        call = signature.bind(*args, **kwargs)
        if call.arguments.get("sparse"):
            warnings.warn("shardgraph makes the gradients of sparse embeddings dense", stacklevel=2)
            call.arguments["sparse"] = False
        embedded: Tensor = function(*call.args, **call.kwargs)
        return embedded

    return embed


_MIXED = {(torch.float32, torch.float16), (torch.float32, torch.bfloat16)}
"""Precisions of a mask and of queries that differ and that PyTorch accepts."""

_DETERMINANTS = (
    *(torch.det, torch.slogdet, torch.logdet, torch.linalg.det, torch.linalg.slogdet),
    *(Tensor.det, Tensor.slogdet, Tensor.logdet),
)

_REPLACED: dict[Any, Callable[..., Any]] = {
    F.scaled_dot_product_attention: _attention,
    F.multi_head_attention_forward: _calling(
        F.multi_head_attention_forward, {"scaled_dot_product_attention": _attention}
    ),
    F.batch_norm: _batch_norm,
    torch.rms_norm: _rms_norm,
    F.rms_norm: _rms_norm,
    **{function: _of_contiguous(function) for function in _DETERMINANTS},
    F.one_hot: _one_hot,
    torch.tensor: _tensor,
    F.embedding: _dense(F.embedding),
    F.embedding_bag: _dense(F.embedding_bag),
    **WRITTEN_OUT,
}
