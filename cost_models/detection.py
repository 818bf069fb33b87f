"""This machine as a cluster, as far as it can be described without measuring."""

from __future__ import annotations

import os
import re
from dataclasses import replace
from pathlib import Path

import torch

from shardgraph.cost_models.cluster import Cluster, Device, Host, Link, Rate
from shardgraph.cost_models.cluster_files import known_cluster


def detect_cluster() -> Cluster:
    """This machine: its GPUs if it has any, otherwise its CPU with one rank per core.

    The CPU's rates are guesses, as its ``source`` says, until ``shardgraph calibrate`` measures them.

    Raises:
        ClusterError: it has a GPU that is not described.
    """
    if not torch.cuda.is_available():
        return _cpu_cluster()
    cluster = known_cluster(torch.cuda.get_device_name(0), devices_per_node=torch.cuda.device_count())
    memory = torch.cuda.get_device_properties(0).total_memory
    return replace(cluster, device=replace(cluster.device, memory=memory))


def host_memory() -> int:
    """Available bytes of this machine's memory; all of its memory if the system does not report that."""
    if available := re.search(r"^MemAvailable:\s*(\d+) kB", _system_text("/proc/meminfo"), re.MULTILINE):
        return int(available[1]) * 1024
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _cpu_cluster() -> Cluster:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    info = _system_text("/proc/cpuinfo")
    hertz = _cpu_hertz(info)
    source = (
        f"guesses, until `shardgraph calibrate` measures them: {_flops_per_cycle(info)} FLOPs a cycle at "
        f"{hertz / 1e9:.2f} GHz, half of them attained, 5 GB/s of memory for each core, of which a copy reads "
        "one half and writes the other, 1 GB/s between ranks"
    )
    peak = hertz * _flops_per_cycle(info)
    per_second = {"float32": peak / 2, "float64": peak / 4}
    per_second |= dict.fromkeys(("bfloat16", "float16"), peak / 8)  # without instructions of their own: converted
    rates = {f"matmul/{dtype}": Rate(rate, overhead=5e-6) for dtype, rate in per_second.items()}
    core = Device(
        name="cpu",
        memory=host_memory() // cores,
        peak={"float32": peak, "float64": peak / 2},
        rates=rates | {"pointwise": Rate(5e9, overhead=5e-6)},
        allocation=64,
        host=Host(Link(bandwidth=2.5e9, latency=7e-5), optimizer=Rate(5e9, overhead=5e-6)),
        source=source,
    )
    return Cluster("cpu", core, cores, 1, intra=Link(bandwidth=1e9, latency=5e-5), source=source)


def _cpu_hertz(info: str) -> float:
    """The clock of the CPU in Hz by the text of ``/proc/cpuinfo``; 2 GHz if it has none."""
    megahertz = re.search(r"^cpu MHz\s*:\s*([\d.]+)", info, re.MULTILINE)
    return float(megahertz[1]) * 1e6 if megahertz else 2e9


def _flops_per_cycle(info: str) -> int:
    """float32 FLOPs of one core per cycle, assuming two units that each do a fused multiply-add of a vector."""
    flags = set(re.findall(r"\w+", info))
    lanes = 16 if "avx512f" in flags else 8 if "avx2" in flags else 4
    return 2 * 2 * lanes


def _system_text(path: str) -> str:
    return Path(path).read_text(encoding="utf-8") if Path(path).exists() else ""
