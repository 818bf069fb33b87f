"""Bytes of tensors that are live, each booked to a module and a kind."""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.weak import WeakIdKeyDictionary

from shardgraph.runtime.host import is_on_host
from shardgraph.runtime.measure import plain_tensors
from shardgraph.tracking.trace import Moment

TEMPORARIES = "temporaries"


@dataclass(frozen=True)
class Place:
    """Where the computation is: ``half`` of a step, as in a :class:`Moment`, and ``module`` by its path."""

    half: str
    module: str


_SHARED = ("parameters", "gradients", "optimizer state")
"""The kinds of tensors of which several lie in one storage, that of a bucket, and belong to a module each."""


@dataclass(eq=False)
class _Storage:
    """What is booked for a storage: a module and a kind, but for its ``shares``, by their offset and bytes in it."""

    nbytes: int
    module: str
    kind: str
    shares: dict[tuple[int, int], tuple[str, str]] = field(default_factory=dict)


class Ledger(TorchDispatchMode):
    """Books every storage on ``device`` that operations allocate in the block, from its allocation until it is freed.

    A storage is a temporary of the module that ``place()`` names when it is allocated, unless :meth:`hold` says what it
    is. ``moments`` are what was live after every operation that allocated, or wrote, ``most`` the most bytes of each
    module's own by kind.
    """

    def __init__(self, device: torch.device, place: Callable[[], Place]) -> None:
        super().__init__()
        self.moments: list[Moment] = []
        self.most: dict[str, Counter[str]] = {}
        self._device, self._place = device, place
        self._booked = WeakIdKeyDictionary()
        self._live: Counter[tuple[str, str]] = Counter()
        self._by_kind: Counter[str] = Counter()

    def hold(self, value: Any, module: str, kinds: str | Sequence[str]) -> int:
        """Book the tensors in ``value``: all as one kind, or each as one of several. One that has a kind keeps it.

        Returns the bytes of those that no operation in the block has made.
        """
        tensors, found = list(plain_tensors(value)), 0
        for tensor, kind in zip(tensors, [kinds] * len(tensors) if isinstance(kinds, str) else kinds, strict=False):
            if (booked := self._booked.get(tensor.untyped_storage())) is None:
                booked = self._allocate(tensor, module, kind)
                found += booked.nbytes if booked else 0
            if booked is None or booked.kind not in (TEMPORARIES, kind):
                continue
            if _is_share(tensor, kind):
                if _range(tensor) not in booked.shares:
                    self._share(booked, tensor, module, kind)
            elif booked.kind == TEMPORARIES:
                self._move(booked, module, kind)
        return found

    def rebook(self, value: Any, module: str, kind: str) -> None:
        """Book the tensors in ``value`` as this kind, whatever they were."""
        for tensor in plain_tensors(value):
            booked = self._booked.get(tensor.untyped_storage()) or self._allocate(tensor, module, kind)
            if booked is not None and _is_share(tensor, kind):
                self._share(booked, tensor, module, kind)
            elif booked is not None:
                self._move(booked, module, kind)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the subclass runs first, and its operations on plain tensors come here
        place = self._place()
        inputs = {tensor.untyped_storage() for tensor in plain_tensors((args, kwargs))}
        result = func(*args, **kwargs)
        new = [tensor for tensor in plain_tensors(result) if tensor.untyped_storage() not in inputs]
        for tensor in new:
            if tensor.untyped_storage() not in self._booked:
                self._allocate(tensor, place.module, TEMPORARIES)
        if new or (func._schema.is_mutable and place.half != "optimizer"):  # what is written is another value
            memory = {kind: nbytes for kind, nbytes in self._by_kind.items() if nbytes}
            self.moments.append(Moment(place.half, place.module, func.__name__, memory))
        return result

    def _allocate(self, tensor: torch.Tensor, module: str, kind: str) -> _Storage | None:
        storage = tensor.untyped_storage()
        if storage.device.type != self._device.type or is_on_host(tensor):
            return None  # of another device, or no memory at all: fake and meta tensors
        booked = _Storage(storage.nbytes(), module, kind)
        self._booked[storage] = booked
        self._add(booked, 1)
        weakref.finalize(storage, self._add, booked, -1).atexit = False
        return booked

    def _move(self, booked: _Storage, module: str, kind: str) -> None:
        self._add(booked, -1)
        booked.module, booked.kind = module, kind
        self._add(booked, 1)

    def _share(self, booked: _Storage, tensor: torch.Tensor, module: str, kind: str) -> None:
        self._add(booked, -1)
        booked.shares[_range(tensor)] = module, kind
        self._add(booked, 1)

    def _add(self, booked: _Storage, sign: int) -> None:
        rest = booked.nbytes - sum(nbytes for _, nbytes in booked.shares)
        parts = [(module, kind, nbytes) for (_, nbytes), (module, kind) in booked.shares.items()]
        for module, kind, nbytes in [*parts, (booked.module, booked.kind, rest)]:
            self._live[module, kind] += sign * nbytes
            self._by_kind[kind] += sign * nbytes
            most = self.most.setdefault(module, Counter())
            most[kind] = max(most[kind], self._live[module, kind])


def _is_share(tensor: torch.Tensor, kind: str) -> bool:
    """Whether a tensor is one of several in its storage that belong to modules of their own."""
    return kind in _SHARED and tensor.nbytes < tensor.untyped_storage().nbytes()


def _range(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor is in its storage: its offset and its bytes."""
    return int(tensor.storage_offset()) * tensor.itemsize, tensor.nbytes
