"""The search of ``plan="auto"``: how long it takes, how good its estimates are, and its plans beside published ones.

    python benchmarks/search.py speed              # GPT-2 small on 8 devices to Llama 3 405B on 16,384
    python benchmarks/search.py long               # likewise, with sequences of 131,072 tokens
    python benchmarks/search.py estimates          # estimates beside exact prices, for layouts of every kind
    python benchmarks/search.py published          # beside hand-tuned plans of published runs, under the same prices

``speed`` and ``long`` import everything before they measure, and each question is asked once: nothing of one is kept
for the next.
"""

from __future__ import annotations

import argparse
import resource
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardgraph
from benchmarks.published.decoder import Decoder
from benchmarks.published.runs import Run, read
from benchmarks.published.work import work_of
from shardgraph.cost_models.cluster import Cluster
from shardgraph.plans.candidate import Candidate
from shardgraph.plans.plan import Plan
from shardgraph.report.folding import find_stack
from shardgraph.search.depths import Depths
from shardgraph.search.estimate import Estimate, stage_layers
from shardgraph.search.estimates import Estimates
from shardgraph.search.exact import Priced, cheapest
from shardgraph.search.layouts import Layout
from shardgraph.search.machine import resolve_axes
from shardgraph.search.question import Question
from shardgraph.search.source import Source
from shardgraph.search.ways import OFFLOADS

LLAMAS = {
    "Llama 3 8B": (32, 4096, 14336, 32),
    "Llama 3 70B": (80, 8192, 28672, 64),
    "Llama 3 405B": (126, 16384, 53248, 128),
}
"""Layers, width, width of the feed-forward networks, and heads."""
PUBLISHED = Path(__file__).parent / "groundtruth" / "training_runs.csv"


def llama(name: str) -> nn.Module:
    """A model of ``LLAMAS`` on ``meta``, in bfloat16."""
    layers, width, inner, heads = LLAMAS[name]
    config = LlamaConfig(
        num_hidden_layers=layers, hidden_size=width, intermediate_size=inner, num_attention_heads=heads,
        num_key_value_heads=8, vocab_size=128256, use_cache=False, tie_word_embeddings=False,
    )  # fmt: skip
    with torch.device("meta"):
        return LlamaForCausalLM(config).to(torch.bfloat16)


def gpt2() -> nn.Module:
    """GPT-2 small on ``meta``."""
    with torch.device("meta"):
        return GPT2LMHeadModel(GPT2Config(use_cache=False))


def text(batch: int, length: int) -> dict[str, torch.Tensor]:
    """Tokens and labels."""
    ids = torch.zeros(batch, length, dtype=torch.long, device="meta")
    return {"input_ids": ids, "labels": ids}


# -- speed -------------------------------------------------------------------------------------------------------------


def report_speed() -> None:
    """Seconds of each search, the work that it did, and the plan that it found."""
    _answer(
        [
            ("GPT-2 small", gpt2(), text(8, 1024), 8, 64),
            ("Llama 3 8B", llama("Llama 3 8B"), text(1, 8192), 64, 128),
            ("Llama 3 70B", llama("Llama 3 70B"), text(1, 8192), 512, 1024),
            ("Llama 3 405B", llama("Llama 3 405B"), text(1, 8192), 16384, 2048),
        ]
    )


def report_long() -> None:
    """Likewise, for sequences that one device or node cannot hold."""
    _answer(
        [
            ("Llama 3 8B", llama("Llama 3 8B"), text(1, 131072), 64, 128),
            ("Llama 3 405B", llama("Llama 3 405B"), text(1, 131072), 16384, 128),
        ]
    )


def _answer(questions: Sequence[tuple[str, nn.Module, dict[str, torch.Tensor], int, int]]) -> None:
    shardgraph.analyze(gpt2(), plan="single", example_kwargs=text(1, 16), cluster="H100", mesh={"dp": 1})  # imports
    for name, model, kwargs, devices, batch in questions:
        wall, processor = time.perf_counter(), time.process_time()
        plan = shardgraph.plan(model, example_kwargs=kwargs, cluster="H100", devices=devices, global_batch=batch)
        seconds = time.perf_counter() - wall, time.process_time() - processor
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        print(
            f"{name} on {devices} H100: {seconds[0]:.1f} s ({seconds[1]:.1f} s of a core), {peak:.2f} GiB at most\n"
            f"{plan.explain()}\n",
            flush=True,
        )


# -- estimates ---------------------------------------------------------------------------------------------------------


def compared(
    model: nn.Module, kwargs: Mapping[str, Any], cluster: Cluster
) -> Iterator[tuple[Layout, Estimate, Priced]]:
    """Layouts of every kind for a model with a stack of equal layers, with their estimates and exact prices, in the
    buckets that the search gives them."""
    ranks = cluster.world_size
    mesh_of = partial(resolve_axes, mesh={"dp": ranks}, cluster=cluster)
    question = Question.of(model, "auto", mesh_of, True, cluster=cluster).about((), kwargs)
    stack = find_stack(model)
    assert stack is not None
    source = Source(question, depths=Depths(model, stack))
    estimates = Estimates(source, cluster.device.memory, pipelines=True)
    tp = min(8, cluster.devices_per_node)
    layouts = [
        *(Layout(shard=ranks, data=data) for data in ("ddp", "zero2", "fsdp")),
        *(Layout(shard=ranks, recompute=recompute) for recompute in ("selective", "full")),
        *(Layout(shard=ranks, offload=what) for what in OFFLOADS),
        *([Layout(replicate=cluster.nodes, shard=ranks // cluster.nodes)] if cluster.nodes > 1 else []),
        *(Layout(shard=ranks // degree, tp=degree) for degree in (2, tp) if ranks > degree),
        *([Layout(shard=ranks // tp, cp=tp)] if source.call.sequence >= 2**14 else []),
        *(Layout(stages=4, shard=ranks // 4, microbatches=8, data=data) for data in ("zero2", "fsdp")),
        *(Layout(stages=4, chunks=chunks, zero_bubble=True, shard=ranks // 4, microbatches=8) for chunks in (1, 2)),
        Layout(stages=2, chunks=2, shard=ranks // 2, microbatches=8),
    ]
    for layout in layouts:
        if (guess := estimates.again(layout, cluster)) is None:
            continue
        balance = stage_layers(estimates.costs(layout), layout.stages * layout.chunks) if layout.stages > 1 else ()
        plan = replace(layout.plan(balance=balance), recompute=layout.recompute)
        of_step = source
        if layout.stages > 1:
            from shardgraph.capture.capture import own_loss

            call = source.call.resized(layout.batch * layout.microbatches, source.call.sequence)
            of_step = replace(source, question=replace(question, call=replace(call, loss_fn=own_loss)))
        yield layout, guess, cheapest(of_step, plan, cluster.device.memory)


def report_estimates() -> None:
    """Ratios of estimates to exact prices."""
    for nodes in (1, 8):
        cluster = Cluster.of("H100", nodes=nodes)
        for layout, guess, exact in compared(llama("Llama 3 8B"), text(1, 4096), cluster):
            print(
                f"{8 * nodes:>4} {layout.name:<14}{dict(layout.mesh)!s:<40}{layout.recompute:<10}"
                f"step {exact.seconds:.3f} s, estimated {guess.seconds / exact.seconds:.3f} of that; peak "
                f"{exact.memory / 2**30:.1f} GiB, estimated {guess.memory / exact.memory:.3f}",
                flush=True,
            )


# -- published runs ----------------------------------------------------------------------------------------------------


def report_published(rows: Sequence[str]) -> None:
    """The plan of the search beside that of published runs, both priced alike; a run's batch and devices are its own,
    and the memory is that of its devices. Of runs of one model on one kind of device that differ in the number of
    devices or the batch alone, the largest. Of rows that leave out the size of a microbatch, the best size."""
    print(f"{'row':<10}{'model':<18}{'devices':>12}{'published plan':>34}{'seconds':>9}{'peak':>7}"
          f"  {'found':<40}{'seconds':>9}{'ratio':>7}")  # fmt: skip
    ratios, clear = [], 0
    for runs in _compared(rows):
        run = runs[0]
        try:
            published, found = _both(runs)
        except shardgraph.ShardGraphError as error:
            print(f"{run.row['row_id']:<10}{run.row['model'][:16]:<18}not compared: {str(error).splitlines()[0][:90]}")
            continue
        best = found.considered[0]
        ratio = best.seconds / published.seconds
        ratios.append(ratio)
        devices = f"{run.row['n_gpus']} {run.device}"
        theirs, ours = (f"{name} {'x'.join(map(str, sizes))}" for name, sizes in
                        ((run.plan, run.mesh.values()), (found.name, dict(found.whole_mesh).values())))  # fmt: skip
        print(f"{run.row['row_id']:<10}{run.row['model'][:16]:<18}{devices:>12}{theirs:>34}{published.seconds:>9.2f}"
              f"{published.memory / 2**30:>7.0f}  {ours:<40}{best.seconds:>9.2f}{ratio:>7.2f}", flush=True)  # fmt: skip
        doubt = 1 + run.cluster.doubt
        apart = best.seconds * doubt < published.seconds / doubt
        clear += apart
        between = (f"{seconds / doubt:.2f} to {seconds * doubt:.2f} s" for seconds in (published.seconds, best.seconds))
        away = any(isinstance(each, shardgraph.offload) for _, each in found.annotations)
        away = "all layers" if found.offload.activations else "some layers" if away else ""
        print(f"{'':<10}expected {' and '.join(between)}{f'; {away} save on the host' if away else ''}"
              f"{', which is apart: ' + _reason(published, best) if apart else ''}")  # fmt: skip
    if ratios:
        print(
            f"{len(ratios)} runs: the found plan takes {min(ratios):.2f} to {max(ratios):.2f} of the time of the "
            f"published one; {clear} times it is faster by more than both intervals"
        )


def _compared(rows: Sequence[str]) -> list[list[Run]]:
    """Runs whose rows' names begin with one of ``rows``, without experts or 8 bits, as alternatives of a row each."""
    runs = [run for run in read(PUBLISHED, timed=False)[0] if run.row["row_id"].startswith(tuple(rows))]
    alternatives: dict[str, list[Run]] = {}
    for run in runs:
        if "ep" not in run.mesh and not run.shape.float8:
            alternatives.setdefault(run.row["row_id"], []).append(run)
    largest: dict[tuple[Any, ...], list[Run]] = {}
    for row in sorted(alternatives.values(), key=lambda row: int(row[0].row["n_gpus"])):
        run = row[0]
        largest[run.shape, run.device, run.precision, run.recompute, run.sequence] = row
    return sorted(largest.values(), key=lambda row: row[0].row["row_id"])


def _reason(published: Candidate, found: Candidate) -> str:
    """What a step of the found plan has less of, the most first, and what else it recomputes."""
    kinds = {"compute": "computation", "exposed": "communication that is not hidden", "bubble": "waiting for stages"}
    less = {words: getattr(published, kind) - getattr(found, kind) for kind, words in kinds.items()}
    named = [f"{seconds:.2f} s less {words}" for words, seconds in sorted(less.items(), key=lambda item: -item[1])
             if seconds > 0.01 * published.seconds]  # fmt: skip
    again = f", recomputing {found.recompute} instead of {published.recompute}"
    return ", ".join(named) + (again if found.recompute != published.recompute else "")


def _priced(run: Run) -> Candidate:
    """What the published plan costs; where microbatches follow on each other, replicas are reduced after the last."""
    analysis = run.analysis()
    plan, time = analysis.plan, analysis.time
    seconds, parts = time.total, {"compute": time.compute, "exposed": time.exposed, "bubble": time.bubble}
    if run.accumulated > 1:
        seconds = run.seconds_on(work_of(analysis), run.cluster.device)
        compute = run.accumulated * time.compute
        parts = {"compute": compute, "exposed": seconds - time.optimizer - compute}
    return Candidate(plan.name, plan.whole_mesh, analysis.peak_memory, seconds, True, recompute=run.recompute, **parts)


def _both(runs: Sequence[Run]) -> tuple[Candidate, Plan]:
    """The published plan's costs and the plan of the search."""
    run, priced = runs[0], [_priced(run) for run in runs]
    capacity = run.cluster.device.memory
    published = min(priced, key=lambda each: (each.memory > capacity, each.seconds))
    with torch.device("meta"):
        model = Decoder(run.shape)
        tokens = torch.empty(1, run.sequence, dtype=torch.long)
    samples = int(float(run.row["gbs_seqs"]))
    # Published plans ran, so their memory was enough, also where our prediction is above it.
    memory = max(capacity, published.memory)
    found = shardgraph.plan(
        model, (tokens,), example_kwargs={"labels": tokens}, cluster=run.cluster, devices=int(run.row["n_gpus"]),
        global_batch=samples, precision=run.precision, backend="inductor", memory=memory,
    )  # fmt: skip
    return published, found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("report", choices=["speed", "long", "estimates", "published"])
    parser.add_argument("--rows", nargs="*", default=[""], help="how names of published rows begin (default: all)")
    options = parser.parse_args()
    if options.report == "published":
        report_published(options.rows)
    else:
        {"speed": report_speed, "long": report_long, "estimates": report_estimates}[options.report]()


if __name__ == "__main__":
    main()
