"""Weights that differ in their last digit, with which a model computes the same but for what rounding makes of it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch


@contextmanager
def moved_by_a_digit(tensors: Iterable[torch.Tensor]) -> Iterator[None]:
    """Inside, each element of these tensors of floating point is the next number, every second one the one before."""
    moved = [tensor.detach() for tensor in tensors if tensor.is_floating_point()]
    before = [tensor.clone() for tensor in moved]
    for tensor in moved:
        towards = torch.full(tensor.shape, math.inf, dtype=tensor.dtype, device="cpu")
        towards.view(-1)[1::2] = -math.inf
        tensor.copy_(tensor.nextafter(towards))
    try:
        yield
    finally:
        for tensor, values in zip(moved, before, strict=True):
            tensor.copy_(values)
