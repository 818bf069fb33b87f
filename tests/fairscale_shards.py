"""Writes `tests/fairscale_shards/`: what FairScale 0.4.13 saves on three ranks, and the whole state of the same model.

    pip install --no-deps fairscale==0.4.13    # into an environment of its own
    python -m tests.fairscale_shards

Nothing else needs FairScale. Its FSDP shards a model when it wraps it, without communication, so that groups that only
say which rank this is are enough, and one process writes the files of all ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

FOLDER = Path(__file__).parent / "fairscale_shards"
RANKS = 3


class Layer(nn.Module):
    """A tied head, buffers of two dtypes, and a parameter of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 7)
        self.norm = nn.BatchNorm1d(7)
        self.head = nn.Linear(7, 5)
        self.head.weight = self.embed.weight
        self.gain = nn.Parameter(torch.randn(3))
        self.register_buffer("mask", torch.ones(2), persistent=False)


class Net(nn.Module):
    """Wrapped as a whole, ``body`` for itself, and ``thin`` without flattening: it has fewer elements than ranks."""

    def __init__(self, wrap: Callable[..., nn.Module] = lambda module, **options: module) -> None:
        super().__init__()
        self.body = wrap(Layer())
        self.out, self.same = nn.Linear(3, 2), nn.Linear(3, 2)
        self.same.weight = self.out.weight
        self.thin = wrap(nn.Linear(1, 2), flatten_parameters=False)


class Group(NamedTuple):
    """What FairScale asks of a process group."""

    at: int

    def rank(self) -> int:
        return self.at

    def size(self) -> int:
        return RANKS


def write() -> None:
    from fairscale.nn.data_parallel import FullyShardedDataParallel

    FOLDER.mkdir(exist_ok=True)
    for rank in range(RANKS):
        group = Group(rank)
        options = {"process_group": group, "process_group_reduce_scatter": group, "compute_device": torch.device("cpu")}
        wrap = partial(FullyShardedDataParallel, **options)
        torch.manual_seed(0)  # the order of initialisation is that of the whole model
        sharded = wrap(Net(wrap))
        sharded.body.norm.running_mean.copy_(torch.arange(7.0))
        state = {"model": sharded.local_state_dict(), "shard_metadata": sharded.local_metadata_dict()}
        torch.save(state, FOLDER / f"rank-{rank}.pt")
    torch.manual_seed(0)
    whole = Net()
    whole.body.norm.running_mean.copy_(torch.arange(7.0))
    torch.save(whole.state_dict(), FOLDER / "whole.pt")


if __name__ == "__main__":
    write()
