"""backend="inductor" trains as the eager one, says what it cannot compile, and needs a compiler."""

from __future__ import annotations

import operator
import warnings

import pytest
import torch
from torch import fx, nn

import shardgraph
from shardgraph import ir
from shardgraph.ir.attributes import ROLE, VALUE
from shardgraph.runtime.backends import inductor
from tests import backends
from tests.standing import on_ranks
from tests.zoo import make

pytestmark = pytest.mark.timeout(280)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp", "zero1", "ddp"])
def test_compiled_graphs_train_as_those_that_run_eagerly(plan):
    for facts in on_ranks(backends.error, 2, args=(plan,)):
        assert facts["losses"] < 1e-9 and facts["weights"] < 1e-9
        assert facts["warnings"] == []


def test_dropout_draws_the_numbers_of_eager_mode():
    facts = backends.error("single", 0.5)
    assert facts["losses"] < 1e-9 and facts["weights"] < 1e-9 and facts["warnings"] == []


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_models_of_transformers_are_compiled(name):
    grads = []
    for backend in ("eager", "inductor"):
        torch.manual_seed(0)
        model, (args, kwargs) = make(name, 2)
        sharded = shardgraph.compile(model.eval(), "single", backend=backend)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="backend=")
            sharded(*args, **kwargs).loss.backward()
        grads.append([parameter.grad for parameter in sharded.parameters()])
    for ours, theirs in zip(*grads, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_graph_that_cannot_be_compiled_runs_eagerly_and_a_warning_says_why():
    graph = fx.Graph()
    x = graph.placeholder("x")
    ROLE.set(x, ir.Input(0))
    VALUE.set(x, 3)  # a number
    graph.output((graph.call_function(operator.neg, (x,)),))
    run = inductor.backend(fx.GraphModule({}, graph))
    with pytest.warns(UserWarning, match="a graph of 3 nodes runs eagerly, since its input 'x' is not a tensor"):
        assert list(run([3])) == [-3]


def test_what_inductor_raises_is_the_reason(monkeypatch):
    def failing(gm, inputs):
        raise NotImplementedError("no such kernel\nand more")

    monkeypatch.setattr("shardgraph.torch_api.compile_by_inductor", failing)
    model = shardgraph.compile(nn.Linear(2, 2), "single", backend="inductor")
    with pytest.warns(UserWarning, match="runs eagerly, since NotImplementedError: no such kernel$"):
        model(torch.ones(1, 2)).sum().backward()
    assert model.weight.grad is not None


def test_without_a_compiler_the_error_names_a_package(monkeypatch):
    monkeypatch.setattr("shardgraph.torch_api.cxx_compiler_error", lambda: "no g++ found")
    with pytest.raises(shardgraph.ShardGraphError, match=r"no compiler here \(no g\+\+ found\): install one, such as"):
        shardgraph.compile(nn.Linear(2, 2), "single", backend="inductor")
