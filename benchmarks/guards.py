"""What it costs that a compiled module sees changes of what forward reads: seconds per call, beside a training step.

    python benchmarks/guards.py --name guards-cpu

Before each call the conditions that tracing read are checked, and modules, parameters and buffers are compared with
those that the program was made for. Both are timed alone and beside whole training steps of a network of 146 small
parameters, where they weigh most, and of Llama with 32 small layers, which has most modules.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM, logging

import shardgraph


def small_network() -> tuple[nn.Module, dict[str, Any], Callable[..., Any]]:
    """73 linear layers, their input, and a loss."""
    layers = [layer for _ in range(73) for layer in (nn.Linear(32, 32), nn.ReLU())]
    return nn.Sequential(*layers), {"input": torch.randn(8, 32)}, lambda output: output.square().mean()


def llama() -> tuple[nn.Module, dict[str, Any], Callable[..., Any]]:
    """Llama with 32 layers of width 256, its input, and its loss."""
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 8}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=32, vocab_size=1024, use_cache=False, **sizes))
    ids = torch.zeros(1, 128, dtype=torch.long)
    return model, {"input_ids": ids, "labels": ids}, lambda output: output.loss


def seconds(call: Callable[[], Any], times: int) -> float:
    start = time.perf_counter()
    for _ in range(times):
        call()
    return (time.perf_counter() - start) / times


def measure(rounds: int, make: Callable[[], Any]) -> dict[str, float]:
    """Medians over rounds in which each part and a step take turns, in seconds."""
    model, inputs, loss = make()
    sharded = shardgraph.compile(model, "single", progress=False)

    def step() -> None:
        loss(sharded(**inputs)).backward()

    step()
    (compiled,) = sharded._latest[1]
    parts = {
        "guards": (lambda: compiled.guards.hold, 50),
        "tensors": (sharded._state.layout.refresh, 50),
        "step": (step, 1),
    }
    timed = [{name: seconds(call, times) for name, (call, times) in parts.items()} for _ in range(rounds)]
    return {name: statistics.median(each[name] for each in timed) for name in parts}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--name", help="write the figures to benchmarks/results/NAME.json")
    options = parser.parse_args()
    logging.set_verbosity_error()
    results = {make.__name__: measure(options.rounds, make) for make in (small_network, llama)}
    for name, figures in results.items():
        share = (figures["guards"] + figures["tensors"]) / figures["step"]
        parts = ", ".join(f"{part} {1e6 * time:,.0f} us" for part, time in figures.items())
        print(f"{name:14} {parts}: {share:.2%} of a step")
    if options.name:
        path = Path(__file__).parent / "results" / f"{options.name}.json"
        path.write_text(json.dumps(results, indent=2) + "\n")


if __name__ == "__main__":
    main()
