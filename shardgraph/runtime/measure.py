"""The measured counterpart of :mod:`shardgraph.passes.analysis.liveness`: bytes of tensors that were live.

Host memory is counted separately, even if the CPU is also the device, by PyTorch's rule for devices: the result of an
operation on host tensors is a host tensor, except for copies to the device (:mod:`shardgraph.runtime.host`).
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, is_traceable_wrapper_subclass
from torch.utils._pytree import tree_iter
from torch.utils.weak import WeakIdKeyDictionary

from shardgraph.ir.copies import TO_DEVICE, TO_HOST
from shardgraph.runtime.host import EMPTY_ON_HOST, is_in_file, is_on_host, known_on_host
from shardgraph.torch_api import FunctionalTensor

_FROM_FILE = torch.ops.aten.from_file.default


class PeakMemory:
    """Measures the peak of live tensor bytes inside a ``with`` block, above what was live at its start.

    On CPU every storage that an operation allocates is counted once, from its allocation until it is freed, also in
    custom autograd functions and in the backward engine, and no matter whether Python or C++ owns it. What a kernel
    allocates and frees internally is not counted. On CUDA the caching allocator's own statistics are read.

        with PeakMemory(torch.device("cpu")) as memory:
            model(x).sum().backward()
        print(memory.peak_bytes, memory.host_peak_bytes)
    """

    def __init__(self, device: torch.device | str = "cpu") -> None:
        self.device = torch.device(device)
        on_gpu = self.device.type == "cuda"
        self._cpu = _DispatchMeter(is_device=not on_gpu)
        self._gpu = _CudaMeter(self.device) if on_gpu else None

    def track(self, tensors: Iterable[torch.Tensor], host: bool = False) -> PeakMemory:
        """Count existing tensors (parameters, inputs) as if they had been allocated in the block.

        ``host`` declares them as host tensors, such as the optimizer state of offloaded parameters. Call it before the
        block starts; returns self.
        """
        for tensor in tensors:
            for plain in plain_tensors(tensor):
                if self._gpu is not None and plain.is_cuda:
                    self._gpu.track(plain.untyped_storage())
                else:
                    self._cpu.track(known_on_host(plain) if host else plain)
        return self

    @property
    def peak_bytes(self) -> int:
        """Peak bytes on the device, so far or in the finished block."""
        return self._cpu.device.peak if self._gpu is None else self._gpu.peak

    @property
    def host_peak_bytes(self) -> int:
        """Peak bytes in host memory, so far or in the finished block."""
        return self._cpu.host.peak

    def __enter__(self) -> PeakMemory:
        if self._gpu is not None:
            self._gpu.start()
        self._cpu.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self._cpu.__exit__(*error)
        if self._gpu is not None:
            self._gpu.stop()


def plain_tensors(value: Any) -> Iterator[torch.Tensor]:
    """The plain tensors that ``value`` consists of (for a DTensor its local shard), without functional tensors, which
    only wrap others during tracing."""
    for leaf in tree_iter(value):
        if is_traceable_wrapper_subclass(leaf):
            names, _ = leaf.__tensor_flatten__()
            yield from plain_tensors([getattr(leaf, name) for name in names])
        elif isinstance(leaf, torch.Tensor) and leaf.layout == torch.strided and not isinstance(leaf, FunctionalTensor):
            yield leaf


class _Counter:
    """Bytes of storages until they are freed."""

    def __init__(self) -> None:
        self.live = self.peak = 0

    def count(self, storage: torch.UntypedStorage) -> None:
        nbytes = storage.nbytes()
        weakref.finalize(storage, self._free, nbytes).atexit = False
        self.live += nbytes
        self.peak = max(self.peak, self.live)

    def _free(self, nbytes: int) -> None:
        self.live -= nbytes


class _DispatchMeter(TorchDispatchMode):
    """Intercepts every operation of this thread, in which the backward engine runs on CPU.

    If the CPU ``is_device`` too, tensors that are not known to be host tensors count for the device.
    """

    def __init__(self, is_device: bool) -> None:
        super().__init__()
        self.is_device = is_device
        self.device, self.host = _Counter(), _Counter()
        self.counted = WeakIdKeyDictionary()

    def track(self, tensor: torch.Tensor) -> None:
        storage = tensor.untyped_storage()
        if storage in self.counted or storage.device.type != "cpu" or is_in_file(tensor):
            return  # fake and meta tensors hold no memory either
        self.counted[storage] = True
        (self.device if self.is_device and not is_on_host(tensor) else self.host).count(storage)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # the subclass runs first, and its operations on plain tensors are intercepted
        # A view of, or a write to, a tensor from before the block must not count: its storage is an argument's.
        inputs = {tensor.untyped_storage(): tensor for tensor in plain_tensors((args, kwargs))}
        host = func in (TO_HOST, EMPTY_ON_HOST) or (func is not TO_DEVICE and any(map(is_on_host, inputs.values())))
        result = func(*args, **kwargs)
        for tensor in plain_tensors(result) if func is not _FROM_FILE else ():
            if tensor.untyped_storage() not in inputs:
                self.track(known_on_host(tensor) if host else tensor)
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

    def start(self) -> None:
        torch.cuda.reset_peak_memory_stats(self.device)
        self.before = torch.cuda.memory_allocated(self.device)

    def stop(self) -> None:
        self.final = self.peak
