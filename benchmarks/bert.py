"""FairScale's claim for FSDP, twice as fast with 75% less memory on BERT-Large, predicted and measured.

    python benchmarks/bert.py --name bert-2-ranks

Predicted: BERT-Large, sequences of 128 tokens, AdamW in single precision, on 8 V100 of 32 GB: bytes of parameters,
gradients and optimizer state of a rank under DDP and under plans, the largest batch that fits beside them, and samples
per second with it. Measured: a BERT of two layers of the same kind on 2 gloo ranks, where the memory is what DDP needs
for a batch of 4: the plans' largest batches are predicted, trained, and their peaks and steps measured; torch's DDP
takes its batch of 4 in turn with them.
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
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from transformers import BertConfig, BertForMaskedLM

import shardgraph
from shardgraph.runtime.measure import PeakMemory
from shardgraph.sizes import format_bytes

PLANS = ["ddp", "zero1", "zero2", "fsdp", "fsdp, recomputed"]
LARGE = {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "intermediate_size": 4096}
SMALL = {"hidden_size": 512, "num_hidden_layers": 2, "num_attention_heads": 8, "intermediate_size": 2048}


def bert(sizes: dict[str, int]) -> nn.Module:
    """A BERT without dropout, with its usual vocabulary."""
    torch.manual_seed(0)
    return BertForMaskedLM(BertConfig(**sizes, hidden_dropout_prob=0, attention_probs_dropout_prob=0))


def batch(rows: int, length: int, device: str = "cpu") -> dict[str, torch.Tensor]:
    """Token ids, each its own label."""
    generator = torch.Generator().manual_seed(rows)
    ids = torch.randint(0, 30522, (rows, length), generator=generator).to(device)
    return {"input_ids": ids, "labels": ids}


def options(plan: str) -> dict[str, Any]:
    """The plan, and recomputation, of a line of the tables."""
    name, _, recomputed = plan.partition(", ")
    return {"plan": name, "recompute": "full" if recomputed else "none"}


def predicted() -> list[dict[str, Any]]:
    """BERT-Large on 8 V100."""
    with torch.device("meta"):
        model = bert(LARGE)
    found = []
    for plan in PLANS:
        given = {**options(plan), "mesh": {"dp": 8}, "cluster": "V100"}

        def analysis(rows: int, given: Any = given) -> shardgraph.Analysis:
            return shardgraph.analyze(model, example_kwargs=batch(rows, 128, "meta"), **given)

        rows = analysis(2).max_batch()
        largest = analysis(rows)
        held = largest.rows[-1].memory
        states = sum(held[kind] for kind in ("parameters", "gradients", "optimizer state"))
        speed = 8 * rows / largest.time.total
        found.append({"plan": plan, "states": states, "batch": rows, "samples_per_second": speed})
    return found


def measured(length: int, rounds: int) -> dict[str, Any]:
    """Batches, peaks and steps of this rank, all contenders in turn."""
    steps: dict[str, tuple[int, Callable[[], None], list[torch.Tensor]]] = {"torch's DDP": (4, *_torch(length))}
    budget = shardgraph.analyze(bert(SMALL), example_kwargs=batch(4, length), plan="ddp", mesh={"dp": 2}).peak_memory
    for plan in PLANS:
        analysis = shardgraph.analyze(bert(SMALL), example_kwargs=batch(2, length), mesh={"dp": 2}, **options(plan))
        rows = analysis.max_batch(budget)
        steps[plan] = (rows, *_ours(options(plan), rows, length))
    found: dict[str, Any] = {"budget": budget}
    for name, (rows, step, held) in steps.items():
        step()
        with PeakMemory().track(held) as memory:
            step()
        found[name] = {"batch": rows, "peak": memory.peak_bytes, "states": sum(map(_bytes, held)), "seconds": []}
    for _ in range(rounds):
        for name, (_, step, _) in steps.items():
            dist.barrier()
            start = time.perf_counter()
            step()
            dist.barrier()
            found[name]["seconds"].append(time.perf_counter() - start)
    return found


def _torch(length: int) -> tuple[Callable[[], None], list[torch.Tensor]]:
    model = DistributedDataParallel(bert(SMALL))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    inputs = batch(4, length)

    def step() -> None:
        optimizer.zero_grad()
        model(**inputs).loss.backward()
        optimizer.step()

    step()
    return step, _held(model, optimizer, inputs)


def _ours(given: dict[str, Any], rows: int, length: int) -> tuple[Callable[[], None], list[torch.Tensor]]:
    sharded = shardgraph.compile(bert(SMALL), **given)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-4)
    inputs = batch(rows, length)

    def step() -> None:
        sharded.train_step(**inputs)
        optimizer.step()
        optimizer.zero_grad()

    step()
    return step, _held(sharded, optimizer, inputs)


def _held(model: nn.Module, optimizer: torch.optim.Optimizer, inputs: dict[str, torch.Tensor]) -> list[torch.Tensor]:
    states = [value for state in optimizer.state.values() for value in state.values()]
    return [each for each in (*model.parameters(), *model.buffers(), *states, *inputs.values())]


def _bytes(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="latest", help="results/NAME.json is written")
    parser.add_argument("--length", type=int, default=32, help="tokens of a sequence that is measured")
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    large = predicted()
    print("| BERT-Large, 8 V100 | states | batch of a rank | samples/s |")
    for line in large:
        states = format_bytes(line["states"])
        print(f"| `{line['plan']}` | {states} | {line['batch']} | {line['samples_per_second']:.0f} |")
    ranks = shardgraph.launch(measured, 2, args=(arguments.length, arguments.rounds), timeout=1500)
    budget = ranks[0].pop("budget")
    print(f"| BERT, 2 layers, within {format_bytes(budget)} | held | batch of a rank | peak | samples/s |")
    for name, figures in ranks[0].items():
        figures["samples_per_second"] = 2 * figures["batch"] / statistics.median(figures.pop("seconds"))
        sizes = f"{format_bytes(figures['states'])} | {figures['batch']} | {format_bytes(figures['peak'])}"
        print(f"| `{name}` | {sizes} | {figures['samples_per_second']:.2f} |")
    path = Path(__file__).parent / "results" / f"{arguments.name}.json"
    path.write_text(json.dumps({"predicted": large, "budget": budget, "measured": ranks[0]}, indent=1) + "\n")


if __name__ == "__main__":
    main()
