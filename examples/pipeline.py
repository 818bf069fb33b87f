"""Train a model whose layers are on several ranks, as a pipeline of microbatches.

python examples/pipeline.py                                            # two ranks, one stage on each
python examples/pipeline.py --schedule zbv                             # two stages on each, in a V
python examples/pipeline.py --nproc 4 --plan pp+fsdp --mesh pp=2,dp=2  # each stage sharded over two ranks
torchrun --nproc-per-node 8 examples/pipeline.py --layers 32 --width 4096 --microbatches 32 --batch 64
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn

import shardgraph


def model_of(options: argparse.Namespace) -> nn.Module:
    layer = nn.TransformerEncoderLayer(options.width, 4, 4 * options.width, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, options.layers, enable_nested_tensor=False)


def batch_of(step: int, options: argparse.Namespace) -> tuple[torch.Tensor, torch.Tensor]:
    """Random sequences, ``[batch, length, width]``, and each one turned round."""
    batch = torch.randn(options.batch, options.length, options.width, generator=torch.Generator().manual_seed(step))
    return batch, batch.flip(2)


def train(options: argparse.Namespace) -> list[float]:
    """What each rank does; returns the loss of every step."""
    axes = (axis.split("=") for axis in (options.mesh or f"pp={dist.get_world_size()}").split(","))
    mesh = {name: int(size) for name, size in axes}
    torch.manual_seed(0)
    batch, target = batch_of(0, options)
    rows = options.batch // mesh.get("dp", 1)
    sharded = shardgraph.compile(
        model_of(options),
        options.plan,
        mesh=mesh,
        pipeline=shardgraph.Pipeline(microbatches=options.microbatches, schedule=options.schedule),
        loss_fn=nn.functional.mse_loss,  # of the output and ``target``; it is computed by the last stage
        example_inputs=(batch[:rows],),
        example_kwargs={"target": target[:rows]},
    )
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=options.lr)
    if dist.get_rank() == 0:
        print(sharded.plan)
        count = sum(p.numel() for p in sharded.parameters())
        print(f"rank 0 has {count:,} parameters, of its stages")

    data_rank, size = sharded.plan.data_rank(dist.get_rank()), sharded.plan.data_size
    losses: list[float] = []
    for step in range(options.steps):
        batch, target = (whole.chunk(size)[data_rank] for whole in batch_of(step, options))
        loss = sharded.train_step(batch, target=target)  # all microbatches, forward and backward
        sharded.clip_grad_norm_(1.0)  # over all stages
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
        if dist.get_rank() == 0 and (step % 5 == 0 or step + 1 == options.steps):
            print(f"step {step:3d}: loss {losses[-1]:.4f}", flush=True)
    return losses


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="pp", help="pp, pp+fsdp, pp+tp, ...")
    parser.add_argument("--mesh", help="such as pp=2,dp=2; by default all ranks are along pp")
    parser.add_argument("--schedule", default="1f1b", help="gpipe, 1f1b, zbv, ... (docs/pipeline.md)")
    sizes = {"nproc": 2, "steps": 30, "batch": 16, "microbatches": 4, "length": 8, "width": 32, "layers": 4}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = options_of()
    shardgraph.launch(train, options.nproc, args=(options,))
