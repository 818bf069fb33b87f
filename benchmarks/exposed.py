"""Predicted exposed communication of a step beside the least that any order of its operations could have.

    python benchmarks/exposed.py

Jobs of training_jobs.py on two H100 and on two ranks of this CPU as it is described before it is measured, and a Llama
of 7 billion parameters in bfloat16 with 4,096 tokens a rank on 64 H100, which is captured on ``meta``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardgraph
from benchmarks.training_jobs import JOBS, Job
from shardgraph import preset
from shardgraph.capture.captures import Call, Captures
from shardgraph.cost_models.cluster import Cluster
from shardgraph.passes.lowering import lower
from shardgraph.plans.shards import named_shapes
from shardgraph.report.analysis import analyze_program
from shardgraph.report.bound import least_exposed

PLANS = ("fsdp", "zero2", "ddp")


class Trained(nn.Module):
    """A job's model with its loss."""

    def __init__(self, job: Job) -> None:
        super().__init__()
        self.model, self.job = job.model().train(), job

    def forward(self, batch: torch.Tensor) -> torch.Tensor:
        return self.job.loss(self.model, batch)


def calls(layers: int) -> Iterator[tuple[str, Call, int, int, str, list[Cluster]]]:
    """Name, call, ranks, bytes of buckets, precision and clusters of each job."""
    for name in ("llama", "gpt2", "small"):
        batch = JOBS[name].batch(torch.Generator().manual_seed(0), 2)[0]
        call = Call(Trained(JOBS[name]), (batch,), {}, None, True)
        yield name, call, 2, 8 * 2**20, "", [Cluster.detect(), Cluster.of("H100")]
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False))
        ids = torch.zeros(1, 4096, dtype=torch.int64)
    call = Call(model, (), {"input_ids": ids, "labels": ids}, None, True)
    yield "llama-7b", call, 64, 256 * 2**20, "bf16", [Cluster.of("H100", nodes=8)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", nargs="+", default=["llama", "gpt2", "small", "llama-7b"])
    parser.add_argument("--layers", type=int, default=32, help="layers of the Llama of 7B")
    options = parser.parse_args()
    columns = "".join(f"{name:>10}" for name in ("step ms", "sent ms", "exposed", "least"))
    print(f"{'job':<10}{'plan':<7}{'ranks':<12}{'buckets':>8}{columns}{'ratio':>7}")
    for name, call, ranks, size, precision, clusters in calls(options.layers):
        if name not in options.jobs:
            continue
        plan = preset("fsdp", {"dp": ranks})
        if precision:
            plan = replace(plan, precision=shardgraph.Precision.of(precision))
        joint, shapes = Captures().take(call, plan), named_shapes(call.model)
        for each in PLANS:
            for bucket in (0, size):
                named = replace(preset(each, {"dp": ranks}), precision=plan.precision, bucket=bucket)
                program = lower(joint, named, shapes)
                for cluster in clusters:
                    time, least = analyze_program(program, cluster).time, least_exposed(program, cluster)
                    figures = "".join(
                        f"{1e3 * s:>10.3f}" for s in (time.total, time.communication, time.exposed, least)
                    )
                    cells = f"{name:<10}{each:<7}{f'{ranks} {cluster.name}':<12}{bucket // 2**20:>8}"
                    print(f"{cells}{figures}{time.exposed / least:>7.2f}", flush=True)


if __name__ == "__main__":
    main()
