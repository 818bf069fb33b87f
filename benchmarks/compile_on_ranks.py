"""Seconds and processor seconds of compiling a small Llama under ``fsdp`` on real ranks, one thread each.

    python benchmarks/compile_on_ranks.py --ranks 2 4 --layers 8 --rounds 3

Only the public interface is used: to measure another version, run this file with the Python of an environment that has
it. Ranks start with torch and transformers loaded; what shardgraph loads at its first call counts.
"""

from __future__ import annotations

import argparse
import statistics
import time

import torch
import torch.distributed as dist
from transformers import LlamaConfig, LlamaForCausalLM

import shardgraph

SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 256, "num_attention_heads": 4}


def compiled(layers: int) -> tuple[float, float]:
    """Seconds until all ranks have compiled, and this rank's processor seconds."""
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, num_hidden_layers=layers, use_cache=False))
    ids = torch.zeros(2, 32, dtype=torch.long)
    dist.barrier()
    start, processor = time.perf_counter(), time.process_time()
    shardgraph.compile(model, "fsdp", example_kwargs={"input_ids": ids, "labels": ids}, progress=False)
    own = time.process_time() - processor
    dist.barrier()
    return time.perf_counter() - start, own


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    print(f"{'ranks':>5}{'seconds':>10}{'processor seconds of all':>26}")
    for ranks in options.ranks:
        rounds = [shardgraph.launch(compiled, ranks, args=(options.layers,)) for _ in range(options.rounds)]
        seconds = statistics.median(max(wall for wall, _ in each) for each in rounds)
        processor = statistics.median(sum(own for _, own in each) for each in rounds)
        print(f"{ranks:5d}{seconds:10.1f}{processor:26.1f}")


if __name__ == "__main__":
    main()
