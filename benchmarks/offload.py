"""Step time and peak memory of one device with parameters on it, in host memory and on disk; predicted beside measured.

    python benchmarks/offload.py --name offload-gpt2

GPT-2 trains with AdamW on one rank of one CPU thread, where host memory is memory of the same machine and threads copy.
Bytes of device and host are counted operation by operation (``shardgraph.runtime.measure.PeakMemory``). Contenders take
turns, so that the machine's changes of speed are everybody's.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import GPT2Config, GPT2LMHeadModel
from transformers.utils import logging

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardgraph
from shardgraph import Cluster, Offload
from shardgraph.report.analysis import analyze_program
from shardgraph.runtime.measure import PeakMemory


class Contender:
    """A way to train, and what it takes."""

    def __init__(self, name: str, model: torch.nn.Module, call: dict[str, torch.Tensor], **options: Any) -> None:
        self.name, self.call = name, call
        self.sharded = shardgraph.compile(copy.deepcopy(model), "single", example_kwargs=call, **options)
        self.optimizer = torch.optim.AdamW(self.sharded.parameters(), lr=1e-4)
        self.losses: list[float] = []
        self.times: list[float] = []
        self.step()  # makes the optimizer's state
        states = [value for state in self.optimizer.state.values() for value in state.values()]
        held = [*self.sharded.parameters(), *self.sharded.buffers(), *call.values()]
        with PeakMemory().track(held).track(states, host="offload" in options) as self.memory:
            self.step()
        self.times.clear()

    def step(self) -> None:
        started = time.perf_counter()
        loss = self.sharded(**self.call).loss
        loss.backward()
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.times.append(time.perf_counter() - started)
        self.losses.append(loss.item())

    def figures(self, cluster: Cluster) -> dict[str, Any]:
        predicted = analyze_program(self.sharded.program, cluster)
        return {
            "name": self.name,
            "predicted": {"device": predicted.peak_memory, "host": predicted.host_memory, "step": predicted.time.total},
            "device": self.memory.peak_bytes,
            "host": self.memory.host_peak_bytes,
            "seconds": statistics.median(self.times),
            "times": self.times,
            "copies": predicted.summary()["copies"],
            "losses": self.losses,
        }


def measured(options: argparse.Namespace, folder: str) -> list[dict[str, Any]]:
    config = GPT2Config(
        n_embd=options.width, n_layer=options.layers, n_head=options.width // 32, vocab_size=options.vocabulary,
        n_positions=options.length, use_cache=False, bos_token_id=0, eos_token_id=0,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config).train()
    ids = torch.randint(0, options.vocabulary, (options.batch, options.length))
    call = {"input_ids": ids, "labels": ids}
    contenders = [
        Contender("on the device", model, call),
        Contender("on the host", model, call, offload="parameters"),
        Contender("on the host, recompute", model, call, offload="parameters", recompute="full"),
        Contender("on disk", model, call, offload=Offload(parameters=True, disk=folder)),
    ]
    for _ in range(options.rounds):
        for contender in contenders:
            contender.step()
    cluster = Cluster.load(options.cluster)
    return [contender.figures(cluster) for contender in contenders]


def table(found: list[dict[str, Any]]) -> str:
    head = f"{'parameters':<24}{'device MiB':>11}{'predicted':>11}{'host MiB':>10}{'predicted':>11}"
    lines = [f"{head}{'step s':>9}{'predicted':>11}{'range s':>18}"]
    for each in found:
        predicted, times = each["predicted"], each["times"]
        device, device_predicted = each["device"] / 2**20, predicted["device"] / 2**20
        host, host_predicted = each["host"] / 2**20, predicted["host"] / 2**20
        cells = f"{device:>11.1f}{device_predicted:>11.1f}{host:>10.1f}{host_predicted:>11.1f}"
        spread = f"{min(times):.3f} to {max(times):.3f}"
        lines.append(f"{each['name']:<24}{cells}{each['seconds']:>9.3f}{predicted['step']:>11.3f}{spread:>18}")
    losses = zip(*(each["losses"] for each in found), strict=True)
    apart = max((max(step) - min(step)) / min(step) for step in losses)
    return "\n".join([*lines, f"losses of a step differ by {apart:.1e} at most: on the host, kernels round otherwise"])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--name", default="latest", help="results/NAME.json is written")
    parser.add_argument("--cluster", help="a file of shardgraph calibrate; default: calibrate now, on one rank")
    parser.add_argument("--layers", type=int, default=12)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--vocabulary", type=int, default=2048)
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=9)
    options = parser.parse_args()
    logging.set_verbosity_error()
    torch.set_num_threads(1)
    results = Path(__file__).parent / "results"
    if options.cluster is None:
        options.cluster = str(results / f"{options.name}.yaml")
        shardgraph.calibrate(1).save(options.cluster)
    with tempfile.TemporaryDirectory() as folder:
        found = measured(options, folder)
    print(table(found))
    configuration = vars(options) | {"cluster": Path(options.cluster).name, "torch": torch.__version__}
    (results / f"{options.name}.json").write_text(
        json.dumps({"configuration": configuration, "contenders": found}, indent=1) + "\n"
    )


if __name__ == "__main__":
    main()
