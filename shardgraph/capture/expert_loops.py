"""Mixtures of experts of ``transformers`` that loop over the experts that were chosen, as products of grouped rows.

Most of its mixtures have such an implementation (``experts_implementation``); these are the ones that have none. Rows
are sorted by their expert, and one operation multiplies each group with the matrix of its expert. Adapters of languages
are small, and all are computed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def _ends(experts: Tensor, count: int) -> Tensor:
    """The row behind the last one of each expert, of sorted rows ``[rows]``."""
    numbers = torch.arange(count, device=experts.device)
    return (experts[:, None] == numbers).sum(0).cumsum(0, dtype=torch.int32)


def _products(rows: Tensor, weight: Tensor, ends: Tensor, transposed: bool = False) -> Tensor:
    """``rows [rows, inner]`` times each expert's ``weight [experts, columns, inner]``; transposed, ``[experts, inner,
    columns]``."""
    from transformers.integrations.moe import _grouped_linear

    product: Tensor = _grouped_linear(rows, weight, ends, is_transposed=transposed)
    return product


def _jetmoe_router(self: Any, hidden_states: Tensor) -> tuple[Tensor, ...]:
    """With the numbers of rows of experts as a tensor, which :func:`_jetmoe_experts` takes."""
    logits = self.layer(hidden_states).float()
    values, chosen = logits.topk(self.top_k, dim=1)
    gates = values.softmax(1).type_as(hidden_states).flatten()
    experts, order = chosen.flatten().sort(0)
    counts = (experts[:, None] == torch.arange(self.num_experts, device=experts.device)).sum(0)
    return order, order // self.top_k, gates[order], counts, logits


def _jetmoe_experts(self: Any, inputs: Tensor, expert_size: Tensor) -> Tensor:
    return _products(inputs, self.weight, expert_size.cumsum(0, dtype=torch.int32))


def _longcat_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    """Experts behind the routed ones return their rows as they are."""
    if self.gate_up_proj is None or not self.num_routed_experts:
        return hidden_states * top_k_weights.sum(-1, keepdim=True)
    experts, order = top_k_index.flatten().sort()
    tokens, last = order // top_k_index.shape[-1], self.num_routed_experts - 1
    rows, ends = hidden_states[tokens], _ends(experts.clamp(max=last), last + 1)
    gate, up = _products(rows, self.gate_up_proj[: last + 1], ends).chunk(2, dim=-1)
    computed = _products(self.act_fn(gate) * up, self.down_proj, ends)
    chosen = torch.where((experts > last)[:, None], rows, computed) * top_k_weights.flatten()[order, None]
    return torch.zeros_like(hidden_states).index_add(0, tokens, chosen.to(hidden_states.dtype))


def _dbrx_experts(self: Any, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
    batch, mlp = hidden_states.shape[0], self.mlp
    flat = hidden_states.reshape(-1, self.hidden_size)
    experts, order = top_k_index.flatten().sort()
    tokens = order // top_k_index.shape[-1]
    rows, ends = flat[tokens], _ends(experts, self.num_experts)
    gate, up, down = (each.view(-1, self.ffn_hidden_size, self.hidden_size) for each in (mlp.w1, mlp.v1, mlp.w2))
    hidden = mlp.activation_fn(_products(rows, gate, ends)) * _products(rows, up, ends)
    computed = _products(hidden, down, ends, transposed=True) * top_k_weights.flatten()[order, None]
    return torch.zeros_like(flat).index_add(0, tokens, computed).view(batch, -1, self.hidden_size)


def _switch_experts(self: Any, hidden_states: Tensor, selected_experts: Tensor, routing_weights: Tensor) -> Tensor:
    """Tokens beyond the capacity of their expert have none, and become zeros."""
    chosen, each = selected_experts[:, 0], list(self.values())
    experts, order = chosen.argmax(-1).sort(stable=True)
    ends = _ends(experts, self.num_experts)
    first, second = (torch.stack([getattr(expert, name).weight for expert in each]) for name in ("wi", "wo"))
    hidden = each[0].dropout(each[0].act(_products(hidden_states[order], first, ends)))
    computed = _products(hidden, second, ends) * (routing_weights * chosen.sum(-1, keepdim=True))[order]
    return torch.zeros_like(hidden_states).index_add(0, order, computed.to(hidden_states.dtype))


def _nllb_experts(self: Any, hidden_states: Tensor, router_mask: Tensor, router_probs: Tensor) -> Tensor:
    """As the class is written: of each token and expert, ``expert_1`` computes if the mask has a 1, else ``expert_0``;
    the others never do."""
    pairs = hidden_states.repeat_interleave(self.num_experts, 0)
    of_zero, of_one = (self[f"expert_{i}"](pairs) for i in (0, 1))
    computed = torch.where(router_mask.flatten()[:, None] > 0, of_one, of_zero) * router_probs.flatten()[:, None]
    if self.moe_token_dropout > 0:
        computed = self.token_dropout(computed) if self.training else computed * (1 - self.moe_token_dropout)
    return computed.view(-1, self.num_experts, hidden_states.shape[-1]).sum(1).to(hidden_states.dtype)


def _xmod_output(self: Any, hidden_states: Tensor, input_tensor: Tensor, lang_ids: Tensor) -> Tensor:
    """The adapters of all languages on all rows, of which each row has that of its own."""
    hidden = normed = self.dropout(self.dense(hidden_states)) + input_tensor
    if self.adapter_layer_norm is not None:
        normed = self.adapter_layer_norm(hidden)
    elif self.adapter_reuse_layer_norm:
        normed = self.LayerNorm(hidden)
    adapted = torch.zeros_like(normed)
    for language, adapter in enumerate(self.adapter_modules.values()):
        own = (lang_ids == language).reshape(*lang_ids.shape, *[1] * (normed.dim() - lang_ids.dim()))
        adapted = torch.where(own, adapter(normed), adapted)
    residual: Tensor = normed if self.ln_before_adapter else hidden
    return self.dropout(adapted) + residual


_MODELS = "transformers.models."
EXPERT_LOOPS: dict[str, Callable[..., Any]] = {
    _MODELS + "jetmoe.modeling_jetmoe.JetMoeTopKGating": _jetmoe_router,
    _MODELS + "jetmoe.modeling_jetmoe.JetMoeParallelExperts": _jetmoe_experts,
    _MODELS + "longcat_flash.modeling_longcat_flash.LongcatFlashExperts": _longcat_experts,
    _MODELS + "switch_transformers.modeling_switch_transformers.SwitchTransformersExperts": _switch_experts,
    _MODELS + "nllb_moe.modeling_nllb_moe.NllbMoeExperts": _nllb_experts,
    _MODELS + "dbrx.modeling_dbrx.DbrxExperts": _dbrx_experts,
    _MODELS + "xmod.modeling_xmod.XmodOutput": _xmod_output,
}
"""Forwards by the name of the class."""
