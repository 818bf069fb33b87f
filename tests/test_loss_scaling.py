"""A scaled loss in ``train_step``: the same for every plan, and one stage's overflow skips the step of all."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import Pipeline
from tests import pipelines
from tests.standing import on_ranks


def test_gradients_are_scaled_and_the_loss_is_not():
    model, x = nn.Linear(4, 4), torch.randn(2, 4)
    expected = copy.deepcopy(model)
    loss = pipelines.mean_square(expected(x), torch.zeros(2, 4))
    loss.backward()
    sharded = shardgraph.compile(model, "single", loss_fn=pipelines.mean_square)
    scaler = shardgraph.GradScaler("cpu", init_scale=8.0)
    torch.testing.assert_close(sharded.train_step(x, target=torch.zeros(2, 4), scaler=scaler), loss.detach())
    for ours, theirs in zip(sharded.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, 8 * theirs.grad)


def test_a_scaler_that_is_off_changes_nothing():
    sharded = shardgraph.compile(nn.Linear(4, 4), "single", loss_fn=pipelines.mean_square)
    call = {"target": torch.zeros(2, 4)}
    plain, off = (
        (sharded.train_step(torch.ones(2, 4), scaler=scaler, **call), sharded.weight.grad.clone())
        for scaler in (None, shardgraph.GradScaler("cpu", enabled=False))
    )
    torch.testing.assert_close(off[0], plain[0])
    torch.testing.assert_close(off[1], 2 * plain[1])  # added to those of the step before


@pytest.mark.timeout(120)
def test_an_overflow_in_one_stage_skips_the_step_of_all_stages():
    first, second = on_ranks(pipelines.scaled_steps, 2, args=("pp", {"pp": 2}))
    assert [step[1:] for step in first] == [step[1:] for step in second]  # changed or not, and the scale
    assert any(ours[0] and not theirs[0] for ours, theirs in zip(first, second, strict=True))
    for (_, changed, _), (finite, _, _) in zip(first, second, strict=True):
        assert changed == finite
    assert not first[0][1] and any(changed for _, changed, _ in first)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize(("plan", "mesh"), [("pp", {"pp": 2})])
def test_a_scaled_step_of_a_pipeline_has_the_gradients_of_the_plain_one_once_unscaled(plan, mesh):
    found = on_ranks(pipelines.scaled_and_plain_gradients, 2, args=(plan, mesh, Pipeline(4)))
    assert max(found) < 1e-12
