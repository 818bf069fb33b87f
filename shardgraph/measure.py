"""The measured twin of :mod:`shardgraph.passes.analysis.liveness`: bytes of tensors that really were live."""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary


class PeakMemory:
    """Measures the peak of live tensor bytes inside a ``with`` block, above what was live when it began.

    On CPU every storage that an operation makes is counted once, from when it is made until it is freed: in custom
    autograd functions and in the backward engine too, and whatever Python or C++ holds it. What a kernel
    allocates and frees inside is not seen. On CUDA the caching allocator's own statistics are read.

        with PeakMemory(torch.device("cpu")) as memory:
            model(x).sum().backward()
        print(memory.peak_bytes)
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        self._meter = _CudaMeter(self.device) if self.device.type == "cuda" else _DispatchMeter()

    def track(self, tensors: Iterable[torch.Tensor]) -> PeakMemory:
        """Count tensors that exist already (parameters, inputs), as if they had been made in the block.

        Call before the block begins; returns self.
        """
        for tensor in tensors:
            for plain in _plain(tensor):
                self._meter.track(plain.untyped_storage())
        return self

    @property
    def peak_bytes(self) -> int:
        """The most bytes live at once, so far or in the finished block."""
        return self._meter.peak

    def __enter__(self) -> PeakMemory:
        self._meter.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._meter.__exit__(*error)


def _plain(value: Any) -> Iterator[torch.Tensor]:
    """The tensors with a storage of their own that ``value`` is made of (a DTensor's local shard)."""
    for leaf in tree_iter(value):
        if is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            yield from _plain([getattr(leaf, name) for name in names])
        elif isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided:
            yield leaf


class _DispatchMeter(TorchDispatchMode):
    """Sees every operation of this thread, which on CPU is where the backward engine runs."""

    def __init__(self) -> None:
        super().__init__()
        self.live = self.peak = 0
        self.counted = WeakIdKeyDictionary()

    def track(self, storage: torch.UntypedStorage) -> None:
        if storage in self.counted or storage.device.type != "cpu":  # fake and meta tensors hold no memory
            return
        nbytes = storage.nbytes()
        self.counted[storage] = nbytes
        weakref.finalize(storage, self._free, nbytes).atexit = False
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def _free(self, nbytes: int) -> None:
        self.live -= nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the subclass runs first, and its operations on plain tensors come back here
        # A view of, or a write to, what was live before the block must not count: its storage is an argument's.
        given = {tensor.untyped_storage() for tensor in _plain((args, kwargs))}
        result = func(*args, **kwargs)
        for tensor in _plain(result):
            storage = tensor.untyped_storage()
            if storage not in given:
                self.track(storage)
        return result


class _CudaMeter:
    """Reads the statistics of the caching allocator."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.before = self.tracked = 0
        self.final: int | None = None

    def track(self, storage: torch.UntypedStorage) -> None:
        self.tracked += storage.nbytes()

    @property
    def peak(self) -> int:
        if self.final is not None:
            return self.final
        return torch.cuda.max_memory_allocated(self.device) - self.before + self.tracked

    def __enter__(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
        self.before = torch.cuda.memory_allocated(self.device)

    def __exit__(self, *error: Any) -> None:
        self.final = self.peak
