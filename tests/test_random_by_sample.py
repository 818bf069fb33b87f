"""``random="samples"``: what is drawn for a sample is the same on any number of ranks, and in the original."""

from __future__ import annotations

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph import PlanError, ShardGraphError
from tests.plain_loop import losses_of
from tests.standing import on_ranks

SAMPLES = 7  # not divisible by 2 or 3


class Noisy(nn.Module):
    """Draws in many shapes: rows first, rows behind positions, heads, and no rows at all."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.dropout = nn.Linear(6, 8), nn.Dropout(0.3)
        self.layer = nn.TransformerEncoderLayer(8, 2, 16, dropout=0.2, batch_first=True)
        self.head = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.layer(self.dropout(self.embed(x)))
        x = x + 0.1 * torch.randn_like(x)
        x = nn.functional.dropout(x.flatten(0, 1), 0.1).unflatten(0, (-1, 4))
        x = nn.functional.dropout(x.transpose(0, 1).reshape(-1, 8), 0.1).unflatten(0, (4, -1)).transpose(0, 1)
        weight = nn.functional.dropout(self.head.weight, 0.2)
        return nn.functional.linear(x, weight, self.head.bias)


def loss_of(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return (output - target).square().mean()


def _batch(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(SAMPLES, 4, 6, generator=generator), torch.randn(SAMPLES, 4, 3, generator=generator)


def _model() -> nn.Module:
    torch.manual_seed(0)
    return Noisy()


def _original(steps: int) -> list[float]:
    model = _model()

    def loss(step: int) -> torch.Tensor:
        inputs, target = _batch(step)
        return loss_of(model(inputs), target)

    return list(losses_of(torch.optim.AdamW(model.parameters(), lr=1e-2), loss, range(steps)).values())


def _train(plan: str, steps: int) -> tuple[list[float], list[float]]:
    """The losses of all samples, of ``train_step`` and of ``step``."""
    found = []
    for together in (False, True):
        sharded = shardgraph.compile(_model(), plan, loss_fn=loss_of, loss_weight="tokens", random="samples")
        optimizer, losses = torch.optim.AdamW(sharded.parameters(), lr=1e-2), []
        for step in range(steps):
            inputs, target = _batch(step)
            mine = sharded.rows_of(SAMPLES)
            if together:
                loss = sharded.step(inputs[mine], target=target[mine], optimizer=optimizer)
            else:
                loss = sharded.train_step(inputs[mine], target=target[mine])
                optimizer.step()
                optimizer.zero_grad()
            loss = loss * len(target[mine]) / SAMPLES
            if dist.is_initialized():
                dist.all_reduce(loss)
            losses.append(loss.item())
        found.append(losses)
    return found[0], found[1]


@pytest.mark.quick("ddp-2")
@pytest.mark.parametrize(("plan", "ranks"), [("fsdp", 3), ("ddp", 2), ("zero2", 2)])
def test_losses_with_dropout_are_those_of_the_original(plan, ranks):
    expected = _original(3)
    for losses in on_ranks(_train, ranks, args=(plan, 3))[0]:
        assert losses == pytest.approx(expected, rel=1e-4)


@pytest.mark.slow
def test_one_process_draws_what_the_original_draws():
    assert _train("single", 2)[0] == pytest.approx(_original(2), rel=1e-6)


class OwnShape(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x * torch.rand(x.shape[0], 1)


class OfOthers(nn.Module):
    """Every row has a weight for every other row."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(x @ x.T, 0.5) @ x


@pytest.mark.parametrize("model", [OwnShape(), OfOthers()])
def test_numbers_that_belong_to_no_row_are_refused_with_their_line(model):
    with pytest.raises(PlanError, match=r"of which row of the batch: draw in the shape") as error:
        shardgraph.compile(model, "single", random="samples")(torch.randn(4, 6))
    assert "test_random_by_sample.py:" in str(error.value)


def test_what_cannot_draw_by_sample_is_refused():
    with pytest.raises(ShardGraphError, match="backend 'inductor' compiles what draws into its kernels"):
        shardgraph.compile(_model(), "single", random="samples", backend="inductor")
    with pytest.raises(ShardGraphError, match="random is 'sample'; it may be 'ranks' or 'samples'; did you mean"):
        shardgraph.compile(_model(), "single", random="sample")
