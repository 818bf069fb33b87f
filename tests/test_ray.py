"""Ray Train: its TorchTrainer sets up the ranks that a plan is compiled for."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import shardgraph

ray = pytest.importorskip("ray", reason="needs ray[train]")
pytestmark = pytest.mark.slow


def train(config: dict[str, Any]) -> None:
    """A training function as Ray's users write it, without prepare_model."""
    import ray.train

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    sharded = shardgraph.compile(model, config["plan"])
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    rank = ray.train.get_context().get_world_rank()
    losses = []
    for batch in config["batches"]:
        loss = sharded(batch.chunk(2)[rank]).square().mean()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    torch.save((losses, sharded.full_state_dict()), Path(config["folder"]) / f"{rank}.pt")


@pytest.mark.timeout(280)
def test_a_training_function_of_ray_compiles_and_trains_like_one_rank(tmp_path):
    from ray.train import ScalingConfig
    from ray.train.torch import TorchTrainer

    batches = [torch.randn(8, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(n)) for n in range(3)]
    ray.init(num_cpus=2, include_dashboard=False)
    try:
        config = {"plan": "fsdp", "batches": batches, "folder": str(tmp_path)}
        TorchTrainer(train, train_loop_config=config, scaling_config=ScalingConfig(num_workers=2)).fit()
    finally:
        ray.shutdown()
    (first, weights), (second, _) = (torch.load(tmp_path / f"{rank}.pt") for rank in range(2))

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 3)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for batch, one, other in zip(batches, first, second, strict=True):
        loss = model(batch).square().mean()
        torch.testing.assert_close((one + other) / 2, loss.item())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    for name, value in model.state_dict().items():
        torch.testing.assert_close(weights[name], value)
