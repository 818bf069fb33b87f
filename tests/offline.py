"""What ranks save for the tests of checkpoints without ranks; at module level, so that a rank finds it."""

from __future__ import annotations

from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn

import shardgraph
from shardgraph.fairscale import FSDP


class Net(nn.Module):
    """Rows that no number of ranks divides, a fused projection, a scalar, a tied head and buffers."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        super().__init__()
        self.embed = nn.Embedding(7, 8)
        self.fused = nn.Linear(8, 24)
        self.norm = nn.BatchNorm1d(8)
        self.odd = nn.Linear(8, 5)
        self.head = nn.Linear(8, 7)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.randn(()))
        self.register_buffer("offset", torch.ones(8), persistent=False)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        query, key, value = self.fused(self.embed(ids) + self.offset).chunk(3, -1)
        x = self.gain * self.norm(query * torch.tanh(key) + value)
        return torch.cat([self.head(x), self.odd(x)], -1)


def annotated() -> Net:
    """The model, with an annotation by which the axis ``tp`` divides each block of the fused projection."""
    model = Net()
    blocks = shardgraph.shard(0, "tp", blocks=3)
    shardgraph.annotate(model, {"fused.weight": blocks, "fused.bias": blocks})
    return model


def save(plan: str, mesh: dict[str, int], folder: str) -> list[str]:
    """Train a step and save in every way; returns the placements of the fused projection."""
    model = annotated() if "tp" in mesh else Net()
    ids = torch.arange(8) % 7
    sharded = shardgraph.compile(model, plan, example_inputs=(ids,), mesh=mesh)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    sharded(ids).square().mean().backward()
    optimizer.step()
    sharded.save_safetensors(f"{folder}/whole.safetensors")
    dcp.save({"model": sharded.state_dict(), "optimizer": optimizer.state_dict()}, checkpoint_id=f"{folder}/dcp")
    save_shards(sharded, f"{folder}/shards")
    if dist.get_rank() == 0:
        sharded.plan.save(f"{folder}/plan.yaml")
    return list(sharded.local_metadata_dict()["parameters"].get("fused.weight", {"placements": []})["placements"])


def save_shards(sharded: shardgraph.ShardedModule, folder: str) -> None:
    """As scripts of FairScale do."""
    Path(folder).mkdir(exist_ok=True)
    state = {"model": sharded.local_state_dict(), "shard_metadata": sharded.local_metadata_dict()}
    torch.save(state, f"{folder}/rank-{dist.get_rank():05}.pt")


def loads(plan: str, folder: str) -> bool:
    """Whether a fresh model is the whole one after it has loaded its file."""
    sharded = shardgraph.compile(Net(seed=1), plan)
    sharded.load_local_state_dict(torch.load(f"{folder}/split/rank-{dist.get_rank():05}.pt")["model"])
    expected = torch.load(f"{folder}/whole.pt")
    state = sharded.full_state_dict()
    return all(torch.equal(value, expected[name]) for name, value in state.items())


def by_name() -> dict[str, torch.Tensor]:
    """What FairScale's name for it makes of two ranks' shards."""
    sharded = FSDP(Net())
    saved = [None, None]
    dist.all_gather_object(saved, (sharded.local_state_dict(), sharded.local_metadata_dict()))
    return FSDP.consolidate_shard_weights(*zip(*saved, strict=True))
