"""Predicted exposed communication of a step beside the least that any order of its operations could have.

    python benchmarks/exposed.py

Jobs of training_jobs.py on two H100 and on two ranks of this CPU as it is described before it is measured, and a Llama
of 7 billion parameters in bfloat16 with 4,096 tokens a rank, which is captured on ``meta``: on 64 H100 and on 64 A100
with 100 Gb/s each, and, divided by operators, on 8 H100.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.training_jobs import JOBS, Job
from shardgraph import preset
from shardgraph.capture.captures import Call, Captures
from shardgraph.cost_models.cluster import Cluster
from shardgraph.passes.lowering import lower
from shardgraph.plans.precision import AS_STORED, Precision
from shardgraph.plans.shards import named_shapes
from shardgraph.report.analysis import analyze_program
from shardgraph.report.bound import least_exposed

PLANS = ("fsdp", "zero2", "ddp")
OF_64 = (*PLANS, "hsdp")
OF_8 = ("tp", "tp+sp")


class Trained(nn.Module):
    """A job's model with its loss."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model, self.job = job.model().train(), job

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.job.loss(self.model, batch)


@dataclass(frozen=True)
class Case:
    """A call under plans for ``ranks``, with and without buckets of so many bytes, on clusters."""

    name: str
    call: Call
    plans: tuple[str, ...]
    ranks: int
    bucket: int
    precision: str
    clusters: tuple[Cluster, ...]

    def mesh(self, plan: str) -> dict[str, int]:
        """Nodes of eight for ``hsdp``, else one axis."""
        if plan == "hsdp":
            return {"dp_replicate": self.ranks // 8, "dp_shard": 8}
        return {"tp" if plan.startswith("tp") else "dp": self.ranks}


def cases(layers: int) -> Iterator[Case]:
    """Small jobs on two ranks, and a Llama of 7B."""
    for name in ("llama", "gpt2", "small"):
        batch = JOBS[name].batch(torch.Generator().manual_seed(0), 2)[0]
        call = Call(Trained(JOBS[name]), (batch,), {}, None, True)
        yield Case(name, call, PLANS, 2, 8 * 2**20, "", (Cluster.detect(), Cluster.of("H100")))
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False))
        ids = torch.zeros(1, 4096, dtype=torch.int64)
    call = Call(model, (), {"input_ids": ids, "labels": ids}, None, True)
    clusters = Cluster.of("H100", nodes=8), Cluster.of("A100", nodes=8, network=12.5e9)
    yield Case("llama-7b", call, OF_64, 64, 256 * 2**20, "bf16", clusters)
    yield Case("llama-7b", call, OF_8, 8, 0, "bf16", (Cluster.of("H100"),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=["llama", "gpt2", "small", "llama-7b"])
    parser.add_argument("--plans", nargs="+", default=[*OF_64, *OF_8])
    parser.add_argument("--layers", type=int, default=32, help="layers of the Llama of 7B")
    options = parser.parse_args()
    columns = "".join(f"{name:>10}" for name in ("step ms", "sent ms", "exposed", "least"))
    print(f"{'job':<10}{'plan':<7}{'ranks':<12}{'buckets':>8}{columns}{'ratio':>7}")
    for case in cases(options.layers):
        captures, shapes = Captures(), named_shapes(case.call.model)
        for name in case.plans:
            if case.name not in options.jobs or name not in options.plans:
                continue
            precision = Precision.of(case.precision or AS_STORED)
            plan = replace(preset(name, case.mesh(name)), precision=precision)
            for bucket in dict.fromkeys((0, case.bucket)):
                program = lower(captures.take(case.call, plan), replace(plan, bucket=bucket), shapes)
                for cluster in case.clusters:
                    time, least = analyze_program(program, cluster).time, least_exposed(program, cluster)
                    figures = "".join(
                        f"{1e3 * s:>10.3f}" for s in (time.total, time.communication, time.exposed, least)
                    )
                    ranks = f"{case.ranks} {cluster.name}"
                    cells = f"{case.name:<10}{name:<7}{ranks:<12}{bucket // 2**20:>8}"
                    print(f"{cells}{figures}{time.exposed / least:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
