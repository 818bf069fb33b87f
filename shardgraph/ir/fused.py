"""Operations that each kind of device has a fused kernel for, as one operator each in graphs of every device.

``torch.ops.shardgraph.attention`` and ``torch.ops.shardgraph.rms_norm``, with their backward: capture writes them in
place of PyTorch's functions, plans and prices know them alone, and binding replaces each by the kernel of its device.
Called in an unbound graph, they choose the kernel by the device of their operands.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from shardgraph import torch_api

_Kernels = tuple[Callable[..., Any], Callable[..., Any]]
_KERNELS: dict[Any, tuple[Callable[[str], _Kernels], int]] = {}


def kernel_on(target: Any, device_type: str) -> Callable[..., Any]:
    """The kernel of one of :data:`OPERATORS` on a type of device."""
    kernels, direction = _KERNELS[target]
    return kernels(device_type)[direction]


def is_kernel(target: Any, device_type: str) -> bool:
    """Whether one of :data:`OPERATORS` is bound to this kernel on a type of device."""
    return any(target is kernel_on(each, device_type) for each in _KERNELS)


def _operator(name: str, schema: str, kernels: Callable[[str], _Kernels], direction: int) -> Any:
    """A new operator, computed by the forward (0) or backward (1) of its device's kernels."""

    def call(first: Tensor, *rest: Any) -> Any:
        return kernels(first.device.type)[direction](first, *rest)

    torch.library.define(f"shardgraph::{name}", schema, tags=(torch.Tag.pt2_compliant_tag,))
    torch.library.impl(f"shardgraph::{name}", "default")(call)
    operator = getattr(torch.ops.shardgraph, name).default
    _KERNELS[operator] = kernels, direction
    return operator


_OPERANDS = "Tensor query, Tensor key, Tensor value"
_OPTIONS = "Tensor? attn_mask, bool is_causal, float scale"
ATTENTION = _operator(
    "attention", f"({_OPERANDS}, {_OPTIONS}) -> (Tensor out, Tensor logsumexp)", torch_api.attention_on, 0
)
ATTENTION_BACKWARD = _operator(
    "attention_backward",
    f"(Tensor grad_out, {_OPERANDS}, Tensor out, Tensor logsumexp, {_OPTIONS}) -> (Tensor, Tensor, Tensor)",
    torch_api.attention_on,
    1,
)
RMS_NORM = _operator(
    "rms_norm",
    "(Tensor input, int[] normalized_shape, Tensor? weight, float eps) -> (Tensor out, Tensor rstd)",
    torch_api.rms_norm_on,
    0,
)
RMS_NORM_BACKWARD = _operator(
    "rms_norm_backward",
    "(Tensor grad_out, Tensor input, int[] normalized_shape, Tensor rstd, Tensor? weight) -> (Tensor, Tensor?)",
    torch_api.rms_norm_on,
    1,
)
OPERATORS = frozenset(_KERNELS)


# -- values without computation ----------------------------------------------------------------------------


@torch.library.register_fake("shardgraph::attention")
def _(query: Tensor, *rest: Any) -> tuple[Tensor, Tensor]:
    single = torch.promote_types(query.dtype, torch.float32)
    return torch.empty_like(torch_api.unit_stride(query)), query.new_empty(query.shape[:3], dtype=single)


@torch.library.register_fake("shardgraph::attention_backward")
def _(grad: Tensor, query: Tensor, key: Tensor, value: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    layouts = ((each, torch_api.positions_first(each)) for each in (query, key, value))
    return tuple(each.new_empty_strided(each.shape, layout.stride()) for each, layout in layouts)


@torch.library.register_fake("shardgraph::rms_norm")
def _(x: Tensor, normalized_shape: list[int], *rest: Any) -> tuple[Tensor, Tensor]:
    rows = (*x.shape[: x.dim() - len(normalized_shape)], *(1 for _ in normalized_shape))
    return x.new_empty(x.shape), x.new_empty(rows, dtype=torch.promote_types(x.dtype, torch.float32))


@torch.library.register_fake("shardgraph::rms_norm_backward")
def _(grad: Tensor, x: Tensor, shape: list[int], rstd: Tensor, weight: Tensor | None) -> tuple[Tensor, Tensor | None]:
    return x.new_empty(x.shape), None if weight is None else weight.new_empty(weight.shape)


# -- gradients ---------------------------------------------------------------------------------------------


def _save_attention(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    query, key, value, mask, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, mask)
    ctx.mark_non_differentiable(output[1])


def _attention_gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    return (*ATTENTION_BACKWARD(grad, *ctx.saved_tensors, *ctx.options), None, None, None)


def _save_rms_norm(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, ctx.normalized_shape, weight, _ = inputs
    ctx.save_for_backward(x, output[1], weight)
    ctx.mark_non_differentiable(output[1])


def _rms_norm_gradients(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, rstd, weight = ctx.saved_tensors
    of_x, of_weight = RMS_NORM_BACKWARD(grad, x, ctx.normalized_shape, rstd, weight)
    return of_x, None, of_weight, None


torch.library.register_autograd("shardgraph::attention", _attention_gradients, setup_context=_save_attention)
torch.library.register_autograd("shardgraph::rms_norm", _rms_norm_gradients, setup_context=_save_rms_norm)
