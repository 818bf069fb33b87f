"""Fake tensors made of what they say about themselves."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.utils import _pytree as pytree


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
        device: torch.device,
        storage: int,
        size: int,
        offset: int,
    ) -> torch.Tensor:
        """A fake tensor at ``offset`` of a ``storage`` of ``size`` bytes."""
        if (memory := self._storages.get(storage)) is None:
            memory = self._storages[storage] = meta_memory(size)
        return fake_in(self.mode, memory, shape, strides, dtype, device, offset)


def fake_in(
    mode: FakeTensorMode,
    memory: torch.UntypedStorage,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    offset: int,
) -> torch.Tensor:
    """A fake tensor of ``mode`` in a storage on ``meta``."""
    meta: Any = torch.empty(0, dtype=dtype, device="meta")
    meta.set_(memory, offset, shape, strides)
    return FakeTensor(mode, meta, device)


def fake_like(mode: FakeTensorMode, memory: torch.UntypedStorage, like: torch.Tensor) -> torch.Tensor:
    """A fake tensor laid out as another one, in a storage of its own."""
    return fake_in(mode, memory, like.shape, like.stride(), like.dtype, like.device, int(like.storage_offset()))


def by_layout(operation: Callable[..., Any], *args: Any) -> Any:
    """The result of an operation that arranges its operands, on whatever device: computed on ``meta``, since the fake
    mode takes a hundred times as long for each of the views and copies that it is made of.
    """
    leaves, spec = pytree.tree_flatten(args)
    operands = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if not all(map(_has_numbers, operands)):
        return operation(*args)
    places = {(each.fake_mode, each.device) for each in operands}  # type: ignore[attr-defined]
    if len(places) != 1:
        return operation(*args)
    ((mode, device),) = places
    with outside_modes():
        result = operation(*pytree.tree_unflatten([_on_meta(leaf) for leaf in leaves], spec))
        return pytree.tree_map_only(torch.Tensor, lambda each: FakeTensor(mode, each, device), result)


def _has_numbers(value: torch.Tensor) -> bool:
    """Whether a value is a fake tensor whose layout has no symbols."""
    layout = (*value.shape, *value.stride(), value.storage_offset())
    return is_plain_fake(value) and not any(isinstance(number, torch.SymInt) for number in layout)


def _on_meta(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor):
        return leaf
    meta = torch.empty(0, dtype=leaf.dtype, device="meta")
    return meta.set_(leaf.untyped_storage(), leaf.storage_offset(), leaf.shape, leaf.stride())


def is_plain_fake(value: Any) -> bool:
    """Whether a value is a fake tensor, and its layout all that there is to know of it."""
    return type(value) is FakeTensor and value.constant is None and not value.requires_grad and not value.is_conj()


def meta_memory(nbytes: int) -> torch.UntypedStorage:
    """A storage for fake tensors."""
    return torch.empty(nbytes, dtype=torch.uint8, device="meta").untyped_storage()


def outside_modes() -> AbstractContextManager[None]:
    """Within, tensors are made as they are, whatever modes of dispatch are active."""
    guard: AbstractContextManager[None] = torch._C._DisableTorchDispatch()
    return guard
