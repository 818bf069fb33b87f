"""Sequence and tensor parallelism: a step beside torch's ``parallelize_module``, and what steps are predicted to take.

    python benchmarks/tensor_parallel.py --batch 4 --length 256     # ranks over gloo, in turns, medians of rounds
    python benchmarks/tensor_parallel.py predicted                  # layers of Llama and GPT on H100
    python benchmarks/tensor_parallel.py long                       # beside context parallelism, on H100

The first trains a decoder with its operators and sequences divided over two ranks: ``tp+sp`` here, and there the styles
of torch's tutorial on tensor parallelism (columns, rows, and norms along the sequence). Both have the same weights and
data, and their last losses are shown. The second prints ``fsdp+tp+sp`` of four layers on 8 x ``tp`` H100, compiled by
inductor, with nothing recomputed: the figures by which weights of prices in ``passes/sharding/pricing.py`` were chosen.
The third prints whole models with long sequences, ``fsdp+cp+tp`` beside ``fsdp+cp+tp+sp``.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import time
from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

sys.path.insert(0, str(Path(__file__).parents[1]))

import shardgraph
from benchmarks.published.decoder import Decoder, Shape
from benchmarks.ratios import ratio

RANKS, VOCABULARY, PORT = 2, 4096, 29735
TRAINED = Shape(4, 512, 8, 8, 1536, VOCABULARY, mlp="swiglu", classic=False)
PREDICTED = {
    "Llama 8B": Shape(4, 4096, 32, 8, 14336, 128256, mlp="swiglu", classic=False),
    "Llama 70B": Shape(4, 8192, 64, 8, 28672, 128256, mlp="swiglu", classic=False),
    "GPT 1.7B": Shape(4, 2304, 24, 24, 9216, 51200),
    "GPT 22B": Shape(4, 6144, 64, 64, 24576, 51200),
}
LAYOUTS = ((1, 8192, 8), (2, 4096, 8), (4, 4096, 8), (4, 2048, 4), (2, 4096, 2), (1, 32768, 8))
"""Sequences of a microbatch, their length, and ranks that divide operators."""
LONG = (("Llama 8B", 32768, 2, 4), ("Llama 8B", 131072, 4, 8), ("Llama 70B", 65536, 4, 8), ("Llama 70B", 131072, 8, 8))
"""Models, the length of a sequence, and ranks that divide it and operators."""
DEPTHS = {"Llama 8B": 32, "Llama 70B": 80}


def parallelized(model: Decoder, mesh: DeviceMesh) -> nn.Module:
    """The decoder with DTensors, as torch's tutorial has it."""
    along, whole = Shard(1), Replicate()
    gathered = PrepareModuleInput(input_layouts=(along,), desired_input_layouts=(whole,))
    parallelize_module(
        model,
        mesh,
        {
            "embedding": RowwiseParallel(input_layouts=whole, output_layouts=along),
            "norm": SequenceParallel(),
            "head": ColwiseParallel(input_layouts=along, output_layouts=whole),
        },
    )
    for layer in model.layers:
        columns = ("attention.query", "attention.key", "attention.value", "mlp.gate", "mlp.up")
        parallelize_module(
            layer,
            mesh,
            {
                **dict.fromkeys(("attention_norm", "mlp_norm"), SequenceParallel()),
                **dict.fromkeys(("attention", "mlp"), gathered),
                **dict.fromkeys(columns, ColwiseParallel()),
                **dict.fromkeys(("attention.out", "mlp.down"), RowwiseParallel(output_layouts=along)),
            },
        )
    return model


def train(rank: int, options: argparse.Namespace) -> None:
    """Steps of both in turns, on one rank."""
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(PORT))
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,), mesh_dim_names=("tp",))
    torch.manual_seed(0)
    call = tuple(torch.randint(0, VOCABULARY, (options.batch, options.length)) for _ in range(2))
    state = Decoder(TRAINED).state_dict()
    ours, theirs = Decoder(TRAINED), Decoder(TRAINED)
    for model in (ours, theirs):
        model.load_state_dict(state)
    models = {
        "parallelize_module": parallelized(theirs, mesh),
        "shardgraph tp+sp": shardgraph.compile(ours, "tp+sp", mesh=mesh, example_inputs=call, progress=False),
    }
    optimizers = {name: torch.optim.AdamW(model.parameters(), lr=1e-4) for name, model in models.items()}
    seconds: dict[str, list[float]] = {name: [] for name in models}
    losses: dict[str, float] = {}
    for number in range(options.rounds + 2):
        for name, model in models.items():
            dist.barrier()
            started = time.perf_counter()
            loss = model(*call)
            loss.backward()
            optimizers[name].step()
            optimizers[name].zero_grad()
            if number >= 2:
                seconds[name].append(time.perf_counter() - started)
            losses[name] = (loss.full_tensor() if isinstance(loss, DTensor) else loss).item()
    if rank == 0:
        for name, times in seconds.items():
            middle, low, high = ratio(times, seconds["parallelize_module"])
            print(
                f"{name:20}{1e3 * statistics.median(times):10.0f} ms"
                f"   {middle:.3f} [{low:.3f}, {high:.3f}] of parallelize_module   loss {losses[name]:.6f}"
            )
    dist.destroy_process_group()


def predicted(shape: Shape, batch: int, length: int, plan: str, mesh: dict[str, int]) -> str:
    """What a step of a model on H100 is predicted to take."""
    with torch.device("meta"):
        model, tokens = Decoder(shape), torch.empty(batch, length, dtype=torch.long)
    options = {"cluster": "H100", "precision": "bf16", "backend": "inductor", "recompute": "none"}
    found = shardgraph.analyze(model, (tokens, tokens), plan, mesh=mesh, **options)
    return f"{1e3 * found.time.total:10.1f}{1e3 * found.time.compute:12.1f}{found.peak_memory / 2**30:10.2f}"


def report_layers() -> None:
    """Four layers of models with ``fsdp+tp+sp``."""
    print(f"{'model':12}{'sequences':>12}{'length':>8}{'tp':>4}{'step ms':>10}{'compute ms':>12}{'peak GiB':>10}")
    for name, shape in PREDICTED.items():
        for batch, length, ranks in LAYOUTS:
            step = predicted(shape, batch, length, "fsdp+tp+sp", {"dp": 8, "tp": ranks})
            print(f"{name:12}{batch:12}{length:8}{ranks:4}{step}", flush=True)


def report_long() -> None:
    """Whole models with one long sequence, whose operators are divided beside it."""
    print(f"{'model':12}{'length':>8}{'cp':>4}{'tp':>4}  {'plan':16}{'step ms':>10}{'compute ms':>12}{'peak GiB':>10}")
    for name, length, cp, tp in LONG:
        shape = replace(PREDICTED[name], layers=DEPTHS[name])
        for plan in ("fsdp+cp+tp", "fsdp+cp+tp+sp"):
            step = predicted(shape, 1, length, plan, {"dp": 8, "cp": cp, "tp": tp})
            print(f"{name:12}{length:8}{cp:4}{tp:4}  {plan:16}{step}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", nargs="?", choices=("step", "predicted", "long"), default="step")
    parser.add_argument("--batch", type=int, default=4)
    parser.add_argument("--length", type=int, default=256)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    if options.what == "predicted":
        report_layers()
    elif options.what == "long":
        report_long()
    else:
        mp.spawn(train, (options,), nprocs=RANKS)


if __name__ == "__main__":
    main()
