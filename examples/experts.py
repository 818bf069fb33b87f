"""Train a transformer with a mixture of experts, each rank with its own batch and its own experts.

python examples/experts.py                                              # two ranks, four experts on each
python examples/experts.py --nproc 4 --plan fsdp+ep --mesh dp=2,ep=2    # and everything else in shards
torchrun --nproc-per-node 8 examples/experts.py --experts 64 --width 1024 --layers 12 --length 2048
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph.nn import MoE


class Block(nn.Module):
    """Causal attention, then experts: each token goes through two of them."""

    def __init__(self, width: int, experts: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.moe = MoE(width, 2 * width, experts, k=2, capacity_factor=1.25, activation="swiglu")

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, 4, width // 4).permute(2, 0, 3, 1, 4)
        attention = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attention.transpose(1, 2).reshape(batch, length, width))
        mixed, balance = self.moe(self.norm2(x))
        return x + mixed, balance


class Model(nn.Module):
    """Returns the loss: of the next token, and a little for an even use of the experts."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.embed = nn.Embedding(options.vocabulary, options.width)
        self.blocks = nn.ModuleList(Block(options.width, options.experts) for _ in range(options.layers))
        self.head = nn.Linear(options.width, options.vocabulary)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x, balance = self.embed(ids[:, :-1]), torch.zeros((), device=ids.device)
        for block in self.blocks:
            x, of_block = block(x)
            balance = balance + of_block
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1), ids[:, 1:].flatten()) + 0.01 * balance


def batch_of(seed: int, rows: int, options: argparse.Namespace) -> torch.Tensor:
    """Sequences ``[rows, length + 1]`` in which each number is three times the one before, or one more."""
    generator = torch.Generator().manual_seed(seed)
    ids = [torch.randint(options.vocabulary, (rows,), generator=generator)]
    while len(ids) <= options.length:
        ids.append((3 * ids[-1] + torch.randint(2, (rows,), generator=generator)) % options.vocabulary)
    return torch.stack(ids, 1)


def train(options: argparse.Namespace) -> list[float]:
    """What each rank does; returns the loss of every step."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    axes = (axis.split("=") for axis in (options.mesh or f"ep={ranks}").split(","))
    torch.manual_seed(0)
    sharded = shardgraph.compile(
        Model(options),
        options.plan,
        mesh={name: int(size) for name, size in axes},
        example_inputs=(batch_of(0, options.batch, options),),
    )
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=options.lr)
    if rank == 0:
        weight = sharded.get_parameter("blocks.0.moe.experts.w_in")
        print(sharded.plan)
        print(f"rank 0 has {tuple(weight.to_local().shape)} of the weight of experts {tuple(weight.shape)}")

    losses = []
    for step in range(options.steps):
        loss = sharded(batch_of(step * ranks + rank, options.batch, options))  # a batch of this rank's own
        loss.backward()
        sharded.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
        if rank == 0 and (step % 5 == 0 or step + 1 == options.steps):
            print(f"step {step:3d}: loss {losses[-1]:.4f}", flush=True)
    return losses


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="ep", help="ep, or fsdp+ep with a mesh of two axes")
    parser.add_argument("--mesh", help="such as dp=2,ep=2; by default all ranks are along ep")
    sizes = {"length": 32, "width": 32, "layers": 2, "experts": 8, "vocabulary": 31}
    for name, default in {"nproc": 2, "steps": 30, "batch": 4, **sizes}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=1e-2)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = options_of()
    shardgraph.launch(train, options.nproc, args=(options,))
