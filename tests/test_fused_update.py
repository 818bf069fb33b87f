"""Under a backend that compiles, optimizers step by torch's fused kernels, unless one has chosen another way."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import shardgraph
from shardgraph.runtime.backends import BACKENDS, eager

aten = torch.ops.aten

FUSED = {
    "SGD": aten._fused_sgd_.default,
    "Adam": aten._fused_adam_.default,
    "AdamW": aten._fused_adamw_.default,
    "Adagrad": aten._fused_adagrad_.default,
}
OPTIONS: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "Adam": {"lr": 0.01, "amsgrad": True},
    "AdamW": {"lr": 0.01, "weight_decay": 0.1},
    "Adagrad": {"lr": 0.1},
}


@pytest.fixture(autouse=True)
def compiling(monkeypatch):
    """A backend that is not the eager one, so that a step need not wait for a C++ compiler."""
    monkeypatch.setitem(BACKENDS, "compiling", (lambda gm: eager.backend(gm), eager.check))


class Called(TorchDispatchMode):
    """The operations that are called within."""

    def __init__(self) -> None:
        super().__init__()
        self.operations: list[Any] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.operations.append(func)
        return func(*args, **kwargs or {})


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).double()


def trained(
    optimizer: str, options: dict[str, Any], backend: str, max_norm: float | None = None
) -> tuple[shardgraph.ShardedModule, torch.optim.Optimizer, list[Any]]:
    """A module and its optimizer after three steps, and the operations of these."""
    sharded = shardgraph.compile(network(), "single", backend=backend, loss_fn=nn.functional.mse_loss)
    made = getattr(torch.optim, optimizer)(sharded.parameters(), **options)
    x = torch.randn(4, 6, generator=torch.Generator().manual_seed(1)).double()
    y = torch.ones(4, 3).double()
    with Called() as called:
        for _ in range(3):
            sharded.step(x, target=y, optimizer=made, max_norm=max_norm)
    return sharded, made, called.operations


@pytest.mark.parametrize("optimizer", FUSED)
@pytest.mark.parametrize("max_norm", [None, 0.1], ids=["within backward", "clipped"])
def test_an_update_is_one_fused_kernel_with_the_numbers_of_the_eager_one(optimizer, max_norm):
    ours, state, called = trained(optimizer, OPTIONS[optimizer], "compiling", max_norm)
    theirs, expected, _ = trained(optimizer, OPTIONS[optimizer], "eager", max_norm)
    assert called.count(FUSED[optimizer]) == 3
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(state.state_dict()["state"], expected.state_dict()["state"])
    assert state.param_groups[0]["fused"] is None and state.param_groups[0]["foreach"] is None


@pytest.mark.parametrize("choice", [{"fused": False}, {"foreach": True}, {"foreach": False}], ids=str)
def test_the_users_choice_of_an_implementation_stays(choice):
    _, made, called = trained("AdamW", OPTIONS["AdamW"] | choice, "compiling")
    assert FUSED["AdamW"] not in called
    assert made.param_groups[0] | choice == made.param_groups[0]


def test_optimizers_without_fused_kernels_step_as_ever():
    ours, _, _ = trained("NAdam", {"lr": 0.01}, "compiling")
    theirs, _, _ = trained("NAdam", {"lr": 0.01}, "eager")
    for one, other in zip(ours.parameters(), theirs.parameters(), strict=True):
        assert torch.equal(one, other)


def test_state_that_counts_in_doubles_is_of_no_fused_kernel_and_continues():
    """As it is loaded from a program whose default dtype was float64."""
    state = copy.deepcopy(trained("AdamW", OPTIONS["AdamW"], "eager")[1].state_dict())
    for each in state["state"].values():
        each["step"] = each["step"].double()
    sharded = shardgraph.compile(network(), "single", backend="compiling", loss_fn=nn.functional.mse_loss)
    made = torch.optim.AdamW(sharded.parameters(), **OPTIONS["AdamW"])
    made.load_state_dict(state)
    with Called() as called:
        sharded.step(torch.ones(4, 6).double(), target=torch.ones(4, 3).double(), optimizer=made)
    assert FUSED["AdamW"] not in called.operations
    assert {each["step"].item() for each in made.state.values()} == {4.0}
