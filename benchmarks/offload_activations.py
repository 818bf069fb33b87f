"""Peak memory and step time with activations in host memory, computed again, both or neither, on one CPU.

    python benchmarks/offload_activations.py --name offload-activations-gpt2

GPT-2 (``transformers``) trains with AdamW. All contenders run the same captured graph by the same executor from the
same weights; ``eager`` is the model without it. Every round takes one step of each in turn; medians are reported. Peaks
are bytes of live tensors (``shardgraph.runtime.measure.PeakMemory``), those of the host apart.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from recompute import gpt2, mib
from torch.utils._pytree import tree_leaves
from transformers import logging

import shardgraph
from shardgraph.capture.capture import capture
from shardgraph.cost_models.cluster import Cluster
from shardgraph.passes.lowering import lower
from shardgraph.plans.shards import named_shapes
from shardgraph.report.analysis import Analysis, analyze_program
from shardgraph.runtime.autograd import Differentiable
from shardgraph.runtime.executor import State
from shardgraph.runtime.measure import PeakMemory

CONTENDERS = {
    "keep everything": {},
    "offload": {"offload": shardgraph.Offload(activations=True)},
    "recompute": {"recompute": "full"},
    "both": {"offload": shardgraph.Offload(activations=True), "recompute": "full"},
}


@dataclass
class Contender:
    """A way to train. Learning rates are 0, so that all have the same weights."""

    name: str
    loss: Callable[[], torch.Tensor]
    model: torch.nn.Module
    predicted: Analysis | None = None
    device_bytes: int = 0
    host_bytes: int = 0
    times: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.0, weight_decay=0.0)

    def step(self) -> float:
        started = time.perf_counter()
        self.loss().backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        return time.perf_counter() - started

    def measure(self, inputs: list[torch.Tensor]) -> None:
        self.step()  # makes the optimizer's state
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        with PeakMemory().track([*self.model.parameters(), *self.model.buffers(), *states, *inputs]) as memory:
            self.step()
        self.device_bytes, self.host_bytes = memory.peak_bytes, memory.host_peak_bytes

    def figures(self) -> dict[str, Any]:
        predicted = self.predicted
        return {
            "name": self.name,
            "predicted_bytes": predicted and predicted.peak_memory,
            "measured_bytes": self.device_bytes,
            "predicted_host_bytes": predicted and predicted.host_memory,
            "measured_host_bytes": self.host_bytes,
            "predicted_seconds": predicted and predicted.time.total,
            "seconds": statistics.median(self.times),
            "times": self.times,
        }


def compare(options: argparse.Namespace) -> list[dict[str, Any]]:
    torch.manual_seed(0)
    model = gpt2(options)
    ids = torch.randint(options.vocabulary, (options.batch, options.length))
    call = {"input_ids": ids, "labels": ids}
    cluster = Cluster.load(options.cluster)
    joint = capture(model, (), call, device=torch.device("cpu"))
    state, leaves = State(model, None, torch.device("cpu")), tree_leaves(((), call))
    contenders = []
    for name, changes in CONTENDERS.items():
        program = lower(joint, replace(shardgraph.preset("single", ()), **changes), named_shapes(model))
        run = Differentiable(program, state)
        loss = lambda run=run: run(leaves, lambda: True).loss  # noqa: E731
        contenders.append(Contender(name, loss, model, analyze_program(program, cluster)))
    own = copy.deepcopy(model)
    contenders.append(Contender("eager", lambda: own(**call).loss, own))
    for each in contenders:
        each.measure([ids])
    for _ in range(options.rounds):
        for each in contenders:
            each.times.append(each.step())
    return [each.figures() for each in contenders]


def table(found: list[dict[str, Any]]) -> str:
    lines = [
        f"{'':<20}{'predicted':>10}{'measured':>10}{'host':>9}{'measured':>10}{'predicted s':>13}{'measured s':>12}"
    ]
    for each in found:
        cells = f"{mib(each['predicted_bytes']):>10}{mib(each['measured_bytes']):>10}"
        cells += f"{mib(each['predicted_host_bytes']):>9}{mib(each['measured_host_bytes']):>10}"
        predicted = "" if each["predicted_seconds"] is None else f"{each['predicted_seconds']:.3f}"
        lines.append(f"{each['name']:<20}{cells}{predicted:>13}{each['seconds']:>12.3f}")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="latest", help="results/NAME.json is written")
    parser.add_argument("--cluster", help="a file of shardgraph calibrate; default: calibrate now, on one rank")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--vocabulary", type=int, default=512)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--rounds", type=int, default=11)
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    results = Path(__file__).parent / "results"
    if options.cluster is None:
        options.cluster = str(results / f"{options.name}.yaml")
        shardgraph.calibrate(1).save(options.cluster)
    found = compare(options)
    print(table(found))
    configuration = vars(options) | {"cluster": Path(options.cluster).name, "torch": torch.__version__}
    text = json.dumps({"configuration": configuration, "contenders": found}, indent=1)
    (results / f"{options.name}.json").write_text(text + "\n")


if __name__ == "__main__":
    main()
