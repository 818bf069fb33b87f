"""Step time, memory and compile time of shardgraph beside FSDP2, DDP and one unsharded rank, in one run.

    python benchmarks/train_step.py --job llama

All contenders train the same model (``--job``, of training_jobs.py) from the same weights on the same data. Time: every
round takes one step of each in turn, with a barrier before it, so that a machine whose speed drifts is fair to all;
medians are reported, and the median of the ratio to FSDP2's step of the same round, with its 95% bootstrap interval.
Memory: each contender alone in its own processes, the bytes of tensors on rank 0 at the
highest point of a step as torch's allocator counts them, and the resident set. Losses are recorded, and their
largest difference.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import json
import os
import platform
import re
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.profiler import ProfilerActivity, profile, record_function

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardgraph
from benchmarks.lion import Lion
from benchmarks.ratios import ratio
from benchmarks.training_jobs import JOBS
from shardgraph.plans.presets import preset as preset_of

CONTENDERS = [
    *(f"shardgraph {preset} of 8" for preset in ("fsdp", "zero2", "ddp")),
    *(f"shardgraph {preset} of 8 by step" for preset in ("fsdp", "ddp")),
    "FSDP2",
    "DDP",
    "one rank",
]
OPTIMIZERS = {"adamw": torch.optim.AdamW, "lion": Lion}
COMPILED = [f"{name} by inductor" for name in CONTENDERS if not name.endswith(" by step")]


def build_model(options: argparse.Namespace) -> nn.Module:
    torch.manual_seed(0)
    return JOBS[options.job].model().train()


def build(name: str, options: argparse.Namespace, device: torch.device) -> nn.Module:
    model, compiled = build_model(options), name.endswith(" by inductor")
    name = name.removesuffix(" by inductor").removesuffix(" by step")
    if name.startswith("shardgraph"):
        preset, *bucket = name.removeprefix("shardgraph ").split(" of ")
        plan = planned(preset, int(float(bucket[0]) * 2**20)) if bucket else preset
        loss_fn = JOBS[options.job].loss_fn
        return shardgraph.compile(model, plan, backend="inductor" if compiled else "eager", loss_fn=loss_fn)
    sharded = by_torch(name, model.to(device), options, device)
    return torch.compile(sharded) if compiled else sharded


def by_torch(name: str, model: nn.Module, options: argparse.Namespace, device: torch.device) -> nn.Module:
    """FSDP2 of each block, DDP, or the model as it is."""
    if name == "FSDP2":
        mesh = init_device_mesh(device.type, (dist.get_world_size(),))
        for block in JOBS[options.job].blocks(model):
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
    return DistributedDataParallel(model) if name == "DDP" else model


def planned(preset: str, bucket: int) -> shardgraph.Plan:
    """A preset with buckets of so many bytes."""
    return replace(preset_of(preset, {"dp": dist.get_world_size()}), bucket=bucket)


class Contender:
    """One way to train: its model, its optimizer and what it was seen to do."""

    def __init__(self, name: str, options: argparse.Namespace, device: torch.device) -> None:
        self.name, self.options, self.device = name, options, device
        self.model = build(name, options, device)
        self.optimizer = OPTIMIZERS[options.optimizer](self.model.parameters(), lr=1e-3)
        self.times: list[float] = []
        self.losses: list[float] = []
        self.whole = name.removesuffix(" by inductor").endswith(" by step")
        started = time.perf_counter()
        if self.whole:  # compiles, or sets up lazily; not a step, so that weights stay equal
            self.model.train_step(**JOBS[options.job].whole(self.batch(0)))
        else:
            self.loss(0).backward()
        self.optimizer.zero_grad()
        self.first_call = time.perf_counter() - started

    def batch(self, step: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(step)
        return JOBS[self.options.job].batch(generator, dist.get_world_size())[dist.get_rank()].to(self.device)

    def loss(self, step: int) -> torch.Tensor:
        return JOBS[self.options.job].loss(self.model, self.batch(step))

    def step(self, number: int) -> None:
        started = time.perf_counter()
        if self.whole:
            call = JOBS[self.options.job].whole(self.batch(number))
            loss = self.model.step(**call, optimizer=self.optimizer)
        else:
            loss = self.loss(number)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
        if self.device.type == "cuda":
            torch.cuda.synchronize()
        self.times.append(time.perf_counter() - started)
        self.losses.append(loss.item())


Made = Callable[[str, argparse.Namespace, torch.device], Contender]


def measure(options: argparse.Namespace, made: Made = Contender) -> dict[str, Any]:
    """What each rank does; returns rank 0's figures by contender."""
    device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else torch.device("cpu")
    torch.set_num_threads(options.threads)
    contenders = [made(name, options, device) for name in options.contenders]
    for number in range(1, options.rounds + 3):
        for contender in contenders:
            dist.barrier()
            contender.step(number)
    base = next((c for c in contenders if c.name == "FSDP2"), contenders[0])
    return {
        c.name: {
            "of_base": ratio(c.times[2:], base.times[2:]),
            "median_s": statistics.median(c.times[2:]),
            "fastest_s": min(c.times[2:]),
            "slowest_s": max(c.times[2:]),
            "first_call_s": c.first_call,
            "losses": c.losses,
        }
        for c in contenders
    }


def peak_memory(options: argparse.Namespace, name: str, made: Made = Contender) -> dict[str, float]:
    """Memory in MiB of one contender alone in its processes, at the highest point of a training step.

    ``tensors_mib``: what torch's allocator had handed out, counted by its own events (on CUDA, by its statistics), so
    that storages that are resized or made inside kernels count as well. ``resident_mib``: the
    resident set above what the process held before the model was built; the compiler's modules and graphs are in it.
    """
    torch.set_num_threads(options.threads)
    if torch.cuda.is_available():
        contender = made(name, options, torch.device("cuda", torch.cuda.current_device()))
        contender.step(1)
        torch.cuda.reset_peak_memory_stats()
        contender.step(2)
        return {"tensors_mib": torch.cuda.max_memory_allocated() / 2**20}
    before = resident("VmRSS")
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        contender = made(name, options, torch.device("cpu"))
        contender.step(1)
        with record_function("measured step"):
            contender.step(2)
    events = sorted(profiler.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    started = next(event.start_ns() for event in events if event.name() == "measured step")
    live = peak = 0
    for event in events:
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live) if event.start_ns() >= started else 0
    del profiler, events
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")  # forgets the highest resident set so far
    dist.barrier()
    contender.step(3)
    return {"tensors_mib": peak / 2**20, "resident_mib": resident("VmHWM") - before}


def resident(field: str) -> float:
    status = Path("/proc/self/status").read_text()
    return int(re.search(rf"{field}:\s+(\d+) kB", status).group(1)) / 1024


def table(figures: dict[str, Any], show: Callable[[str], None] = print) -> None:
    base = "FSDP2" if "FSDP2" in figures else next(iter(figures))
    times = f"{'':<36}{'median ms':>10}{'of ' + base:>14}{'95% interval':>16}"
    show(f"{times}{'tensors MiB':>13}{'resident MiB':>14}{'first call s':>14}")
    for name, f in figures.items():
        middle, low, high = f["of_base"]
        show(
            f"{name:<36}{f['median_s'] * 1e3:>10.1f}{middle:>14.2f}{f'{low:.2f} to {high:.2f}':>16}"
            f"{f.get('tensors_mib', float('nan')):>13.1f}{f.get('resident_mib', float('nan')):>14.0f}"
            f"{f['first_call_s']:>14.1f}"
        )


def loss_difference(figures: dict[str, Any]) -> float:
    """The largest difference of any loss among the sharded contenders (one rank alone sees other data)."""
    runs = [f["losses"] for name, f in figures.items() if not name.startswith("one rank")]
    return max(max(step) - min(step) for step in zip(*runs, strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="latest", help="results/NAME.json is written")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each rank")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--job", default="llama", choices=JOBS)
    parser.add_argument("--optimizer", default="adamw", choices=OPTIMIZERS)
    parser.add_argument(
        "--contenders",
        nargs="+",
        default=CONTENDERS + COMPILED,
        help="'shardgraph PRESET of MIB' has buckets of so many MiB; '... by step'; '... by inductor'",
    )
    options = parser.parse_args()

    report(options, Contender, options.contenders, {})


def beside(library: str, kind: type[Contender], prefix: str, contenders: list[str], description: str | None) -> None:
    """What a benchmark of another library does: contenders whose names begin with ``prefix`` are of its ``kind``."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default=library, help="results/NAME.json is written")
    parser.add_argument("--threads", type=int, default=1, help="CPU threads of each rank")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--job", default="llama", choices=JOBS)
    parser.add_argument("--contenders", nargs="+", default=contenders)
    options = parser.parse_args()
    options.nproc, options.optimizer = 2, "adamw"
    memory = [name for name in options.contenders if name not in ("DDP", "one rank")]
    report(options, partial(_made, kind, prefix), memory, {library: metadata.version(library)})


def _made(kind: Made, prefix: str, name: str, options: argparse.Namespace, device: torch.device) -> Contender:
    return (kind if name.startswith(prefix) else Contender)(name, options, device)


def report(options: argparse.Namespace, made: Made, memory: Sequence[str], versions: dict[str, str]) -> None:
    """Measure, print and write the figures of contenders, ``memory`` of these; ``versions`` are noted with torch's."""
    figures = shardgraph.launch(measure, options.nproc, args=(options, made), timeout=3000)[0]
    load = os.getloadavg()
    # Large blocks go back to the system when they are freed, so that the resident set tells what is held. Where time is
    # measured they do not: every operation would wait for the system to clear its pages.
    os.environ.setdefault("MALLOC_MMAP_THRESHOLD_", "65536")
    for name in memory:
        figures[name] |= shardgraph.launch(peak_memory, options.nproc, args=(options, name, made), timeout=600)[0]
    count = sum(p.numel() for p in build_model(options).parameters())
    configuration = {
        "command": " ".join(["python", *sys.argv]),
        "torch": torch.__version__,
        **versions,
        "python": platform.python_version(),
        "cpus": os.cpu_count(),
        "load": load,
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine(),
        "parameters": count,
        **vars(options),
    }
    ranks = f"{options.nproc} ranks of {options.threads} threads"
    print(f"{options.job} of {count:,} parameters, {ranks}, {options.rounds} rounds")
    table(figures)
    print(f"largest difference of a loss between contenders: {loss_difference(figures):.1e}")
    path = Path(__file__).parent / "results" / f"{options.name}.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"configuration": configuration, "figures": figures}, indent=1) + "\n")
    print(f"written to {path}")


if __name__ == "__main__":
    main()
