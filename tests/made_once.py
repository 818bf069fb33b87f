"""What runs on each rank of the tests of what one rank makes for all."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

import shardgraph
from shardgraph.capture import remembered as graphs
from shardgraph.errors import RankFailedError
from shardgraph.module import remembered as programs
from shardgraph.module.sharded import ShardedModule
from shardgraph.runtime import first_made
from shardgraph.runtime.store_waits import wait_for
from tests.ranks import whole


class Asking(nn.Module):
    """Reads its rank, which only a trace of its own can tell."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * (2.0 if dist.get_rank() else 1.0)


class Counting(nn.Module):
    """Leaves something behind on itself."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.calls = nn.Linear(4, 4), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls = 3
        return self.layer(x)


class Scaled(nn.Module):
    """Not the same on all ranks."""

    def __init__(self) -> None:
        super().__init__()
        self.layer, self.scale = nn.Linear(4, 4), 1.0 + dist.get_rank()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x) * self.scale


class Typed(nn.Module):
    """Asks for the type of a tensor, which the tracer looks up under a name that only its process knows."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        return y if isinstance(x, type(y)) else -y


KINDS: dict[str, type[nn.Module]] = {
    "asks for its rank": Asking,
    "sets an attribute": Counting,
    "differs": Scaled,
    "asks for a type": Typed,
}


@contextmanager
def counted() -> Iterator[dict[str, int]]:
    """How often this rank captures, lowers and proves inside of it, afterwards."""
    counts: dict[str, int] = {}
    with ExitStack() as patches:
        mocks = {
            name: patches.enter_context(mock.patch.object(module, name, wraps=getattr(module, name)))
            for module, name in ((graphs, "capture"), (programs, "lower"), (programs, "prove"))
        }
        yield counts
        counts |= {name: each.call_count for name, each in mocks.items()}


def llama() -> nn.Module:
    sizes = {"vocab_size": 64, "hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 2}
    torch.manual_seed(0)
    return LlamaForCausalLM(
        LlamaConfig(**sizes, num_attention_heads=2, num_key_value_heads=2, use_cache=False)
    ).double()


def trained(plan: str, mesh: dict[str, int], later: bool) -> tuple[dict[str, int], float]:
    """What a rank has made, and how far three steps are from those of the original.

    With ``later`` the program is compiled at the first call, and another one for a shorter batch.
    """
    original, ids = llama(), torch.arange(48).reshape(4, 12) % 61
    calls = [{"input_ids": ids, "labels": ids}] * 2 + [{"input_ids": ids[:, :8], "labels": ids[:, :8]}]
    example = {} if later else {"example_kwargs": calls[0]}
    with counted() as counts:
        sharded = shardgraph.compile(copy.deepcopy(original), plan, mesh=mesh, progress=False, **example)
        optimizers = [torch.optim.SGD(each.parameters(), 0.1) for each in (original, sharded)]
        for call in calls:
            for module, optimizer in zip((original, sharded), optimizers, strict=True):
                optimizer.zero_grad()
                loss = module.train_step(**call) if plan.startswith("pp") and module is sharded else _step(module, call)
                optimizer.step()
    assert isinstance(sharded, ShardedModule) and loss.isfinite()
    full = dict(original.named_parameters())
    return counts, max((whole(each) - full[name]).abs().max().item() for name, each in sharded.named_parameters())


def _step(module: Any, call: Any) -> torch.Tensor:
    loss: torch.Tensor = module(**call).loss
    loss.backward()
    return loss


def captured(kind: str) -> tuple[dict[str, int], float]:
    """What a rank has made of a model of this kind, and how far its output is from the model's."""
    torch.manual_seed(0)
    original, x = KINDS[kind](), torch.ones(2, 4)
    with counted() as counts:
        sharded = shardgraph.compile(copy.deepcopy(original), "ddp", progress=False)
        output = sharded(x)
    return counts, (output - original(x)).abs().max().item()


def refused() -> str:
    """What a rank is told of a model that cannot be captured."""

    class Selecting(nn.Linear):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = super().forward(x)
            return y[y > 0]  # a shape that hangs on values

    try:
        shardgraph.compile(Selecting(4, 4), "ddp", example_inputs=(torch.ones(2, 4),), progress=False)
    except shardgraph.ShardGraphError as error:
        return type(error).__name__
    return "compiled"


def ends_while_capturing(folder: str) -> None:
    """The rank that captures for all ends once the other one waits, which writes down what it is told."""
    waits, told = Path(folder, "waits"), Path(folder, "told")

    def end(*_: Any, **__: Any) -> None:
        while not waits.exists():
            time.sleep(0.1)
        time.sleep(1)
        os._exit(3)

    def wait(*args: Any) -> None:
        waits.touch()
        wait_for(*args)

    torch.manual_seed(0)
    with mock.patch.object(graphs, "capture", end), mock.patch.object(first_made, "wait_for", wait):
        try:
            shardgraph.compile(nn.Linear(4, 4), "ddp", example_inputs=(torch.ones(2, 4),), progress=False)
        except RankFailedError as error:
            told.write_text(str(error))
            raise
