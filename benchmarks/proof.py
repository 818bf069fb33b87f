"""Time and memory of the symbolic proof of a training step of Llama 3 405B on 16,384 devices, beside its compilation.

    python benchmarks/proof.py                      # 126 layers, five axes
    python benchmarks/proof.py --layers 8 --axes dp_replicate=2,dp=8,tp=8

The model is on ``meta``. Sizes as in Grattafiori et al., 2024, "The Llama 3 herd of models", table 3
(https://arxiv.org/abs/2407.21783); sequences of 8,192 tokens, one per microbatch and data-parallel rank.
"""

from __future__ import annotations

import argparse
import math
import resource
import sys
import time
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, logging

import shardgraph

SIZES = {"hidden_size": 16384, "intermediate_size": 53248, "num_attention_heads": 128, "num_key_value_heads": 8}
WORDS, SEQUENCE = 128256, 8192
AXES = "pp=16,dp_replicate=2,dp=8,cp=8,tp=8"
SEEN: list[float] = []


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--layers", type=int, default=126)
    parser.add_argument("--axes", default=AXES)
    options = parser.parse_args()
    axes = {name: int(size) for name, size in (each.split("=") for each in options.axes.split(","))}
    logging.set_verbosity_error()
    with torch.device("meta"):
        model = LlamaForCausalLM(
            LlamaConfig(vocab_size=WORDS, num_hidden_layers=options.layers, use_cache=False, rope_theta=5e5, **SIZES)
        )
    time_proofs()
    start = time.perf_counter()
    proof = shardgraph.prove(model, plan=plan_of(axes), mesh=axes, cluster="H100", **of_call(axes, options.layers))
    total = time.perf_counter() - start
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(proof)
    print(
        f"{options.layers} layers on {math.prod(axes.values()):,} devices: capture, search and lowering "
        f"{total - sum(SEEN):.1f} s, proof {sum(SEEN):.1f} s, {gib:.1f} GiB at most"
    )


def plan_of(axes: dict[str, int]) -> str:
    """The preset for these axes."""
    data = "hsdp" if "dp_replicate" in axes else "fsdp"
    return "+".join(["pp"] * ("pp" in axes) + [data] + [axis for axis in ("cp", "tp") if axis in axes])


def of_call(axes: dict[str, int], layers: int) -> dict[str, Any]:
    """Inputs, and equal stages."""
    stages = axes.get("pp", 1)
    microbatches = 2 * stages if stages > 1 else 1
    ids = torch.empty(microbatches, SEQUENCE, dtype=torch.long, device="meta")
    call: dict[str, Any] = {"example_kwargs": {"input_ids": ids, "labels": ids}}
    if stages > 1:
        begins = tuple(f"model.layers.{i * layers // stages}" for i in range(1, stages))
        call["pipeline"] = shardgraph.Pipeline(stages=begins, microbatches=microbatches)
    return call


def time_proofs() -> None:
    """Measure the seconds of proofs."""
    module = sys.modules["shardgraph.api.prove"]
    prove = module.proved

    def timed(program: Any) -> Any:
        start = time.perf_counter()
        proof = prove(program)
        SEEN.append(time.perf_counter() - start)
        return proof

    module.proved = timed


if __name__ == "__main__":
    main()
