"""Values as they go from stage to stage: the bytes of a tensor, in the memory layout that it was traced with."""

from __future__ import annotations

import torch

from shardgraph.torch_api import with_strides


def empty_like_traced(traced: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a value that was traced as ``traced``, in its layout; contiguous where elements share memory."""
    return torch.empty_strided(traced.shape, _strides(traced), dtype=traced.dtype, device=device)


def in_layout(value: torch.Tensor, traced: torch.Tensor) -> torch.Tensor:
    """``value`` in the layout of ``traced``, as :func:`empty_like_traced` makes memory for it."""
    return with_strides(value, _strides(traced))


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor as one row of its elements, in the order in which memory has them; shares the memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _strides(traced: torch.Tensor) -> tuple[int, ...]:
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(traced.stride(), traced.shape, strict=True) if n != 1):
        if stride != expected:  # elements do not fill a stretch of memory, each once
            return torch.empty(traced.shape, device="meta").stride()
        expected *= size
    return traced.stride()
