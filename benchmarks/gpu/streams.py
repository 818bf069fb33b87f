"""Collectives of NCCL beside the computation: which streams they run on, and how long beside kernels."""

from __future__ import annotations

import shardgraph
from benchmarks.gpu import models, traces
from benchmarks.gpu.cases import Cases, Machine, check
from benchmarks.gpu.training import Stepper


def streams(cases: Cases, machine: Machine) -> None:
    """A step of each plan, traced. With one rank NCCL copies on the device where several ranks would communicate."""
    machine.need_cuda()
    make = models.llama(2, 64, 2, 16, 128) if machine.tiny else models.llama(8, 2048, 4, 1024)
    with machine.process_group(machine.backend):
        for plan in ("fsdp", "zero2"):  # an all-reduce of one rank does nothing
            with cases.case(plan) as figures:
                model, call = models.seeded(make, machine.device)
                sharded = shardgraph.compile(model, plan=plan, precision="bf16")
                stepper = Stepper(machine, sharded, sharded, models.on(call, machine.device))
                for _ in range(3):
                    stepper.step()
                figures["streams"] = traces.described(traces.traced(stepper.timed))
                for each in figures["streams"]:
                    cases.say(
                        f"{plan}: stream {each['stream']}: {each['kernels']} kernels, {each['copies']} copies, "
                        f"{each['ms']:.2f} ms, beside compute {each['beside_compute_ms']:.2f}: {each['names'][:2]}"
                    )
                check(
                    len(figures["streams"]) > 1, "everything ran on one stream: no collective is beside the computation"
                )
            machine.free()
