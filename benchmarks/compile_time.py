"""Time and memory of capture, rewrite, split and check for Llama at ``meta``, as its layers grow.

python benchmarks/compile_time.py 8 16 32
"""

from __future__ import annotations

import resource
import subprocess
import sys
import time


def measure(layers: int) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, logging

    from shardgraph import preset
    from shardgraph.compiler import build_program

    logging.set_verbosity_error()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False)).train()
    ids = torch.zeros(1, 512, dtype=torch.long, device="meta")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    started = time.perf_counter()
    marks: list[tuple[str, float]] = []
    kwargs = {"input_ids": ids, "labels": ids}
    program = build_program(
        model, preset("fsdp", {"dp": 8}), (), kwargs, show=lambda stage: marks.append((stage, time.perf_counter()))
    )
    ended = time.perf_counter()
    memory = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    spans = zip(marks, [*marks[1:], ("", ended)], strict=True)
    stages = ", ".join(f"{name} {after - at:.1f}" for (name, at), (_, after) in spans)
    nodes = len(program.forward.graph.nodes) + len(program.backward.graph.nodes)
    print(f"{layers:3d} layers: {ended - started:6.1f} s ({stages}), {nodes} nodes, {memory:.0f} MiB", flush=True)


if __name__ == "__main__":
    if len(sys.argv) == 2:
        measure(int(sys.argv[1]))
    else:  # each in a process of its own, so that memory is its own
        for count in sys.argv[1:]:
            subprocess.run([sys.executable, __file__, count], check=True)
