"""A default device of torch, set for all that a program makes, is for its own tensors: what plans, proves and trains
keeps its own on the host. ``meta`` stands for an accelerator, which tests do not have: nothing can be read from it."""

import contextlib
from typing import Any

import pytest
import torch
from torch import nn

import shardgraph
from tests import ranks
from tests.standing import on_ranks

MESHES = {
    "fsdp": {"dp": 2},
    "zero2": {"dp": 2},
    "tp+sp": {"tp": 2},
    "fsdp+tp": {"dp": 2, "tp": 2},
    "pp": {"pp": 2},
    "cp": {"cp": 2},
}
X = torch.randn(4, 8)


class Net(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))


def loss(output: torch.Tensor, target: torch.Tensor | None = None) -> torch.Tensor:
    return output.square().mean()


@pytest.fixture(params=["in a context", "by default"])
def elsewhere(request: Any) -> Any:
    """A context in which tensors are made on ``meta`` that are given no device."""
    if request.param == "in a context":
        return lambda: torch.device("meta")
    return by_default


@contextlib.contextmanager
def by_default():
    torch.set_default_device("meta")
    try:
        yield
    finally:
        torch.set_default_device(None)


@pytest.mark.quick("*fsdp+tp", "*default-pp")
@pytest.mark.parametrize("plan", [plan for plan in MESHES if plan != "cp"])
def test_a_plan_is_analysed_verified_and_written_as_without_one(plan, elsewhere, tmp_path):
    model, mesh = Net(), MESHES[plan]
    call: Any = {"example_kwargs": {"target": X}, "loss_fn": loss}
    expected = shardgraph.analyze(model, (X,), plan, mesh=mesh, cluster="H100", **call)
    with elsewhere():
        analysis = shardgraph.analyze(model, (X,), plan, mesh=mesh, cluster="H100", **call)
        # AdamW of earlier versions makes its count of steps on the default device.
        optimizer = None if torch.__version__ >= "2.13" else torch.optim.SGD
        assert shardgraph.verify(model, (X,), plan, mesh=mesh, loss_fn=loss, optimizer=optimizer).ok
        shardgraph.emit(model, tmp_path / "program", analysis.plan, example_inputs=(X,), **call)
    assert str(analysis) == str(expected)


@pytest.mark.quick("by default")
def test_a_search_finds_what_it_finds_without_one(elsewhere):
    with torch.device("meta"):
        model, x = Net(), torch.zeros(64, 8)
    asked: Any = {"cluster": "H100", "devices": 8, "example_kwargs": {"target": x}, "loss_fn": loss}
    expected = shardgraph.plan(model, (x,), **asked)
    with elsewhere():
        assert shardgraph.plan(model, (x,), **asked).to_yaml() == expected.to_yaml()


@pytest.mark.quick("mixture-*")
@pytest.mark.parametrize(
    ("name", "plan", "length"),
    [("mixture", "fsdp", None), ("llama", "zero2", None), ("gpt2", "cp", 8), ("gpt2", "tp+sp", 8), ("gpt2", "pp", 8)],
)
def test_ranks_train_as_without_one(name, plan, length):
    for worst in on_ranks(ranks.on_another_default_device, 2, args=(name, plan, MESHES[plan], length)):
        assert worst < 1e-9
