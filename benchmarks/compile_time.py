"""Time and memory of capture, rewrite, split and check for Llama at ``meta``, as its layers grow.

    python benchmarks/compile_time.py 8 16 32
    python benchmarks/compile_time.py 32 --plan fsdp+tp --mesh dp=8 tp=8

Every measurement is a process of its own, so that memory is its own; sizes take turns, so that a machine whose
speed drifts is fair to all, and medians of the rounds are shown.
"""

from __future__ import annotations

import argparse
import itertools
import json
import resource
import statistics
import subprocess
import sys
import time


def measure(layers: int, plan: str, mesh: dict[str, int]) -> dict[str, float]:
    """Seconds by stage, MiB added to the process, and nodes, of one compilation."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, logging

    from shardgraph import preset
    from shardgraph.passes.lowering import build_program

    logging.set_verbosity_error()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=False)).train()
    ids = torch.zeros(1, 512, dtype=torch.long, device="meta")
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    marks: list[tuple[str, float]] = []
    program = build_program(
        model,
        preset(plan, mesh),
        (),
        {"input_ids": ids, "labels": ids},
        show=lambda stage: marks.append((stage, time.perf_counter())),
    )
    marks.append(("end", time.perf_counter()))
    figures = {name: after - at for (name, at), (_, after) in itertools.pairwise(marks)}
    figures["total"] = marks[-1][1] - marks[0][1]
    figures["MiB"] = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    figures["nodes"] = len(program.forward.graph.nodes) + len(program.backward.graph.nodes)
    return figures


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", type=int, default=[8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--plan", default="fsdp")
    parser.add_argument("--mesh", nargs="+", default=["dp=8"], help="sizes of axes, outermost first")
    parser.add_argument("--once", type=int, help=argparse.SUPPRESS)  # one measurement, as JSON
    options = parser.parse_args()
    if options.once:
        mesh = {axis: int(size) for axis, size in (each.split("=") for each in options.mesh)}
        print(json.dumps(measure(options.once, options.plan, mesh)))
        return
    seen: dict[int, list[dict[str, float]]] = {layers: [] for layers in options.layers}
    for _ in range(options.rounds):
        for layers in options.layers:
            command = [sys.executable, __file__, "--once", str(layers), "--plan", options.plan, "--mesh", *options.mesh]
            output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
            seen[layers].append(json.loads(output.splitlines()[-1]))
    columns = list(seen[options.layers[0]][0])
    print("layers" + "".join(f"{name:>10}" for name in columns))
    for layers, figures in seen.items():
        middle = [statistics.median(f[name] for f in figures) for name in columns]
        print(f"{layers:6d}" + "".join(f"{value:10.1f}" for value in middle))


if __name__ == "__main__":
    main()
