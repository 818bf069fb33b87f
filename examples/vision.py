"""Train a residual network whose batch norms count the images of all ranks, and measure its accuracy.

    python examples/vision.py                                       # starts two ranks
    torchrun --nproc-per-node 2 examples/vision.py --plan ddp
    torchrun --nproc-per-node 8 examples/vision.py --width 64 --blocks 8 --size 224 --batch 256 --plan fsdp

The images are made up: each class is a stripe pattern under noise.
"""

from __future__ import annotations

import argparse

import torch
import torch.distributed as dist
from torch import nn

import shardgraph

CLASSES = 8


class Residual(nn.Module):
    """Two convolutions with batch norm beside a shortcut; the first halves the image if ``stride`` is 2."""

    def __init__(self, inputs: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(inputs, width, 3, stride, 1, bias=False), nn.BatchNorm2d(width)
        self.conv2, self.norm2 = nn.Conv2d(width, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width)
        self.shortcut = nn.Conv2d(inputs, width, 1, stride) if (inputs, stride) != (width, 1) else nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = torch.relu(self.norm1(self.conv1(x)))
        return torch.relu(self.shortcut(x) + self.norm2(self.conv2(y)))


def network(width: int, blocks: int) -> nn.Module:
    """Two stages of residual blocks, the second of twice the width on half the image."""
    layers: list[nn.Module] = [nn.Conv2d(3, width, 3, 1, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()]
    layers += [Residual(width, width, 1) for _ in range(blocks)]
    layers += [Residual(width, 2 * width, 2)]
    layers += [Residual(2 * width, 2 * width, 1) for _ in range(blocks - 1)]
    layers += [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2 * width, CLASSES)]
    return nn.Sequential(*layers)


def images(seed: int, rows: int, size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Images ``[rows, 3, size, size]`` and their classes, the same on every rank."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    angle = labels * torch.pi / CLASSES
    y, x = torch.meshgrid(torch.linspace(-1, 1, size), torch.linspace(-1, 1, size), indexing="ij")
    stripes = torch.sin(8 * (angle.cos()[:, None, None] * x + angle.sin()[:, None, None] * y))
    return stripes[:, None] + torch.randn(rows, 3, size, size, generator=generator), labels


def train(options: argparse.Namespace) -> list[float]:
    """What each rank does; returns the loss of every step, and the accuracy on new images as the last number."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    model = nn.SyncBatchNorm.convert_sync_batchnorm(network(options.width, options.blocks))  # before compile
    sharded = shardgraph.compile(model, options.plan)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=options.lr, momentum=0.9, nesterov=True)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=options.steps)

    losses = []
    for step in range(options.steps):
        batch, labels = images(step, options.batch, options.size)
        output = sharded(batch.chunk(ranks)[rank])
        loss = nn.functional.cross_entropy(output, labels.to(output.device).chunk(ranks)[rank])
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
        mean = loss.detach()
        dist.all_reduce(mean)
        losses.append(mean.item() / ranks)
        if rank == 0 and (step % 5 == 0 or step + 1 == options.steps):
            print(f"step {step:3d}: loss {losses[-1]:.4f}", flush=True)

    sharded.eval()
    batch, labels = images(10_000, 64 * ranks, options.size)
    with torch.no_grad():
        output = sharded(batch.chunk(ranks)[rank])
    right = (output.argmax(1) == labels.to(output.device).chunk(ranks)[rank]).float().mean()
    dist.all_reduce(right)
    if rank == 0:
        print(f"accuracy on new images: {right.item() / ranks:.1%}")
    return [*losses, right.item() / ranks]


def options_of(arguments: list[str] | None = None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--plan", default="fsdp", help="a plan of data parallelism")
    for name, default in {"nproc": 2, "steps": 30, "batch": 32, "size": 16, "width": 8, "blocks": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--lr", type=float, default=0.1)
    return parser.parse_args(arguments)


if __name__ == "__main__":
    options = options_of()
    shardgraph.launch(train, options.nproc, args=(options,))
