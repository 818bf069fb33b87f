"""Processor time of compiling Llama at ``meta`` for 64 ranks: of capturing its graph, of all else, and of its proof.

    python benchmarks/compile_time.py 8 16 32
    python benchmarks/compile_time.py 32 --cases auto --name compile-time
    python benchmarks/compile_time.py 32 --cases fsdp --warm
    python benchmarks/compile_time.py 32 --cases fsdp --cache

With ``--cache`` every layer returns its keys and values for a cache, as models of ``transformers`` do unless they are
told not to.

Nothing is read from or written to a directory that ``SHARDGRAPH_CACHE`` names. With ``--warm`` every measurement is
followed by another one, in a process of its own, that finds on disk what the first has left in a new directory.

The cases are ``fsdp`` on 64 ranks, ``fsdp+tp`` on 8 x 8 and ``auto`` on 8 x 8. This process is rank 0 of a process
group that communicates nothing. Every measurement is a process of its own, so that memory is its own; cases and sizes
take turns, so that a machine whose speed drifts is fair to all, and medians of the rounds are shown. Only the public
interface is used: to measure another version, run this file with the Python of an environment that has it.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import FunctionType
from typing import Any

CASES = {"fsdp": {"dp": 64}, "fsdp+tp": {"dp": 8, "tp": 8}, "auto": {"dp": 8, "tp": 8}}
COLUMNS = ("capture s", "captures", "else s", "total s", "proof s", "MiB", "nodes")


def measure(layers: int, plan: str, cache: bool) -> dict[str, float]:
    """Processor seconds of captures, all else and the proof, MiB added, and nodes, of one compilation."""
    import torch
    import torch.distributed as dist
    from torch.testing._internal.distributed.fake_pg import FakeStore
    from transformers import LlamaConfig, LlamaForCausalLM, logging

    import shardgraph

    logging.set_verbosity_error()
    torch.set_num_threads(1)  # others would wait in processor time
    dist.init_process_group("fake", rank=0, world_size=64, store=FakeStore())
    axes = CASES[plan]
    mesh = dist.device_mesh.init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(num_hidden_layers=layers, use_cache=cache)).train()
    ids = torch.zeros(1, 512, dtype=torch.long, device="meta")
    compile_model = shardgraph.compile  # which loads it
    captures = time_captures()
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    sharded = compile_model(
        model,
        plan,
        mesh=mesh,
        example_kwargs={"input_ids": ids, "labels": ids},
        cluster="H100",
        initialize=False,
        progress=False,
    )
    total, program = time.process_time() - start, sharded.program
    memory = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before
    start = time.process_time()
    assert shardgraph.prove(program).ok
    proved = time.process_time() - start
    figures = (
        sum(captures),
        len(captures),
        total - sum(captures),
        total,
        proved,
        memory / 1024,
        len(program.forward.graph.nodes) + len(program.backward.graph.nodes),
    )
    return dict(zip(COLUMNS, figures, strict=True))


def time_captures() -> list[float]:
    """A list that gets the processor seconds of every capture from now on."""
    seconds: list[float] = []

    def timed(capture: Any) -> Any:
        def wrapped(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            try:
                return capture(*args, **kwargs)
            finally:
                seconds.append(time.process_time() - start)

        return wrapped

    for name, module in list(sys.modules.items()):  # wherever this version calls it from
        capture = getattr(module, "capture", None) if name.startswith("shardgraph") else None
        if isinstance(capture, FunctionType):
            module.capture = timed(capture)  # type: ignore[attr-defined]
    return seconds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("layers", nargs="*", type=int, default=[8, 16, 32])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--name", help="write the figures of all rounds to benchmarks/results/NAME.json")
    parser.add_argument("--warm", action="store_true", help="also the second start, which reads from disk")
    parser.add_argument("--cache", action="store_true", help="of a model that returns keys and values for a cache")
    parser.add_argument("--once", help=argparse.SUPPRESS)  # one measurement of this case, as JSON
    options = parser.parse_args()
    if options.once:
        print(json.dumps(measure(options.layers[0], options.once, options.cache)))
        return
    starts = ("cold", "warm") if options.warm else ("cold",)
    runs = [(case, layers) for case in options.cases for layers in options.layers]
    seen: dict[tuple[str, int, str], list[dict[str, float]]] = {(*run, start): [] for run in runs for start in starts}
    for _ in range(options.rounds):
        for case, layers in runs:
            with tempfile.TemporaryDirectory() as cache:
                environment = os.environ | {"SHARDGRAPH_CACHE": cache if options.warm else "off"}
                for start in starts:
                    command = [sys.executable, __file__, str(layers), "--once", case]
                    command += ["--cache"] * options.cache
                    output = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
                    seen[case, layers, start].append(json.loads(output.stdout.splitlines()[-1]))
    print(f"{'plan':8}{'layers':>6}{'start':>6}" + "".join(f"{name:>11}" for name in COLUMNS))
    for (case, layers, start), figures in seen.items():
        middle = [statistics.median(each[name] for each in figures) for name in COLUMNS]
        print(f"{case:8}{layers:6d}{start:>6}" + "".join(f"{value:11.2f}" for value in middle))
    if options.name:
        rows = [
            {"plan": case, "layers": layers, "start": start, "rounds": figures}
            for (case, layers, start), figures in seen.items()
        ]
        path = Path(__file__).parent / "results" / f"{options.name}.json"
        path.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
