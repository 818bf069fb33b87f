"""Tensors of the user's own classes: those that behave as tensors are taken, others refused by name."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import CaptureError
from tests.standing import on_ranks


class Doubled(torch.Tensor):
    """A weight that counts twice in a linear layer."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs or {})
        return 2 * result if func is nn.functional.linear else result


class Named(torch.Tensor):
    """A tensor that is only called otherwise."""


class Marked(nn.Parameter):
    """A parameter with an attribute, as libraries mark them."""

    mark = 1


X = torch.randn(4, 8, generator=torch.Generator().manual_seed(0))


def with_weight(kind: type) -> nn.Module:
    """Layers of which the first has a weight of a class."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4))
    weight = model[0].weight.detach()
    model[0].weight = Marked(weight) if kind is Marked else nn.Parameter(weight.as_subclass(kind))
    return model


@pytest.mark.parametrize("kind", [Named, Marked])
def test_a_parameter_of_a_class_without_operations_is_trained_as_it_is(kind):
    plain, sharded = with_weight(torch.Tensor), shardgraph.compile(with_weight(kind), "single")
    for model in (plain, sharded):
        model(X).square().mean().backward()
    for one, other in zip(plain.parameters(), sharded.parameters(), strict=True):
        torch.testing.assert_close(torch.Tensor(other.grad), one.grad)


@pytest.mark.parametrize("call", [shardgraph.compile, shardgraph.verify, shardgraph.analyze, shardgraph.prove])
def test_a_parameter_with_operations_of_its_own_is_refused_by_name(call):
    given = {} if call is shardgraph.compile else {"example_inputs": (X,)}
    with pytest.raises(CaptureError, match=r"the parameter '0\.weight' is a Doubled.*0\.weight\.as_subclass"):
        call(with_weight(Doubled), plan="ddp", **given)


def test_so_is_a_buffer():
    model = nn.BatchNorm1d(8)
    model.running_mean = model.running_mean.as_subclass(Doubled)
    with pytest.raises(CaptureError, match="the buffer 'running_mean' is a Doubled"):
        shardgraph.compile(model, "single")


def test_so_is_a_wrapper_that_dispatches():
    from torch.testing._internal.two_tensor import TwoTensor

    model = nn.Linear(8, 8)
    model.weight = nn.Parameter(TwoTensor(model.weight.detach(), model.weight.detach()))
    with pytest.raises(CaptureError, match="the parameter 'weight' is a TwoTensor"):
        shardgraph.compile(model, "single")


def test_so_is_one_that_is_added_after_a_call():
    assert on_ranks(added_after_a_call) == ["the parameter '2.weight' is a Doubled"] * 2


def added_after_a_call() -> str:
    sharded = shardgraph.compile(with_weight(torch.Tensor), "fsdp", progress=False)
    sharded(X)
    torch.manual_seed(1)
    sharded[2].weight = nn.Parameter(torch.ones(4, 8).as_subclass(Doubled))
    try:
        sharded(X)
    except CaptureError as error:
        return str(error).partition(",")[0]
    return "it ran"


def test_so_is_an_input():
    sharded = shardgraph.compile(with_weight(torch.Tensor), "single")
    sharded(X)
    with pytest.raises(CaptureError, match=r"input 0 of the call is a Doubled.*as_subclass\(torch\.Tensor\)"):
        sharded(X.as_subclass(Doubled))
