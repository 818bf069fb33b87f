"""Copies in host memory of what is written in the background, while training changes what they are of.

The memory of one save is used again by the next: pages that a process has never touched cost it more than copying.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable

import torch

_spare: list[torch.Tensor] = []  # of the save before; only one is under way


def staged(tensors: Iterable[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of ``tensors`` in host memory, to be given back with :func:`give_back`."""
    free: dict[tuple[torch.Size, torch.dtype], list[torch.Tensor]] = defaultdict(list)
    for each in _spare:
        free[each.shape, each.dtype].append(each)
    _spare.clear()
    copies = []
    for tensor in tensors:
        known = free[tensor.shape, tensor.dtype]
        copy = known.pop() if known else torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
        copies.append(copy.copy_(tensor))
    return copies


def give_back(copies: Iterable[torch.Tensor]) -> None:
    """Keep the memory of these for the next save."""
    _spare[:] = copies


def on_host(tensor: torch.Tensor) -> torch.Tensor:
    """``tensor`` itself, or a copy, in host memory that has nothing else in it."""
    alone = tensor.untyped_storage().nbytes() == tensor.nbytes
    if alone and tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor
    return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu").copy_(tensor)
