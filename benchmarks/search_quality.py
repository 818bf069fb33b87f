"""How good the automatic plan is as measured: beside every plan that a person would write by name, on gloo ranks.

    python benchmarks/search_quality.py --ranks 2 --rounds 3 --finals 9 --tune 10

Each job is a model with a batch; its plans are compiled on the same ranks of one thread each, and run in turns, round
after round, so that what else the machine does falls on all alike. A round of a plan is the median of some steps of the
slowest rank, for the batch of a data rank. The plans by name are presets, with every way to recompute where they do not
fit a job's limit of memory without, and pipelines, each with several numbers of microbatches; of them, those run that
fit and are within 1.5 times of the best, by prediction. The automatic plan is that of ``shardgraph.plan``, whose ranks
may share a batch. With ``--tune`` there is also the one that ``shardgraph.compile`` takes after it has run the best for
so many seconds, for which it corrects what is known of this machine; there each rank has its own batch, so it is
compared with plans along data axes alone.

With ``--total`` every step has the samples of that batch times the ranks, however they are divided: the automatic plan
is that of ``shardgraph.compile`` with ``global_batch``, and the tuned one is found among all layouts and compared with
all plans by name, whose ranks are called once with all samples of a data rank or, of data axes alone, two or four times
with gradients that are reduced in the last call, as under ``no_sync()``.

Plans that lead to the same program are timed once: their ratio is 1. The fastest of the plans by name is the one of
the smallest median, so that its rounds flatter it: it and the automatic ones run in turns again, and the ratios are
those of these rounds alone, with their 95% bootstrap intervals.

With ``--network`` the ranks are in two "nodes" of this machine, joined by a limited link as in ``limited_network.py``,
which says what that needs. They first measure the machine and the link together (:func:`shardgraph.calibrate`), and all
plans are priced by what they found.

With ``--peaks`` nothing is timed: peaks of live tensors in a step of the automatic plans on the fullest rank, counted
operation by operation, are beside what was predicted and the job's limit. Predictions also have what kernels and gloo
take for themselves, which are no tensors.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import itertools
import os
import statistics
import sys
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardgraph
from benchmarks.limited_network import SETTINGS, on_two_nodes
from benchmarks.ratios import ratio
from shardgraph.api.timed_steps import TimedSteps, largest
from shardgraph.capture.captures import Call
from shardgraph.cost_models.cluster import Cluster
from shardgraph.plans.batch import Batch
from shardgraph.runtime.measure import PeakMemory
from shardgraph.search.machine import machine_for
from shardgraph.sizes import format_bytes

SECONDS = 1.0  # of steps, in a round of a plan


Inputs = tuple[tuple[Any, ...], dict[str, Any]]


class Job(NamedTuple):
    """A model, its call, and a limit on a rank's memory. A call with a target has a squared error as its loss."""

    model: Callable[[], nn.Module]
    call: Callable[[], Inputs]
    memory: str | None = None

    @property
    def samples(self) -> int:
        return Call(nn.Identity(), *self.call()).batch

    def inputs(self, rows: int) -> Inputs:
        """The call with so many samples."""
        call = Call(nn.Identity(), *self.call()).repeated(rows)
        return call.args, dict(call.kwargs)

    def options(self, rows: int) -> dict[str, Any]:
        """What planning, analysing and compiling it have in common, for calls of so many samples."""
        args, kwargs = self.inputs(rows)
        loss_fn = F.mse_loss if "target" in kwargs else None
        return {"example_inputs": args, "example_kwargs": kwargs, "loss_fn": loss_fn, "memory": self.memory}

    def rows(self, total: int | None, calls: int) -> int:
        """The samples of a call: of a step with so many calls of all data ranks, or the job's for each."""
        return self.samples if total is None else total // calls


def _text(batch: int, length: int) -> Callable[[], Inputs]:
    def call() -> Inputs:
        ids = torch.randint(0, 512, (batch, length), generator=torch.Generator().manual_seed(0))
        return (), {"input_ids": ids, "labels": ids}

    return call


def _llama(layers: int, width: int, vocabulary: int = 512) -> Callable[[], nn.Module]:
    config = LlamaConfig(
        hidden_size=width, intermediate_size=3 * width, num_hidden_layers=layers, num_attention_heads=8,
        num_key_value_heads=4, vocab_size=vocabulary, use_cache=False, max_position_embeddings=512,
    )  # fmt: skip
    return lambda: LlamaForCausalLM(config)


def _gpt2(layers: int, width: int) -> Callable[[], nn.Module]:
    config = GPT2Config(
        n_embd=width, n_layer=layers, n_head=8, vocab_size=512,
        n_positions=256, use_cache=False, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return lambda: GPT2LMHeadModel(config)


def _wide(width: int, layers: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))


def _rows(batch: int, *shape: int, out: int) -> Callable[[], Inputs]:
    def call() -> Inputs:
        generator = torch.Generator().manual_seed(0)
        x = torch.randn(batch, *shape, generator=generator)
        return (x,), {"target": torch.randn(batch, out, generator=generator)}

    return call


def _images() -> nn.Module:
    widths = (3, 32, 64, 128)
    blocks = [
        nn.Sequential(nn.Conv2d(a, b, 3, stride=2, padding=1), nn.BatchNorm2d(b), nn.ReLU())
        for a, b in pairwise(widths)
    ]
    return nn.Sequential(*blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(128, 64))


def _small() -> nn.Module:
    return nn.Sequential(*(nn.Sequential(nn.LayerNorm(32), nn.Linear(32, 32), nn.GELU()) for _ in range(24)))


JOBS = {
    "llama 6x256, batch 4": Job(_llama(6, 256), _text(4, 128)),
    "llama 6x256, batch 1": Job(_llama(6, 256), _text(1, 64)),
    "llama 6x256, 120 MiB": Job(_llama(6, 256), _text(4, 128), "120MiB"),
    "llama 12x128": Job(_llama(12, 128), _text(4, 128)),
    "llama, large vocabulary": Job(_llama(2, 256, 16384), _text(2, 128)),
    "gpt2 6x256": Job(_gpt2(6, 256), _text(4, 128)),
    "gpt2 4x512, batch 1": Job(_gpt2(4, 512), _text(1, 64)),
    "gpt2 8x512, 300 MiB": Job(_gpt2(8, 512), _text(8, 64), "300MiB"),
    "wide, batch 8": Job(_wide(2048, 4), _rows(8, 2048, out=2048)),
    "wide, batch 256": Job(_wide(1024, 4), _rows(256, 1024, out=1024)),
    "wide, 200 MiB": Job(_wide(2048, 4), _rows(8, 2048, out=2048), "200MiB"),
    "images": Job(_images, _rows(16, 3, 64, 64, out=64)),
    "small parameters": Job(_small, _rows(32, 32, out=32)),
}
AUTOMATIC = ("auto", "tuned")
OWN_BATCH = ("ddp", "zero2", "fsdp")  # whose ranks do not share one
WITHIN = 1.5  # of the best prediction


def by_hand(ranks: int, total: int | None) -> dict[str, dict[str, dict[str, Any]]]:
    """The plans that a person would write: what ``compile`` is asked for, by name, of each preset from the fastest of
    its variants on, if it fits; of a ``total`` of samples also in several calls."""
    meshes = {plan: {"dp": ranks} for plan in OWN_BATCH} | {plan: {"tp": ranks} for plan in ("tp", "tp+sp")}
    stages = {"pp": {"pp": ranks}}
    if ranks > 2:
        half = ranks // 2
        meshes |= {plan: {"dp": half, "tp": 2} for plan in ("zero2+tp", "fsdp+tp", "fsdp+tp+sp")}
        stages |= {plan: {"pp": 2, "dp": half} for plan in ("pp+ddp", "pp+zero2")}
    plans = {
        plan: {
            f"{plan} {recompute}".removesuffix(" none"): {"plan": plan, "mesh": mesh, "recompute": recompute}
            for recompute in ("none", "selective", "full")
        }
        for plan, mesh in meshes.items()
    }
    for plan, calls in itertools.product(OWN_BATCH if total else (), (2, 4)):
        if total % (ranks * calls) == 0:
            mesh = {"dp": ranks}
            several = replace(shardgraph.preset(plan, mesh), batch=Batch(total, calls, "last"))
            name = f"{plan}, {calls} calls"
            plans[name] = {
                f"{name} {recompute}".removesuffix(" none"): {"plan": several, "mesh": mesh, "recompute": recompute}
                for recompute in ("none", "selective", "full")
            }
    schedules = [("1f1b", 2 * ranks), ("1f1b", 4 * ranks), ("zbv", 2 * ranks)]
    for plan, mesh in stages.items():
        for schedule, parts in schedules:
            name, pipeline = f"{plan} {schedule} {parts}", shardgraph.Pipeline(parts, schedule)
            plans[name] = {name: {"plan": plan, "mesh": mesh, "pipeline": pipeline}}
    return plans


def calls_of(asked: dict[str, Any]) -> int:
    """The calls of all data ranks in a step of a plan by hand."""
    own = asked["plan"].calls if isinstance(asked["plan"], shardgraph.Plan) else 1
    return own * asked["mesh"].get("dp", 1)


class Outcome(NamedTuple):
    """What one job has shown: the seconds of each plan, and the automatic ones beside the best by name."""

    times: dict[str, float]
    names: dict[str, str]
    """The plan that ``auto`` or ``tuned`` is."""
    beside: dict[str, tuple[str, list[float]]]
    """The best plan by name that it may be, and its ratio to that, with the interval."""


def on_rank(name: str, wanted: dict[str, dict[str, Any]], rounds: int, finals: int, total: int | None) -> Outcome:
    """The outcome of the job of this name; every rank has the same. ``wanted`` is what ``compile`` is asked for, for
    steps of ``total`` samples, or of the job's for each data rank."""
    torch.set_num_threads(1)
    job = JOBS[name]
    modules = compiled(job, wanted, total)
    programs = {plan: program_text(module) for plan, module in modules.items()}
    first_of = {plan: next(other for other in programs if programs[other] == programs[plan]) for plan in programs}
    distinct = list(dict.fromkeys(first_of.values()))
    rows = {plan: job.rows(total, modules[plan].plan.data_size * modules[plan].plan.calls) for plan in distinct}
    steps = {plan: TimedSteps(modules[plan], job.inputs(rows[plan])) for plan in distinct}

    def in_turns(plans: list[str], rounds: int) -> dict[str, list[float]]:
        taken: dict[str, list[float]] = {plan: [] for plan in plans}
        for turn in range(rounds):
            at = turn % len(plans)  # the first of a round is slower
            for plan in plans[at:] + plans[:at]:
                steps[plan].step()  # the first after another plan's is slower
                batches = modules[plan].plan.data_size if total is None else 1
                taken[plan].append(steps[plan].median(SECONDS) / batches)
        return taken

    rounded = in_turns(distinct, rounds)
    times = {plan: statistics.median(rounded[first_of[plan]]) for plan in modules}
    by_name = [plan for plan in times if plan not in AUTOMATIC]
    own = [plan for plan in by_name if plan.split()[0] in OWN_BATCH]
    among = {"auto": by_name, "tuned": own if total is None else by_name}
    rivals = {plan: min(names, key=times.__getitem__) for plan, names in among.items() if plan in modules and names}
    again = in_turns(list(dict.fromkeys(first_of[plan] for pair in rivals.items() for plan in pair)), finals)
    beside = {plan: (rival, ratio(again[first_of[plan]], again[first_of[rival]])) for plan, rival in rivals.items()}
    return Outcome(times, {plan: _kind(modules[plan].plan) for plan in rivals}, beside)


def _kind(plan: shardgraph.Plan) -> str:
    if plan.pipeline is not None:
        return f"{plan.name} {plan.pipeline.schedule} {plan.pipeline.parts}"
    calls = f", {plan.calls} calls" if plan.calls > 1 else ""
    return plan.name + calls + (" reduced once" if not plan.reduces(0) else "")


def peaks_on_rank(name: str, wanted: dict[str, dict[str, Any]]) -> dict[str, tuple[str, int]]:
    """The automatic plans' names and peaks in bytes, of the fullest rank."""
    torch.set_num_threads(1)
    call = JOBS[name].call()
    inputs = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, torch.Tensor)]
    found = {}
    for plan, module in compiled(JOBS[name], wanted, None).items():
        steps = TimedSteps(module, call)
        states = [value for state in steps.optimizer.state.values() for value in state.values()]
        with PeakMemory().track([*module.parameters(), *module.buffers(), *states, *inputs]) as memory:
            steps.step()
        found[plan] = module.plan.name, int(largest(memory.peak_bytes))
    return found


def report_peaks(job: str, wanted: dict[str, dict[str, Any]], ranks: int) -> None:
    """Measured peaks of the automatic plans beside the predicted ones and the limit."""
    (found, *_) = shardgraph.launch(peaks_on_rank, ranks, args=(job, wanted), timeout=900)
    predicted = wanted["auto"]["plan"].considered[0].memory
    for plan, (name, peak) in found.items():
        expected = f", predicted {format_bytes(predicted)}" if plan == "auto" else ""
        limit = f", limit {JOBS[job].memory}" if JOBS[job].memory else ""
        print(f"{job:<26}{plan:<6}is {name:<12}peak {format_bytes(peak)}{expected}{limit}", flush=True)


def compiled(job: Job, wanted: dict[str, dict[str, Any]], total: int | None) -> dict[str, shardgraph.ShardedModule]:
    """The job's module under each plan that fits."""
    torch.manual_seed(0)
    model = job.model()
    modules = {}
    for name, asked in wanted.items():
        rows = job.samples if name in AUTOMATIC else job.rows(total, calls_of(asked))
        with contextlib.suppress(shardgraph.PlanError):  # it does not fit
            modules[name] = shardgraph.compile(copy.deepcopy(model), progress=False, **asked, **job.options(rows))
    return modules


def automatic_plans(
    job: Job, ranks: int, tune: float | None, here: Cluster, total: int | None
) -> dict[str, dict[str, Any]]:
    """What ``compile`` is asked for, by plan."""
    if total is not None:
        asked = {"plan": "auto", "global_batch": total}
        return {"auto": asked, **({"tuned": {**asked, "tune": tune}} if tune else {})}
    torch.manual_seed(0)
    options = job.options(job.samples)
    automatic = shardgraph.plan(job.model(), devices=ranks, cluster=here, progress=False, **options)
    return {"auto": {"plan": automatic}, **({"tuned": {"plan": "auto", "tune": tune}} if tune else {})}


def promising(job: Job, ranks: int, here: Cluster, total: int | None) -> dict[str, dict[str, Any]]:
    """The plans by hand that are possible, fit, and are not far from the best of them, by prediction."""
    model = job.model()
    found: dict[str, dict[str, Any]] = {}
    predicted: dict[str, float] = {}
    for variants in by_hand(ranks, total).values():
        for name, asked in variants.items():
            options = job.options(job.rows(total, calls_of(asked)))
            with contextlib.suppress(shardgraph.ShardGraphError):  # it does not fit, or the model cannot be cut so
                analysis = shardgraph.analyze(model, cluster=here, **asked, **options)
                found[name], predicted[name] = asked, analysis.time.total / analysis.samples
                break
    return {name: found[name] for name, seconds in predicted.items() if seconds <= WITHIN * min(predicted.values())}


def program_text(module: shardgraph.ShardedModule) -> tuple[str, ...]:
    """What a module runs: equal of modules that run the same, whose process groups have other names."""
    if module.plan.pipeline is not None:
        return (str(replace(module.plan, name="", note="", considered=(), remarks=(), batch=None)),)
    names = {module.mesh.get_group(axis).group_name: axis for axis in module.mesh.mesh_dim_names}

    def axis_of(argument: Any) -> Any:
        return names.get(argument, argument) if isinstance(argument, str) else argument

    texts = [str(module.plan.whole_mesh), str(module.plan.calls), str(module.plan.reduces(0))]
    for half in (module.forward_graph, module.backward_graph):
        graph = copy.deepcopy(half.graph)
        for node in graph.nodes:
            node.args, node.kwargs = pytree.tree_map(axis_of, (node.args, node.kwargs))
        texts.append(str(graph))
    return tuple(texts)


def show(job: str, found: Outcome) -> None:
    for plan, (rival, (middle, low, high)) in found.beside.items():
        print(f"{job:<26}{plan:<6}is {found.names[plan]:<14}{middle:.2f} [{low:.2f}, {high:.2f}] of {rival}")
    print("    " + "  ".join(f"{plan} {1e3 * value:.2f}" for plan, value in found.times.items()), flush=True)


def total_of(job: Job, options: argparse.Namespace) -> int | None:
    """The samples of a step, of all ranks."""
    return job.samples * options.ranks if options.total else None


def work(options: argparse.Namespace) -> None:
    """What each of the ranks in two nodes does."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo")
    here, first = shardgraph.calibrate(seconds=10.0), dist.get_rank() == 0
    if first:
        print(f"between nodes {here.inter}", flush=True)
    for job in options.jobs:
        wanted: list[Any] = [None]
        if first:
            total = total_of(JOBS[job], options)
            wanted = [automatic_plans(JOBS[job], options.ranks, options.tune, here, total)]
            wanted[0] |= promising(JOBS[job], options.ranks, here, total)
        dist.broadcast_object_list(wanted)
        priced = {plan: {"cluster": here, **asked} for plan, asked in wanted[0].items()}
        found = on_rank(job, priced, options.rounds, options.finals, total_of(JOBS[job], options))
        if first:
            show(job, found)
    dist.barrier()
    dist.destroy_process_group()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--finals", type=int, default=9, help="rounds of the automatic plans and the best by name")
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=list(JOBS), help="default: all")
    parser.add_argument("--tune", type=float, help="seconds for which the best by prediction are run")
    parser.add_argument("--total", action="store_true", help="one batch of all ranks, however it is divided")
    parser.add_argument("--peaks", action="store_true", help="measure memory instead of time")
    parser.add_argument("--network", choices=[setting.name for setting in SETTINGS], help="between two nodes")
    options = parser.parse_args()
    if options.peaks and options.total:
        parser.error("--peaks are of plans that are found before, and those of --total are found on the ranks")
    if options.network and "RANK" in os.environ:
        return work(options)
    of = "all ranks" if options.total else "a data rank"
    print(f"{options.ranks} gloo ranks of one thread" + ("" if options.peaks else f"; ms for the batch of {of}"))
    if options.network:
        setting = next(setting for setting in SETTINGS if setting.name == options.network)
        on_two_nodes(setting, sys.argv, options.ranks, timeout=3600.0)
        return
    here = machine_for(None, options.ranks)
    for job in options.jobs:
        total = total_of(JOBS[job], options)
        wanted = automatic_plans(JOBS[job], options.ranks, options.tune, here, total)
        if options.peaks:
            report_peaks(job, wanted, options.ranks)
            continue
        wanted |= promising(JOBS[job], options.ranks, here, total)
        given = (job, wanted, options.rounds, options.finals, total)
        (found, *_) = shardgraph.launch(on_rank, options.ranks, args=given, timeout=900)
        show(job, found)


if __name__ == "__main__":
    main()
