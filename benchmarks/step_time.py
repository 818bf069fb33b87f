"""Predicted and measured time of training steps on this machine, side by side.

    python benchmarks/step_time.py --name step-time-2-ranks

All models train under all plans on real ranks: every round takes one step of each in turn, and the median of the rounds
is what was measured. Before and after that the machine itself is measured (``shardgraph calibrate``), twice because its
speed drifts; every model is analysed under every plan on the cluster that both fit together. The models are random
weights of configurations of several sizes; none of them was used to fit anything.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from scipy.stats import spearmanr
from torch import nn
from transformers import (
    BertConfig,
    BertForMaskedLM,
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    ResNetConfig,
    ResNetForImageClassification,
    ViTConfig,
    ViTForImageClassification,
)

import shardgraph
from shardgraph import calibration

Call = tuple[nn.Module, dict[str, torch.Tensor]]

PLANS = ["ddp", "zero2", "fsdp"]


def llama(layers: int, width: int, batch: int, length: int, vocabulary: int = 2048) -> Call:
    config = LlamaConfig(
        hidden_size=width,
        intermediate_size=width * 8 // 3,
        num_hidden_layers=layers,
        num_attention_heads=8,
        num_key_value_heads=4,
        vocab_size=vocabulary,
        use_cache=False,
    )
    return LlamaForCausalLM(config), _text(batch, length, vocabulary)


def gpt2(batch: int) -> Call:
    config = GPT2Config(n_embd=256, n_layer=4, n_head=8, vocab_size=4096, n_positions=128, use_cache=False)
    return GPT2LMHeadModel(config), _text(batch, 128, 4096)


def bert(batch: int) -> Call:
    config = BertConfig(
        hidden_size=320, num_hidden_layers=3, num_attention_heads=8, intermediate_size=1280, vocab_size=1024
    )
    return BertForMaskedLM(config), _text(batch, 160, 1024)


def vit(batch: int) -> Call:
    config = ViTConfig(
        hidden_size=192, num_hidden_layers=6, num_attention_heads=6, intermediate_size=768, image_size=96, patch_size=8
    )
    return ViTForImageClassification(config), _images(batch, 96)


def resnet(batch: int) -> Call:
    config = ResNetConfig(hidden_sizes=[64, 128, 256, 512], depths=[2, 2, 2, 2], layer_type="basic", embedding_size=32)
    return ResNetForImageClassification(config), _images(batch, 64)


def _text(batch: int, length: int, vocabulary: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(vocabulary, (batch, length))
    return {"input_ids": ids, "labels": ids}


def _images(batch: int, size: int) -> dict[str, torch.Tensor]:
    return {"pixel_values": torch.randn(batch, 3, size, size), "labels": torch.zeros(batch, dtype=torch.long)}


MODELS: dict[str, Callable[[], Call]] = {
    "llama 4x256, 4x128": lambda: llama(4, 256, 4, 128),
    "llama 2x512, 2x128": lambda: llama(2, 512, 2, 128),
    "llama 6x192, 1x512": lambda: llama(6, 192, 1, 512),
    "gpt2 4x256, 4x128": lambda: gpt2(4),
    "bert 3x320, 4x160": lambda: bert(4),
    "vit 6x192, 4x96x96": lambda: vit(4),
    "resnet 18, 4x64x64": lambda: resnet(4),
}


def make(name: str) -> Call:
    torch.manual_seed(0)
    model, call = MODELS[name]()
    return model.train(), call


class Training:
    """One model under one plan on this rank."""

    def __init__(self, model: str, plan: str) -> None:
        original, self.call = make(model)
        self.model = shardgraph.compile(original, plan)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-4)
        self.times: list[float] = []

    def step(self) -> None:
        started = time.perf_counter()
        self.model(**self.call).loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.times.append(time.perf_counter() - started)


def measure(cases: list[tuple[str, str]], rounds: int) -> list[list[float]]:
    """What each rank does: seconds of each round's step by case, without the first two, which compile and warm up."""
    torch.set_num_threads(1)
    trainings = [Training(*case) for case in cases]
    for _ in range(rounds + 2):
        for training in trainings:
            dist.barrier()
            training.step()
    return [training.times[2:] for training in trainings]


def predict(case: tuple[str, str], nproc: int, cluster: shardgraph.Cluster) -> dict[str, Any]:
    model, call = make(case[0])
    analysis = shardgraph.analyze(
        model, plan=case[1], example_kwargs=call, mesh={"dp": nproc}, cluster=cluster, fold=False
    )
    return {"seconds": analysis.time.total, "exposed": analysis.time.exposed, "compute": analysis.time.compute}


def together(before: calibration.Measurements, after: calibration.Measurements) -> calibration.Measurements:
    return replace(
        before,
        samples=before.samples + after.samples,
        transfers=before.transfers + after.transfers,
    )


def _ordered(
    plans: list[str], model: str, cases: list[tuple[str, str]], predicted: list[float], measured: list[float]
) -> bool:
    """Whether the plans of a model are predicted in the measured order."""
    places = [cases.index((model, plan)) for plan in plans]
    return sorted(places, key=predicted.__getitem__) == sorted(places, key=measured.__getitem__)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="latest", help="results/NAME.json is written")
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--models", nargs="+", default=list(MODELS), choices=list(MODELS))
    parser.add_argument("--plans", nargs="+", default=PLANS, choices=PLANS)
    options = parser.parse_args()

    cases = [(model, plan) for model in options.models for plan in options.plans]
    before = calibration.measure(options.nproc)
    seconds = shardgraph.launch(measure, options.nproc, args=(cases, options.rounds), timeout=3000)[0]
    cluster = calibration.fit(together(before, calibration.measure(options.nproc)))
    predicted = [predict(case, options.nproc, cluster) for case in cases]
    measured = [statistics.median(times) for times in seconds]
    errors = [p["seconds"] / m - 1 for p, m in zip(predicted, measured, strict=True)]
    print(f"{'model, plan':<30}{'predicted ms':>14}{'measured ms':>14}{'range ms':>16}{'error':>8}")
    for (model, plan), p, m, times, error in zip(cases, predicted, measured, seconds, errors, strict=True):
        spread = f"{1e3 * min(times):.0f} to {1e3 * max(times):.0f}"
        print(f"{model + ', ' + plan:<30}{1e3 * p['seconds']:>14.0f}{1e3 * m:>14.0f}{spread:>16}{error:>8.1%}")
    rows = list(zip(cases, predicted, measured, strict=True))
    rank = spearmanr([p["seconds"] for p in predicted], measured).statistic
    within = [
        spearmanr(*zip(*[(p["seconds"], m) for (name, _), p, m in rows if name == model], strict=True)).statistic
        for model in options.models
    ]
    remembered = calibration.this_machine()  # what an unmeasured CPU is priced with
    quick = [predict(case, options.nproc, remembered)["seconds"] for case in cases]
    ordered = sum(_ordered(options.plans, model, cases, quick, measured) for model in options.models)
    error, mean = statistics.median(map(abs, errors)), statistics.fmean(within)
    print(f"{len(cases)} cases: median |error| {error:.1%}, Spearman {rank:.3f}, mean within a model {mean:.3f}")
    odd, even = ([statistics.median(times[start::2]) for times in seconds] for start in (0, 1))
    quick_error = statistics.median(abs(p / m - 1) for p, m in zip(quick, measured, strict=True))
    print(
        f"by five seconds of measuring: {ordered} of {len(options.models)} models in order, median |error| "
        f"{quick_error:.1%}"
    )
    print(f"what the machine repeats: Spearman {spearmanr(odd, even).statistic:.3f} between every other round")
    path = Path(__file__).parent / "results" / f"{options.name}.json"
    figures = {
        f"{model}, {plan}": {"predicted": p, "measured": times}
        for (model, plan), p, times in zip(cases, predicted, seconds, strict=True)
    }
    configuration = vars(options) | {"torch": torch.__version__, "command": " ".join(["python", *sys.argv])}
    path.write_text(json.dumps({"configuration": configuration, "figures": figures}, indent=1) + "\n")
    cluster.save(path.with_suffix(".yaml"))


if __name__ == "__main__":
    main()
