"""Train a byte-level GPT on the Python standard library's sources, sharded over two ranks.

    python examples/train_gpt.py                        # starts its own ranks
    torchrun --nproc-per-node 2 examples/train_gpt.py   # the same script under a launcher

Prints the plan, a live loss, what each rank held in memory against an unsharded run, and the verification against the
unsharded model.
"""

from __future__ import annotations

import argparse
import copy
import os
import sys
import sysconfig
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.tensor import DTensor

import shardgraph
from shardgraph.runtime.measure import PeakMemory

COMPARED = 20  # first steps in which the unsharded model trains beside the sharded one


class Block(nn.Module):
    """Attention and a feed-forward layer, each behind a norm and a residual."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.proj = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        q, k, v = self.qkv(self.norm1(x)).view(batch, length, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        attention = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.proj(attention.transpose(1, 2).reshape(batch, length, width))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class GPT(nn.Module):
    """A decoder-only transformer over bytes, its output layer tied to its embedding."""

    def __init__(self, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.token, self.position = nn.Embedding(256, width), nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.02)
        self.head.weight = self.token.weight

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.token(ids) + self.position(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def library_text(limit: int = 4_000_000) -> torch.Tensor:
    """The standard library's sources as one tensor of bytes."""
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
    return torch.frombuffer(text[:limit], dtype=torch.uint8)


def batch_of(text: torch.Tensor, step: int, rows: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Step ``step``'s inputs and next-byte targets, each ``(rows, length)``; the same on every rank."""
    generator = torch.Generator().manual_seed(step)
    starts = torch.randint(len(text) - length - 1, (rows,), generator=generator)
    window = torch.stack([text[start : start + length + 1] for start in starts.tolist()]).long()
    return window[:, :-1], window[:, 1:]


def held_bytes(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """What this rank holds between steps, in bytes by kind."""

    def size(tensor: torch.Tensor | None) -> int:
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        return 0 if local is None else local.numel() * local.element_size()

    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    return {
        "parameters": sum(size(p) for p in model.parameters()),
        "gradients": sum(size(p.grad) for p in model.parameters()),
        "optimizer state": sum(size(v) for v in states),
    }


def measured_step(model: nn.Module, optimizer: torch.optim.Optimizer, batch: Any) -> dict[str, int]:
    """One training step under a memory counter: what is held after it, and the peak of it."""
    optimizer.zero_grad()
    held = held_bytes(model, optimizer)
    with PeakMemory() as memory:
        loss_of(model(batch[0]), batch[1]).backward()
    after = held_bytes(model, optimizer)
    optimizer.step()
    return after | {"peak of a step": held["parameters"] + held["optimizer state"] + memory.peak_bytes}


def train(options: argparse.Namespace) -> dict[str, Any]:
    """What each rank does; returns what the summary needs."""
    rank, world = dist.get_rank(), dist.get_world_size()
    text, rows = library_text(), options.batch // world
    torch.manual_seed(0)
    model = GPT(options.width, options.layers, options.heads, options.length)
    original = copy.deepcopy(model) if rank == 0 else None
    count = sum(p.numel() for p in model.parameters())

    sharded = shardgraph.compile(model, options.plan)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=options.lr)
    reference = torch.optim.AdamW(original.parameters(), lr=options.lr) if original is not None else None
    if rank == 0:
        print(f"GPT of {count:,} parameters on {len(text):,} bytes of the standard library\n{sharded.plan}\n")

    largest, started, first = 0.0, time.perf_counter(), None
    for step in range(options.steps):
        ids, targets = batch_of(text, step, options.batch, options.length)
        mine = slice(rank * rows, (rank + 1) * rows)
        optimizer.zero_grad()
        loss = loss_of(sharded(ids[mine]), targets[mine])
        loss.backward()
        optimizer.step()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        mean /= world
        first = mean.item() if first is None else first
        beside = ""
        if original is not None and step < COMPARED:
            reference.zero_grad()
            expected = loss_of(original(ids), targets)
            expected.backward()
            reference.step()
            largest = max(largest, abs(mean.item() - expected.item()))
            beside = f"   unsharded {expected.item():.5f}"
        show(rank, step, options.steps, f"loss {mean.item():.5f}{beside}")
    seconds = time.perf_counter() - started

    batch = batch_of(text, options.steps, options.batch, options.length)
    part = tuple(t[rank * rows : (rank + 1) * rows] for t in batch)
    result = {"held": measured_step(sharded, optimizer, part), "difference": largest, "seconds": seconds}
    result |= {"first": first, "last": mean.item()}
    state = sharded.full_state_dict()  # every rank takes part, rank 0 gets the whole model
    if original is not None:
        result["unsharded"] = measured_step(original, reference, part)
        original.load_state_dict(state)
        result["sample"] = sample(original)
    return result


def sample(model: GPT, count: int = 160) -> str:
    """What the model writes after a prompt, drawn byte by byte: always taking the likeliest would write spaces."""
    generator = torch.Generator().manual_seed(0)
    ids = torch.tensor([list(b"    def __init__(self")])
    with torch.no_grad():
        for _ in range(count):
            logits = model(ids[:, -model.position.num_embeddings :])[:, -1]
            drawn = torch.multinomial((logits / 0.7).softmax(-1), 1, generator=generator)
            ids = torch.cat([ids, drawn], dim=1)
    return bytes(ids[0].tolist()).decode(errors="replace")


def show(rank: int, step: int, steps: int, line: str) -> None:
    """One line that lives on a terminal; elsewhere a line now and then."""
    if rank != 0:
        return
    if sys.stdout.isatty():
        print(f"\r  step {step + 1:4d} of {steps}: {line:<50}", end="\n" if step + 1 == steps else "", flush=True)
    elif step < 3 or (step + 1) % 20 == 0 or step + 1 == steps:
        print(f"  step {step + 1:4d} of {steps}: {line}", flush=True)


def summary(results: list[dict[str, Any]]) -> None:
    """What each rank held, against the unsharded run on the same part of the batch."""
    whole = next(r["unsharded"] for r in results if "unsharded" in r)
    print("\nMemory in MiB" + "".join(f"{f'rank {i}':>12}" for i in range(len(results))) + f"{'unsharded':>12}")
    for kind in whole:
        cells = [r["held"][kind] for r in results] + [whole[kind]]
        print(f"{kind:<16}" + "".join(f"{cell / 2**20:9.2f}   " for cell in cells))
    head = results[0]
    print(
        f"\nLoss {head['first']:.3f} -> {head['last']:.3f} in {head['seconds']:.0f} s. Over the first {COMPARED} steps "
        f"the sharded and the unsharded loss differed by at most {head['difference']:.1e}."
    )
    print(f"\nThe trained weights, loaded into the unsharded model, write:\n{head['sample']}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nproc", type=int, default=2, help="ranks to start (torchrun decides under torchrun)")
    parser.add_argument("--plan", default="fsdp", help="fsdp, auto, zero2, zero1, ddp, or a plan file")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=8, help="rows of the whole batch, over all ranks")
    parser.add_argument("--length", type=int, default=128)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--heads", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3)
    options = parser.parse_args()

    results = shardgraph.launch(train, options.nproc, args=(options,), timeout=1800)
    if int(os.environ.get("RANK", 0)) != 0:
        return
    summary(results)
    torch.manual_seed(0)
    model = GPT(options.width, options.layers, options.heads, options.length)
    ids, _ = batch_of(library_text(), 0, options.batch, options.length)
    world = int(os.environ.get("WORLD_SIZE", options.nproc))
    report = shardgraph.verify(model, (ids,), options.plan, world_size=world, steps=2, fp64=True)
    print(f"\nVerification of the emitted program, all ranks in one process:\n{report}")
    report.raise_if_failed()


if __name__ == "__main__":
    main()
