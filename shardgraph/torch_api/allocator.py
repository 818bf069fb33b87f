"""What an operation takes from the CPU allocator and gives back, in order."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch.autograd import ProfilerConfig, ProfilerState, _disable_profiler_legacy, _enable_profiler_legacy


def undisturbed(function: Callable[[], Any]) -> Any:
    """The result of ``function()``, run without the caller's modes (such as fake tensors) and its profiler.

    It has as many threads for its operations as the caller. Random numbers that it draws from the default generator are
    not missing from the caller's.
    """
    threads = torch.get_num_threads()
    with ThreadPoolExecutor(1, initializer=torch.set_num_threads, initargs=(threads,)) as thread:
        return thread.submit(torch.random.fork_rng(devices=())(torch.no_grad()(function))).result()


def allocations(run: Callable[[], Any]) -> tuple[list[int], Any]:
    """The bytes of each block that ``run()`` allocates (positive) or frees (negative) on the CPU, and its result.

    There must be no other profiler in this thread.
    """
    experimental = torch._C._profiler._ExperimentalConfig()
    # Older than torch.profiler: it starts in microseconds, and only for this thread.
    _enable_profiler_legacy(ProfilerConfig(ProfilerState.CPU, False, True, False, False, False, experimental))
    try:
        result = run()
    finally:
        records = _disable_profiler_legacy()
    events = [event for thread in records for event in thread if event.kind() == "memory_alloc"]
    return [event.cpu_memory_usage() for event in events], result
