"""Parameters in host memory are updated by torch's fused kernels, unless the user has chosen others."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

import shardgraph
from shardgraph import Offload
from tests import offloaded
from tests.standing import on_ranks

OPTIMIZERS = {
    "AdamW": lambda parameters, **given: torch.optim.AdamW(parameters, lr=1e-2, **given),
    "Adam, amsgrad": lambda parameters, **given: torch.optim.Adam(parameters, lr=1e-2, amsgrad=True, **given),
    "SGD": lambda parameters, **given: torch.optim.SGD(parameters, lr=1e-2, momentum=0.9, nesterov=True, **given),
    "Adagrad": lambda parameters, **given: torch.optim.Adagrad(parameters, lr=1e-2, **given),
}
FUSED = {"aten::_fused_adamw_", "aten::_fused_adam_", "aten::_fused_sgd_", "aten::_fused_adagrad_"}


def trained(make: Any, offload: str | Offload | None, **given: Any) -> tuple[nn.Module, Any, set[str]]:
    """A model after three steps, its optimizer, and the fused kernels that updated it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.GELU(), nn.Linear(32, 4))
    sharded = shardgraph.compile(model, "single", offload=offload, example_inputs=(torch.ones(8, 16),))
    optimizer = make(sharded.parameters(), **given)
    with profile(activities=[ProfilerActivity.CPU]) as seen:
        for _ in range(3):
            sharded(torch.randn(8, 16)).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    return sharded, optimizer, FUSED & {event.name for event in seen.events()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_weights_and_the_state_are_those_of_the_update_on_the_device(name):
    expected, other, kernels = trained(OPTIMIZERS[name], None)
    sharded, optimizer, fused = trained(OPTIMIZERS[name], "parameters")
    assert not kernels and len(fused) == 1
    for own, original in zip(sharded.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(own, original, rtol=1e-5, atol=1e-7)
        for key, value in other.state[original].items():
            torch.testing.assert_close(optimizer.state[own][key], value, rtol=1e-4, atol=1e-7)
    assert [group["fused"] for group in optimizer.param_groups] == [None]  # as the user has made it


@pytest.mark.parametrize("given", [{"foreach": True}, {"foreach": False}, {"fused": False}], ids=str)
def test_an_implementation_that_the_user_has_chosen_is_kept(given):
    _, optimizer, kernels = trained(OPTIMIZERS["AdamW"], "parameters", **given)
    assert not kernels
    assert {key: optimizer.param_groups[0][key] for key in given} == given


def test_state_that_was_made_on_the_device_goes_on_in_host_memory():
    _, before, _ = trained(OPTIMIZERS["AdamW"], None)
    sharded, optimizer, _ = trained(OPTIMIZERS["AdamW"], "parameters")
    optimizer.load_state_dict(before.state_dict())
    sharded(torch.ones(8, 16)).square().mean().backward()
    optimizer.step()
    assert {int(state["step"]) for state in optimizer.state.values()} == {4}


def test_shards_in_host_memory_are_updated_so_on_every_rank():
    for error, kernels in on_ranks(offloaded.updates, 2):
        assert error < 1e-6 and kernels == ["aten::_fused_adamw_"]
