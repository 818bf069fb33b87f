"""A factor of the loss scale for each layer: gradients are those of plain training, and overflows move one factor."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import ShardGraphError
from shardgraph.errors import CheckpointError
from tests import layer_scales
from tests.standing import on_ranks


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("plan", ["ddp", "fsdp", "tp", "pp"])
def test_training_is_that_without_factors_and_they_grow(plan):
    for worst, factors, scale in on_ranks(layer_scales.training, 2, args=(plan,)):
        assert worst < 1e-12
        assert factors == {"0": 2.0**19, "2": 16.0, "4": 16.0} and scale == 64.0


class Small(nn.Linear):
    """A layer inside of which gradients are too small for float16."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) * 2.0**-20


def small() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(Small(4, 8), nn.Linear(8, 2))


def test_a_factor_keeps_gradients_that_half_precision_rounds_away_without_it():
    def gradient(factor: float) -> torch.Tensor:
        model = small()
        scaler = shardgraph.LayerwiseGradScaler(model, {"0": factor}, device="cpu", init_scale=1.0)
        sharded = shardgraph.compile(model, "single", precision="fp16")
        scaler.scale(sharded(torch.ones(1, 4)).sum()).backward()
        scaler.unscale_(torch.optim.SGD(sharded.parameters(), lr=0.1))
        return sharded.get_parameter("0.weight").grad

    model = small()
    model(torch.ones(1, 4)).sum().backward()
    expected = model.get_parameter("0.weight").grad
    without, within = ((gradient(factor) - expected).norm() / expected.norm() for factor in (1.0, 2.0**14))
    assert within < 0.002 and without > 0.02


@pytest.mark.parametrize(
    ("layer", "factors", "scale"),
    [
        (None, {"0": 8.0, "2": 8.0}, 4.0),
        (2, {"0": 8.0, "2": 4.0}, 4.0),
        (4, {"0": 8.0, "2": 8.0}, 2.0),
    ],
    ids=["none", "a layer with a factor", "another layer"],
)
def test_an_overflow_on_one_rank_skips_the_step_and_backs_off_where_it_is(layer, factors, scale):
    assert on_ranks(layer_scales.overflow, 2, args=(layer,)) == [(layer is not None, factors, scale)] * 2


def test_a_factor_that_cannot_fall_leaves_it_to_the_loss_scale():
    model = nn.Linear(2, 2)
    scaler = shardgraph.LayerwiseGradScaler(model, {"": 2.0}, device="cpu", init_scale=8.0, min_factor=1.0)
    sharded = shardgraph.compile(model, "single")
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    seen = []
    for _ in range(2):
        scaler.scale(sharded(torch.full((1, 2), torch.inf)).sum()).backward()
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
        seen.append((scaler.factors()[""], scaler.get_scale()))
    assert seen == [(1.0, 8.0), (1.0, 4.0)]


def test_a_factor_is_verified_and_proved_with_the_model():
    model = layer_scales.make_model()
    shardgraph.LayerwiseGradScaler(model, layer_scales.FACTORS, device="cpu")
    report = shardgraph.verify(model, (torch.ones(4, 4).double(),), "fsdp", mesh={"dp": 2}, steps=2)
    assert report.ok and report.proof.ok


def test_its_state_continues_and_that_of_other_modules_is_refused():
    scalers = [
        shardgraph.LayerwiseGradScaler(copy.deepcopy(layer_scales.make_model()), factors, device="cpu")
        for factors in ({"0": 8.0}, {"0": 2.0}, {"2": 2.0})
    ]
    for scaler in scalers:
        scaler.scale(torch.ones(()))
    scalers[1].load_state_dict(scalers[0].state_dict())
    assert scalers[1].state_dict() == scalers[0].state_dict() and scalers[1].factors() == {"0": 8.0}
    with pytest.raises(CheckpointError, match=r"of factors of \['0'\], and this scaler has those of \['2'\]"):
        scalers[2].load_state_dict(scalers[0].state_dict())


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(4, 4), nn.Linear(4, 4, bias=False)
        self.head.weight = self.embedding.weight


@pytest.mark.parametrize(
    ("model", "factors", "message"),
    [
        (nn.Sequential(nn.Linear(2, 2)), {"head": 2.0}, "no module of the model matches 'head'"),
        (nn.Sequential(nn.Linear(2, 2)), {"": 2.0, "0": 2.0}, "'' and '0' both have a factor"),
        (nn.Sequential(nn.Linear(2, 2)), {"0": 0.0}, "the factor of '0' is 0.0; it may be larger than 0"),
        (Tied(), {"head": 2.0}, "'head' has a factor and shares a parameter with 'embedding.weight'"),
        (
            shardgraph.compile(nn.Sequential(nn.Linear(2, 2)), "single"),
            {"*": 2.0},
            "make the LayerwiseGradScaler first",
        ),
    ],
    ids=["unknown", "nested", "zero", "tied", "compiled"],
)
def test_what_cannot_be_is_refused(model, factors, message):
    with pytest.raises(ShardGraphError, match=message):
        shardgraph.LayerwiseGradScaler(model, factors)


def test_fairscales_calls_around_fsdp_train_as_without_them():
    for worst, factors in on_ranks(layer_scales.fairscale_steps, 2):
        assert worst < 1e-12 and factors == {"0": 2.0**11, "4": 1.0}
