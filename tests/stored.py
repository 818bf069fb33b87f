"""What ranks do in tests of shards that lie side by side."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardgraph
from shardgraph import preset
from shardgraph.torch_api import local_tensor
from tests.ranks import difference


class Copies(TorchDispatchMode):
    """Counts operations by name."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.seen[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def pair(plan: str = "fsdp") -> tuple[Any, nn.Module, torch.Tensor]:
    """A sharded module with buckets, of whose parameters not all divide by two, the original, and a batch."""
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 8), nn.Tanh(), nn.Linear(8, 1)).double()
    chosen = replace(preset(plan, {"dp": dist.get_world_size()}), bucket=1 << 20)
    return shardgraph.compile(copy.deepcopy(original), chosen), original, torch.randn(4, 5).double()


def train(sharded: nn.Module, original: nn.Module, x: torch.Tensor, steps: int = 3) -> float:
    """The largest difference of a weight after some steps."""
    optimizers = [torch.optim.SGD(module.parameters(), lr=0.1) for module in (sharded, original)]
    for _ in range(steps):
        for module, optimizer in zip((sharded, original), optimizers, strict=True):
            module(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return difference(sharded, original, gradients=False)


def storages(sharded: nn.Module) -> int:
    """In how many storages the shards of the divided parameters are."""
    shards = [local_tensor(parameter) for parameter in sharded.parameters()]
    return len({shard.untyped_storage().data_ptr() for shard in shards if shard.numel()})


def side_by_side() -> dict[str, Any]:
    """Where shards are before and after the first call, what is copied, and whether training is the original's."""
    sharded, original, x = pair()
    before = [local_tensor(parameter) for parameter in sharded.parameters()]
    facts: dict[str, Any] = {"storages before": storages(sharded)}
    with torch.no_grad():
        sharded(x)
        with Copies() as copies:
            sharded(x)
    after = [local_tensor(parameter) for parameter in sharded.parameters()]
    return facts | {
        "storages": storages(sharded),
        "the same tensors": all(a is b for a, b in zip(before, after, strict=True)),
        "packed": copies.seen["cat"] + copies.seen["copy_"],
        "error": train(sharded, original, x),
    }


def moved_later(how: str) -> dict[str, float]:
    """The error after a shard was moved elsewhere, and its values were changed there."""
    sharded, original, x = pair()
    train(sharded, original, x)
    parameter, theirs = (module.get_parameter("2.weight") for module in (sharded, original))
    with torch.no_grad():
        shard = local_tensor(parameter)
        if how == "set_":
            shard.set_(shard.clone())
        elif how == "data":
            shard.data = shard.clone()
        elif how == "load":
            sharded.load_state_dict({name: value + 1 for name, value in original.state_dict().items()})
            for value in original.parameters():
                value += 1
        parameter.mul_(2)
        theirs.mul_(2)
    return {"error": train(sharded, original, x), "storages": storages(sharded)}


def held_elsewhere() -> dict[str, Any]:
    """A state dict of before the first call is of the parameters after it too."""
    sharded, original, x = pair()
    state = sharded.state_dict()
    error = train(sharded, original, x)
    mine = sharded.state_dict()
    same = all(torch.equal(local_tensor(value), local_tensor(mine[name])) for name, value in state.items())
    return {"error": error, "same": same}
