"""How good the automatic plan is as measured: beside every plan that a person would write by name, on gloo ranks.

    python benchmarks/search_quality.py --ranks 2 --rounds 3
    python benchmarks/search_quality.py --ranks 2 --rounds 3 --tune 10

Each job is a model with a batch; its plans are compiled on the same ranks of one thread each, and run in turns, round
after round, so that what else the machine does falls on all alike. A plan's time is the median of its rounds, each of
which is the median of some steps of the slowest rank, per sample. Memory limits of some jobs rule plans out, by
prediction. The automatic plan is that of ``shardgraph.plan``, whose ranks may share a batch. With ``--tune`` there is
also the one that ``shardgraph.compile`` takes after it has run the best for so many seconds, for which it corrects what
is known of this machine.
"""

from __future__ import annotations

import argparse
import copy
import statistics
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardgraph
from shardgraph.api.tune import measured_step

SECONDS = 1.0  # of steps, in a round of a plan


class Job(NamedTuple):
    """A model, its call, and a limit on a rank's memory."""

    model: Callable[[], nn.Module]
    call: Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]
    memory: str | None = None


def _text(batch: int, length: int) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    def call() -> tuple[tuple[Any, ...], dict[str, Any]]:
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
    config = GPT2Config(n_embd=width, n_layer=layers, n_head=8, vocab_size=512, n_positions=256, use_cache=False)
    return lambda: GPT2LMHeadModel(config)


def _wide(width: int, layers: int) -> Callable[[], nn.Module]:
    return lambda: nn.Sequential(*(nn.Sequential(nn.Linear(width, width), nn.GELU()) for _ in range(layers)))


def _rows(batch: int, *shape: int) -> Callable[[], tuple[tuple[Any, ...], dict[str, Any]]]:
    return lambda: ((torch.randn(batch, *shape, generator=torch.Generator().manual_seed(0)),), {})


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
    "wide, batch 8": Job(_wide(2048, 4), _rows(8, 2048)),
    "wide, batch 256": Job(_wide(1024, 4), _rows(256, 1024)),
    "wide, 200 MiB": Job(_wide(2048, 4), _rows(8, 2048), "200MiB"),
    "images": Job(_images, _rows(16, 3, 64, 64)),
    "small parameters": Job(_small, _rows(32, 32)),
}
PLANS = ("ddp", "zero2", "fsdp", "tp", "tp+sp")


def on_rank(names: list[str], rounds: int, tune: float | None) -> dict[str, dict[str, float]]:
    """Seconds per sample of each plan of each job, by its name; ``auto`` is the automatic one, ``tuned`` that which was
    measured for ``tune`` seconds.
    """
    torch.set_num_threads(1)
    world = dist.get_world_size()
    found: dict[str, dict[str, float]] = {}
    for name in names:
        job = JOBS[name]
        torch.manual_seed(0)
        model, (args, kwargs) = job.model(), job.call()
        options: dict[str, Any] = {"example_inputs": args, "example_kwargs": kwargs, "memory": job.memory}
        # Every rank finds the same: the search is deterministic, and so are the prices of this machine.
        automatic = shardgraph.plan(
            model, args, example_kwargs=kwargs, devices=world, memory=job.memory, progress=False
        )
        modules: dict[str, shardgraph.ShardedModule] = {}
        measured = {"tuned": "auto"} if tune else {}
        for plan, given in {"auto": automatic, **dict(zip(PLANS, PLANS, strict=True)), **measured}.items():
            seconds = tune if plan == "tuned" else None
            try:
                modules[plan] = shardgraph.compile(copy.deepcopy(model), given, tune=seconds, progress=False, **options)
            except shardgraph.PlanError:
                continue
        taken: dict[str, list[float]] = {plan: [] for plan in modules}
        for turn in range(rounds):
            order = list(modules)
            for plan in order[turn % len(order) :] + order[: turn % len(order)]:  # the first of a round is slower
                module = modules[plan]
                taken[plan].append(measured_step(module, (args, kwargs), SECONDS) / module.plan.data_size)
        chosen = ", tuned ".join(modules[plan].plan.name for plan in ("auto", "tuned") if plan in modules)
        found[name] = {plan: statistics.median(values) for plan, values in taken.items()} | {f"is {chosen}": 0.0}
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--jobs", nargs="*", default=list(JOBS), help="names of jobs (default: all)")
    parser.add_argument("--tune", type=float, help="seconds for which the best by prediction are run")
    options = parser.parse_args()
    print(f"{options.ranks} gloo ranks of one thread; milliseconds per sample")
    for job in options.jobs:
        (found, *_) = shardgraph.launch(on_rank, options.ranks, args=([job], options.rounds, options.tune), timeout=600)
        times = {plan: value for plan, value in found[job].items() if value}
        chosen = next(plan for plan, value in found[job].items() if not value)
        best = min((plan for plan in times if plan in PLANS), key=times.__getitem__)
        cells = "  ".join(f"{plan} {1e3 * value:.2f}" for plan, value in times.items())
        shares = "  ".join(f"{times[plan] / times[best]:.2f}" for plan in ("auto", "tuned") if plan in times)
        print(f"{job:<26}auto {chosen:<26}{shares} of {best:<7} {cells}", flush=True)


if __name__ == "__main__":
    main()
