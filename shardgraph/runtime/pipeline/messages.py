"""Values as they go from stage to stage: the bytes of a tensor, in the memory layout that it was traced with."""

from __future__ import annotations

import torch


def empty_like_traced(traced: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Memory for a value that was traced as ``traced``, in its layout; contiguous where elements share memory."""
    if not _dense(traced):
        return torch.empty(traced.shape, dtype=traced.dtype, device=device)
    return torch.empty_strided(traced.shape, traced.stride(), dtype=traced.dtype, device=device)


def in_layout(value: torch.Tensor, traced: torch.Tensor) -> torch.Tensor:
    """``value`` in the layout of ``traced``, as :func:`empty_like_traced` makes memory for it."""
    wanted = traced.stride() if _dense(traced) else torch.empty(traced.shape, device="meta").stride()
    if value.stride() == wanted:
        return value
    return torch.empty_strided(value.shape, wanted, dtype=value.dtype, device=value.device).copy_(value)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """A dense tensor as one row of its elements, in the order in which memory has them; shares the memory."""
    return tensor.as_strided((tensor.numel(),), (1,), tensor.storage_offset())


def _dense(tensor: torch.Tensor) -> bool:
    """Whether elements fill a stretch of memory, each once."""
    expected = 1
    for stride, size in sorted((s, n) for s, n in zip(tensor.stride(), tensor.shape, strict=True) if n != 1):
        if stride != expected:
            return False
        expected *= size
    return True
