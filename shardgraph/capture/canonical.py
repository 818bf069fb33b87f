"""One captured graph for every device.

PyTorch chooses some kernels while a model is traced, by the device of its tensors. Where the choice changes the
operations, the graphs of a CPU and a GPU differ, and a plan for one does not apply to the other. So capture makes the
same choice everywhere:

* cuDNN's batch norm and recurrent layers are off while tracing: batch norm is PyTorch's native one, recurrent layers
  are written out. (A convolution is one operation anyway, and picks its kernel when it runs.)
* Attention is one operation, a fused kernel, where every device has one for it; with dropout or a mask that is
  trained, which the CPU's kernel does not have, it is written out on all of them.
* RMS norm is written out, as on the CPU. A fused backend fuses its operations again.

Remaining differences, such as the attention kernel's name, are unified by :mod:`shardgraph.ir.operations`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import fx
from torch.nn.attention import SDPBackend, sdpa_kernel

_ATTENTION = F.scaled_dot_product_attention


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


def write_out(gm: fx.GraphModule) -> None:
    """Replace calls of PyTorch's functions in a traced module that only some devices have a kernel for."""
    changed = False
    for node in list(gm.graph.nodes):
        written = _WRITTEN_OUT.get(node.target) if node.op == "call_function" else None
        if written is None or (node.target is _ATTENTION and _has_kernel(*node.args, **node.kwargs)):
            continue
        with gm.graph.inserting_before(node):
            replacement = gm.graph.call_function(written, node.args, node.kwargs)
        replacement.meta = dict(node.meta)
        node.replace_all_uses_with(replacement)
        gm.graph.erase_node(node)
        changed = True
    if changed:
        gm.recompile()


def _has_kernel(
    query: Any, key: Any, value: Any, attn_mask: Any = None, dropout_p: float = 0.0, *_: Any, **__: Any
) -> bool:
    """Whether every device has a fused kernel for an attention."""
    mask = attn_mask.meta.get("example_value") if isinstance(attn_mask, fx.Node) else None
    return not dropout_p and (mask is None or not mask.requires_grad)


def _attention(*args: Any, **kwargs: Any) -> torch.Tensor:
    with sdpa_kernel(SDPBackend.MATH):
        return _ATTENTION(*args, **kwargs)


def _rms_norm(
    input: torch.Tensor, normalized_shape: tuple[int, ...], weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    # As PyTorch's CPU computes it: half precision in single, the weight last.
    wide = input.to(torch.promote_types(input.dtype, torch.float32))
    eps = torch.finfo(wide.dtype).eps if eps is None else eps
    dims = list(range(-len(normalized_shape), 0))
    normal = wide * torch.rsqrt(wide.pow(2).mean(dims, keepdim=True).add(eps))
    return (normal if weight is None else normal * weight).to(input.dtype)


_WRITTEN_OUT: dict[Any, Callable[..., torch.Tensor]] = {
    _ATTENTION: _attention,
    torch.rms_norm: _rms_norm,
    F.rms_norm: _rms_norm,
}
