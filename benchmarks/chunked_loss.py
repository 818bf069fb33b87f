"""Peak memory and time of a step whose loss is computed in chunks, beside all scores at once, on one CPU.

    python benchmarks/chunked_loss.py --name chunked-loss

A GPT-2 (``transformers``) with the vocabulary of GPT-2 trains with AdamW in single precision by ``train_step``. Every
round takes one step of each contender in turn; medians are reported. Peaks are bytes of live tensors
(``shardgraph.runtime.measure.PeakMemory``) with parameters and states; the largest difference of any gradient
from that of all scores at once is relative to the largest element of that gradient.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, logging

import shardgraph
from shardgraph.report.step import program_memory
from shardgraph.runtime.measure import PeakMemory

CHUNKS = (None, "64MiB", "32MiB", "16MiB", "8MiB")


class Contender:
    """The model compiled with one size of chunks."""

    def __init__(self, model: nn.Module, chunk: str | None, call: dict[str, torch.Tensor]) -> None:
        self.chunk, self.call, self.seconds = chunk, call, list[float]()
        self.model: Any = shardgraph.compile(copy.deepcopy(model), "single", loss_chunk=chunk, progress=False)
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0)
        self.step()
        self.gradients = [parameter.grad.clone() for parameter in self.model.parameters()]
        self.optimizer.step()
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        self.optimizer.zero_grad()
        with PeakMemory().track([*self.model.parameters(), *self.model.buffers(), *states, *call.values()]) as memory:
            self.step()
            self.optimizer.step()
        self.measured = memory.peak_bytes
        self.predicted = program_memory(self.model.program, "adamw").peak_bytes
        self.note = self.model.program.notes[-1] if chunk else ""
        self.optimizer.zero_grad()

    def step(self) -> None:
        """Forward, the loss and backward."""
        self.model.train_step(**self.call)

    def timed(self) -> None:
        """A step with its update, whose time is added to the others."""
        started = time.perf_counter()
        self.step()
        self.optimizer.step()
        self.seconds.append(time.perf_counter() - started)
        self.optimizer.zero_grad()

    def difference(self, other: Contender) -> float:
        """How far the gradients are from another's."""
        pairs = zip(self.gradients, other.gradients, strict=True)
        return max(float((ours - theirs).abs().max() / theirs.abs().max()) for ours, theirs in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="latest", help="results/NAME.json is written")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    config = GPT2Config(n_layer=options.layers, n_embd=options.width, n_head=4, use_cache=False)
    model = GPT2LMHeadModel(config).train()
    for module in model.modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
    ids = torch.randint(config.vocab_size, (options.tokens // 512, 512))
    contenders = [Contender(model, chunk, {"input_ids": ids, "labels": ids}) for chunk in CHUNKS]
    for _ in range(options.rounds):
        for contender in contenders:
            contender.timed()
    whole = contenders[0]
    rows = [
        {
            "chunk": each.chunk or "all at once",
            "predicted_bytes": each.predicted,
            "measured_bytes": each.measured,
            "seconds": statistics.median(each.seconds),
            "range": [min(each.seconds), max(each.seconds)],
            "gradient_difference": each.difference(whole),
            "note": each.note,
        }
        for each in contenders
    ]
    print(
        "| scores | predicted MiB | measured MiB | | step ms | range | | gradients |\n|---|---|---|---|---|---|---|---|"
    )
    for row in rows:
        low, high = (f"{1000 * seconds:.0f}" for seconds in row["range"])
        print(
            f"| {row['chunk']} | {row['predicted_bytes'] / 2**20:.1f} | {row['measured_bytes'] / 2**20:.1f} "
            f"| {row['measured_bytes'] / rows[0]['measured_bytes']:.2f} | {1000 * row['seconds']:.0f} "
            f"| {low} to {high} | {row['seconds'] / rows[0]['seconds']:.2f} | {row['gradient_difference']:.1e} |"
        )
    results = Path(__file__).parent / "results" / f"{options.name}.json"
    configuration = vars(options) | {"torch": torch.__version__, "vocabulary": config.vocab_size}
    results.write_text(json.dumps({"configuration": configuration, "contenders": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
