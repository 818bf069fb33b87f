"""What runs on the ranks for :mod:`tests.test_shared_batch`."""

from __future__ import annotations

import os

import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph.calibration import this_machine
from shardgraph.errors import RankMismatchError
from tests.standing import environment
from tests.zoo import make, scalar


def first_call(kind: str) -> str:
    """The error of a first call under ``tp``, if there is one, with the batch that ``kind`` says."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    sharded = shardgraph.compile(model, "tp", example_inputs=(torch.ones(4, 8),))
    batch = torch.arange(32.0).reshape(4, 8)
    if dist.get_rank():
        batch = {"same": batch, "other": batch + 1, "shuffled": batch.flip(0)}[kind]
    try:
        sharded(batch)
    except RankMismatchError as error:
        return str(error)
    return ""


def tuned(cache: str) -> tuple[str, list[str], bool, float]:
    """The plan that is measured fastest, what was measured, whether the module then gives the original's loss, and how
    much faster this machine is priced than before, with what it remembers in the folder ``cache``."""
    with environment():
        os.environ["XDG_CACHE_HOME"] = cache
        before = this_machine().device.rates["pointwise"].per_second
        model, (args, kwargs) = make("odd-mlp", 4)
        expected = scalar(model(*args, **kwargs)).item()
        sharded = shardgraph.compile(model, "auto", example_inputs=args, example_kwargs=kwargs, tune=0.2)
        measured = [remark for remark in sharded.plan.remarks if remark.startswith("measured")]
        same = abs(scalar(sharded(*args, **kwargs)).item() - expected) < 1e-5
        assert sharded.plan.considered[0].name == sharded.plan.name  # the chosen one is the first
        dist.barrier()
        return sharded.plan.name, measured, same, this_machine().device.rates["pointwise"].per_second / before
