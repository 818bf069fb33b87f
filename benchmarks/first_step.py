"""Seconds of the first step of a Llama, with compilation, and of later ones, with no kernel of inductor on disk.

    python benchmarks/first_step.py --layers 4 16

``shardgraph`` compiles under ``single`` by ``backend="inductor"``, ``torch.compile`` the model itself; each in a
process of its own. The time of shardgraph's own capture and passes, before the first step, is not counted.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

CONTENDERS = ("shardgraph", "torch.compile")
LATER = 9  # steps


def measure(name: str, layers: int) -> tuple[float, float]:
    """Seconds of the first step, and the median of later ones."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, logging

    import shardgraph

    logging.set_verbosity_error()
    torch.manual_seed(0)
    sizes = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 4}
    model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, vocab_size=1024, use_cache=False, **sizes))
    ids = torch.randint(0, 1000, (4, 64))
    call = {"input_ids": ids, "labels": ids}
    compiled: Callable[..., torch.nn.Module]
    if name == "shardgraph":
        compiled = shardgraph.compile(model, "single", backend="inductor", example_kwargs=call, progress=False)
    else:
        compiled = torch.compile(model)

    def step() -> float:
        start = time.perf_counter()
        compiled(**call).loss.backward()
        return time.perf_counter() - start

    return step(), statistics.median(step() for _ in range(LATER))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, nargs="+", default=[4, 16])
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        first, later = measure(options.one[0], int(options.one[1]))
        print(f"{options.one[0]:>14} {options.one[1]:>3} layers: first step {first:.1f} s, later {later * 1e3:.0f} ms")
        return
    for layers in options.layers:
        for name in CONTENDERS:
            with tempfile.TemporaryDirectory() as folder:
                command = [sys.executable, __file__, "--one", name, str(layers)]
                subprocess.run(command, env={**os.environ, "TORCHINDUCTOR_CACHE_DIR": folder}, check=True)


if __name__ == "__main__":
    main()
