"""Host memory and the copies between host and device on this rank (:mod:`shardgraph.ir.copies`).

With an accelerator, host memory is pinned, and each direction has a stream of its own. If the device is the CPU, each
direction has a thread that copies while this one computes, and host tensors are recognised by their storage.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from typing import Any

import torch
from torch.utils.weak import WeakIdKeyDictionary, WeakTensorKeyDictionary

from shardgraph.ir.copies import library

library.define("empty_on_host(SymInt[] size, ScalarType dtype, bool pinned) -> Tensor")

EMPTY_ON_HOST = torch.ops.shardgraph.empty_on_host.default

_on_host: Any = WeakIdKeyDictionary()  # storages, with whether they take memory


def is_on_host(tensor: torch.Tensor) -> bool:
    """Whether a CPU tensor is marked as a host tensor, if the CPU is the device as well."""
    return tensor.untyped_storage() in _on_host


def known_on_host(tensor: torch.Tensor, in_file: bool = False) -> torch.Tensor:
    """Mark ``tensor`` as a host tensor, in memory or in a memory-mapped file; returns it."""
    _on_host[tensor.untyped_storage()] = not in_file
    return tensor


def is_in_file(tensor: torch.Tensor) -> bool:
    """Whether a tensor is marked as being in a file, so that its memory can be reclaimed."""
    return _on_host.get(tensor.untyped_storage()) is False


def empty_on_host(size: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Uninitialised host memory for copies to ``device``."""
    return EMPTY_ON_HOST(size, dtype, device.type == "cuda")


@torch.library.impl(library, "empty_on_host", "BackendSelect")
def _empty(size: Any, dtype: torch.dtype, pinned: bool) -> torch.Tensor:
    return known_on_host(torch.empty(size, dtype=dtype, pin_memory=pinned, device="cpu"))


_waits: Any = WeakTensorKeyDictionary()  # by the destination of a copy in flight, the function that waits for it
_streams: dict[tuple[str, torch.device], torch.cuda.Stream] = {}


@torch.library.impl(library, "to_host", "CompositeExplicitAutograd")
def _to_host(source: torch.Tensor) -> torch.Tensor:
    copy = torch.empty_like(source, device="cpu", pin_memory=source.is_cuda, requires_grad=False)
    return _start("to host", known_on_host(copy), source)


@torch.library.impl(library, "to_device", "CompositeExplicitAutograd")
def _to_device(source: torch.Tensor, device: torch.device) -> torch.Tensor:
    return _start("to device", torch.empty_like(source, device=device, requires_grad=False), source)


@torch.library.impl(library, "wait_copy", "CompositeExplicitAutograd")
def _wait_copy(copy: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    if (wait := _waits.pop(copy, None)) is not None:
        wait()
    return copy


def settle() -> None:
    """Block this thread until all copies are done: the host may then read destinations and overwrite sources."""
    for stream in _streams.values():
        stream.synchronize()


def _start(direction: str, copy: torch.Tensor, source: torch.Tensor) -> torch.Tensor:
    """Start the copy of ``source`` to ``copy`` on the CUDA stream, or in the thread, of its direction.

    A stream first waits for all work issued by the computation: the source may not be computed yet, and the
    destination's memory may still be read by its previous owner.
    """
    if not (copy.is_cuda or source.is_cuda):
        _waits[copy] = _thread(direction).submit(_copy, [copy, source.detach()]).result
        return copy
    device = copy.device if copy.is_cuda else source.device
    if (direction, device) not in _streams:
        _streams[direction, device] = torch.cuda.Stream(device)
    computing, stream = torch.cuda.current_stream(device), _streams[direction, device]
    stream.wait_stream(computing)
    with torch.cuda.stream(stream), torch.no_grad():
        copy.copy_(source, non_blocking=True)
    _waits[copy] = partial(computing.wait_event, stream.record_event())
    return copy


@cache
def _thread(direction: str) -> ThreadPoolExecutor:
    return ThreadPoolExecutor(1, f"shardgraph copies {direction}")


def _copy(tensors: list[torch.Tensor]) -> None:
    """Copy the second of two tensors to the first; this thread keeps neither once the copy counts as done."""
    copy, source = tensors
    tensors.clear()
    with torch.inference_mode(copy.is_inference()), torch.no_grad():  # modes are those of a thread
        copy.copy_(source)
