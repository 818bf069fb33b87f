"""Names of operations that are the same on every device.

PyTorch traces attention, normalisation and convolution into one kernel on the CPU and into another on a GPU. A plan
names operations (what to recompute, placements of equal operations), so it uses the name of what a kernel computes: a
plan made on a laptop then applies to the graph of a GPU.
"""

from __future__ import annotations

import operator
from typing import Any

from torch import fx

_KERNELS = {  # those of a backward have the suffix _backward
    "attention": (
        "scaled_dot_product_flash_attention_for_cpu",
        "scaled_dot_product_flash_attention",
        "scaled_dot_product_efficient_attention",
        "scaled_dot_product_cudnn_attention",
        "scaled_dot_product_fused_attention_overrideable",
    ),
    "batch_norm": (
        "native_batch_norm_legit_functional",
        "native_batch_norm_legit_no_training",
        "native_batch_norm",
        "cudnn_batch_norm",
        "miopen_batch_norm",
    ),
    "rms_norm": ("fused_rms_norm",),
    "convolution": ("cudnn_convolution", "mkldnn_convolution", "miopen_convolution"),
}
_CANONICAL = {kernel: name for name, kernels in _KERNELS.items() for kernel in kernels}


def canonical(name: str) -> str:
    """The device-independent name for a kernel's name; any other name unchanged."""
    forward = name.strip("_").removesuffix("_backward")
    suffix = "_backward" if name.strip("_").endswith("_backward") else ""
    return _CANONICAL[forward] + suffix if forward in _CANONICAL else name


def operation_name(target: Any) -> str:
    """The name of the operation that a node calls, without overload, such as ``"mm"`` or ``"attention"``."""
    return canonical(str(getattr(target, "__name__", target)).split(".")[0].strip("_"))


def makes_view(target: Any) -> bool:
    """Whether an operator's results are views of its first operand; whatever else a node may call is none."""
    return bool(getattr(target, "is_view", False))


def is_view(node: fx.Node) -> bool:
    """Whether a node sees a value in another shape, or takes one of several."""
    return node.target is operator.getitem or makes_view(node.target)
