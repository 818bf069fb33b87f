"""What the checks cost: seconds of the symbolic proof and of ``verify`` beside those of the compilation.

    python benchmarks/checks.py --name checks-cpu

Compilation is capture, search and lowering; ``verify`` is all of it, its own compilation and proof included.
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
from proof import SEEN, time_proofs
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM, logging

import shardgraph

IDS = torch.randint(0, 1024, (8, 64))


def llama(layers: int) -> LlamaForCausalLM:
    """Llama of width 256."""
    sizes = {"hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8, "num_key_value_heads": 4}
    return LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, vocab_size=1024, use_cache=False, **sizes))


def gpt2(layers: int) -> GPT2LMHeadModel:
    """GPT-2 of width 256."""
    config = GPT2Config(n_layer=layers, n_embd=256, n_head=8, vocab_size=1024, use_cache=False)
    return GPT2LMHeadModel(config).eval()


CASES: list[tuple[str, Callable[[int], Any], int, str, dict[str, int]]] = [
    ("GPT-2, 4 layers", gpt2, 4, "fsdp", {"dp": 2}),
    ("Llama, 4 layers", llama, 4, "fsdp", {"dp": 2}),
    ("Llama, 4 layers", llama, 4, "fsdp+tp", {"dp": 2, "tp": 2}),
    ("Llama, 4 layers", llama, 4, "pp+fsdp", {"pp": 2, "dp": 2}),
    ("Llama, 16 layers", llama, 16, "fsdp+tp", {"dp": 2, "tp": 2}),
]


def measure(make: Callable[[int], Any], layers: int, plan: str, mesh: dict[str, int], rounds: int) -> dict[str, float]:
    """Medians over rounds."""
    model, call = make(layers), {"input_ids": IDS, "labels": IDS}
    seen: dict[str, list[float]] = {"compile": [], "prove": [], "verify": []}
    for _ in range(rounds):
        start = time.perf_counter()
        assert shardgraph.prove(model, plan=plan, mesh=mesh, example_kwargs=call).ok
        seen["compile"].append(time.perf_counter() - start - SEEN[-1])
        seen["prove"].append(SEEN[-1])
        start = time.perf_counter()
        report = shardgraph.verify(model, plan=plan, mesh=mesh, example_kwargs=call)
        seen["verify"].append(time.perf_counter() - start)
        assert report.ok, report
    return {name: statistics.median(values) for name, values in seen.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--name", help="also write benchmarks/results/NAME.json")
    options = parser.parse_args()
    logging.set_verbosity_error()
    time_proofs()
    rows = []
    for name, make, layers, plan, mesh in CASES:
        seconds = measure(make, layers, plan, mesh, options.rounds)
        rows.append({"model": name, "plan": plan, **{key: round(value, 3) for key, value in seconds.items()}})
        print(f"| {name} | `{plan}` | " + " | ".join(f"{value:.2f}" for value in seconds.values()) + " |", flush=True)
    if options.name:
        path = Path(__file__).parent / "results" / f"{options.name}.json"
        path.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
