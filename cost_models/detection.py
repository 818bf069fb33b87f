"""This machine's memory and CPU, as far as they can be described without measuring."""

from __future__ import annotations

import os
import platform
import re
from pathlib import Path

from shardgraph.cost_models.device import Device, Host, Link, Rate

_LIMITS = ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes")
"""What a container may use, in either version of Linux's control groups."""

FOR_DEVICES = 0.8
"""The part of a machine's memory that its devices may use: the rest is for the system and loaders."""


def host_memory() -> int:
    """Bytes of this machine's memory that are available now; all of its memory if the system does not report that."""
    if available := re.search(r"^MemAvailable:\s*(\d+) kB", _system_text("/proc/meminfo"), re.MULTILINE):
        return int(available[1]) * 1024
    return machine_memory()


def machine_memory() -> int:
    """Bytes of this machine's memory, whoever uses them now; of a container those that it may use."""
    limits = [int(text) for path in _LIMITS if (text := _system_text(path).strip()).isdigit()]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def cpu_cores() -> int:
    """The number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def cpu_name() -> str:
    """What the CPU calls itself, as ``Intel(R) Xeon(R) Processor @ 2.10GHz``."""
    named = re.search(r"^model name\s*:\s*(.+)$", _system_text("/proc/cpuinfo"), re.MULTILINE)
    return named[1] if named else platform.processor() or platform.machine()


def cpu_core() -> Device:
    """One core of the CPU with its share of the memory; its rates are guesses, as ``source`` says."""
    info = _system_text("/proc/cpuinfo")
    clock = re.search(r"^cpu MHz\s*:\s*([\d.]+)", info, re.MULTILINE)
    hertz = float(clock[1]) * 1e6 if clock else 2e9
    flags = set(re.findall(r"\w+", info))
    lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
    flops_per_cycle = 2 * 2 * lanes  # float32: two units that each do a fused multiply-add of a vector
    peak = hertz * flops_per_cycle
    rates = {"matmul/float32": Rate(peak / 2, overhead=5e-6)}
    return Device(
        name="cpu",
        memory=machine_memory() // cpu_cores(),
        peak={"float32": peak, "float64": peak / 2},
        rates=rates | {"pointwise": Rate(5e9, overhead=5e-6)},
        allocation=64,
        host=Host(Link(bandwidth=2.5e9, latency=7e-5), optimizer=Rate(5e9, overhead=5e-6)),
        source=(
            f"guesses, until `shardgraph calibrate` measures them: {flops_per_cycle} FLOPs a cycle at "
            f"{hertz / 1e9:.2f} GHz, half of them attained, 5 GB/s of memory for each core, of which a copy reads "
            "one half and writes the other, 1 GB/s between ranks"
        ),
    )


def _system_text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""
