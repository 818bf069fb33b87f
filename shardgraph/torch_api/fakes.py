"""Fake tensors made of what they say about themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode


class Fakes:
    """Makes fake tensors of ``mode``; those with the same ``storage`` share their memory.

    Neither the mode's own conversion nor an operation in it: a graph has thousands.
    """

    def __init__(self, mode: FakeTensorMode) -> None:
        self.mode = mode
        self._storages: dict[int, torch.UntypedStorage] = {}

    def make(
        self,
        shape: Sequence[int],
        strides: Sequence[int],
        dtype: torch.dtype,
        device: str,
        storage: int,
        size: int,
        offset: int,
    ) -> torch.Tensor:
        """A fake tensor at ``offset`` of a ``storage`` of ``size`` bytes."""
        if (memory := self._storages.get(storage)) is None:
            memory = torch.empty(size, dtype=torch.uint8, device="meta").untyped_storage()
            self._storages[storage] = memory
        meta: Any = torch.empty(0, dtype=dtype, device="meta")
        meta.set_(memory, offset, shape, strides)
        return FakeTensor(self.mode, meta, torch.device(device))
