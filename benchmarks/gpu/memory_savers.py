"""Recomputation, offload and a loss in chunks: losses of the plain program in less memory, copies beside kernels."""

from __future__ import annotations

from typing import Any

import torch

import shardgraph
from benchmarks.gpu import models, traces
from benchmarks.gpu.cases import Cases, Machine, check
from benchmarks.gpu.training import Stepper, difference

TOLERANCE = 1e-2  # of losses in bfloat16: their sums may be in another order


def memory_savers(cases: Cases, machine: Machine) -> None:
    """Each way beside the plain program: losses of three steps, peak, step time, overlap of copies."""
    make = models.loss_alone(models.llama(2, 64, 2, 16, 128) if machine.tiny else models.llama(12, 1024, 8, 1024))
    chunk = "1KiB" if machine.tiny else "64MiB"
    ways: dict[str, dict[str, Any]] = {
        "plain": {},
        "recompute": {"recompute": "full"},
        "offload activations": {"offload": "activations"},
        "offload parameters": {"offload": "parameters"},
        "loss chunks": {"loss_chunk": chunk},
        "recompute, offload all": {"recompute": "full", "offload": "all"},
    }
    plain: dict[str, Any] = {}
    for name, options in ways.items():
        with cases.case(name) as figures:
            measure(machine, make, options, figures)
            plain = plain or figures
            figures["loss_error"] = difference(torch.tensor(figures["losses"]), torch.tensor(plain["losses"]))
            cases.say(
                f"{name:<24}peak {figures['bytes'] / 2**20:>8,.0f} MiB, {1e3 * figures['seconds']:>8.2f} ms a step, "
                f"losses within {figures['loss_error']:.1e}; copies {figures.get('copies_ms', 0):.2f} ms, of which "
                f"beside kernels {figures.get('overlap_ms', 0):.2f}"
            )
            check(figures["loss_error"] <= TOLERANCE, f"losses differ from the plain program's: {figures['losses']}")
            if machine.kind == "cuda" and options:
                check(figures["bytes"] < plain["bytes"], f"peak {figures['bytes']:,}, plain {plain['bytes']:,}")
                check("offload" not in options or figures["overlap_ms"] > 0, "no copy overlaps with a kernel")
        machine.free()


def measure(machine: Machine, make: models.Make, options: dict[str, Any], figures: dict[str, Any]) -> None:
    model, call = models.seeded(make, machine.device)
    sharded = shardgraph.compile(model, plan="single", precision="bf16", **options)
    stepper = Stepper(machine, sharded, sharded, models.on(call, machine.device))
    figures["losses"] = [stepper.step().item() for _ in range(3)]
    machine.settle()
    machine.reset_peak()
    figures["between_steps"] = machine.allocated()
    stepper.step()
    machine.settle()
    figures["bytes"] = machine.peak()
    for _ in range(2 if machine.tiny else 5):
        stepper.timed()
    figures |= {"seconds": stepper.median(), "times": stepper.times, "notes": list(sharded.program.notes)}
    if machine.kind == "cuda":
        work = traces.traced(stepper.timed)
        copies = [each for each in work if "DtoH" in each.name or "HtoD" in each.name]
        kernels = [each for each in work if each.kind == "kernel"]
        figures |= {"copies_ms": traces.busy(copies), "overlap_ms": traces.overlap(copies, kernels)}
        figures["streams"] = traces.described(work)
