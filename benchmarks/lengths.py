"""Processor time of calls with lengths that have not been before, without a policy of lengths and with one.

    python benchmarks/lengths.py --layers 2 12

A BERT of width 64 trains in one process under ``single``, in batches of 4 rows. ``first`` is the first call of
``train_step``; ``next`` the median of calls with further lengths, each of which is compiled, with what of it captures
the graph, runs the passes and proves the program; ``again`` the median of calls with a length that was before; and
``padded`` the median of calls with new lengths that are padded to one that was before. All are seconds of one thread,
which other work on the machine disturbs less. Nothing is read from or written to a directory that ``SHARDGRAPH_CACHE``
names.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from collections import defaultdict
from types import FunctionType
from typing import Any

STAGES = ("capture", "lower", "prove")
COLUMNS = ("first", "next", *STAGES, "again", "padded")
NEXT = (17, 18, 19, 20, 21)


def measure(layers: int) -> dict[str, float]:
    """The figures of a model of so many layers."""
    import torch
    from transformers import BertConfig, BertForMaskedLM

    import shardgraph

    torch.set_num_threads(1)

    def build() -> Any:
        dropout = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
        sizes = {"vocab_size": 1000, "hidden_size": 64, "intermediate_size": 128, "num_attention_heads": 4}
        return BertForMaskedLM(BertConfig(num_hidden_layers=layers, **sizes, **dropout)).train()

    def seconds(sharded: Any, length: int) -> float:
        ids = torch.randint(1000, (4, length))
        start = time.process_time()
        sharded.train_step(input_ids=ids, attention_mask=torch.ones_like(ids), labels=ids)
        return time.process_time() - start

    sharded = shardgraph.compile(build(), "single", progress=False)
    stages = timed(*STAGES)
    found = {"first": seconds(sharded, 16)}
    stages.clear()
    found["next"] = statistics.median(seconds(sharded, length) for length in NEXT)
    found |= {name: statistics.median(stages[name]) for name in STAGES}
    found["again"] = statistics.median(seconds(sharded, length) for length in NEXT)
    lengths = shardgraph.Lengths({"input_ids": 0, "attention_mask": 0, "labels": -100}, multiple_of=32)
    sharded = shardgraph.compile(build(), "single", progress=False, lengths=lengths)
    seconds(sharded, 16)
    found["padded"] = statistics.median(seconds(sharded, length) for length in NEXT)
    return found


def timed(*names: str) -> dict[str, list[float]]:
    """The seconds of every call, from now on, of functions of shardgraph with these names."""
    seconds: dict[str, list[float]] = defaultdict(list)

    def wrapped(name: str, function: Any) -> Any:
        def timing(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return function(*args, **kwargs)
            finally:
                seconds[name].append(time.process_time() - start)

        return timing

    for room, module in list(sys.modules.items()):
        for name in names:
            function = getattr(module, name, None) if room.startswith("shardgraph.") else None
            if isinstance(function, FunctionType):
                setattr(module, name, wrapped(name, function))
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", nargs="+", type=int, default=[2, 12])
    options = parser.parse_args()
    os.environ["SHARDGRAPH_CACHE"] = "off"
    print(f"{'layers':>6}" + "".join(f"{name:>10}" for name in COLUMNS))
    for layers in options.layers:
        found = measure(layers)
        print(f"{layers:6d}" + "".join(f"{found[name]:10.3f}" for name in COLUMNS), flush=True)


if __name__ == "__main__":
    main()
