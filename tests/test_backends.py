"""backend="inductor" trains as the eager one, says what it cannot compile, and needs a compiler."""

from __future__ import annotations

import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import fx, nn

import shardgraph
from shardgraph import Plan, ir, preset, torch_api
from shardgraph.ir.attributes import IN_PLACE, VALUE
from shardgraph.passes.lowering import build_program
from shardgraph.runtime.backends.regions import Region, Run, call_regions, regions_of
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


@pytest.mark.slow
@pytest.mark.parametrize("where", ["parameters", "activations"])
def test_computation_between_copies_to_the_host_is_compiled_too(where):
    for facts in on_ranks(backends.error, 2, args=("fsdp", 0.0, {"offload": where})):
        assert facts["losses"] < 1e-9 and facts["weights"] < 1e-9
        assert facts["warnings"] == []


@pytest.mark.slow
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


def test_what_inductor_raises_is_the_reason(monkeypatch):
    def failing(gm, inputs):
        raise NotImplementedError("no such kernel\nand more")

    monkeypatch.setattr("shardgraph.torch_api.compile_by_inductor", failing)
    model = shardgraph.compile(backends.Net(), "single", backend="inductor")
    told = r"operations of .*backends.py:\d+ .*run eagerly, since NotImplementedError: no such kernel$"
    with pytest.warns(UserWarning, match=told):
        model(torch.ones(2, 6)).sum().backward()
    assert model.first.weight.grad is not None


@pytest.mark.slow
def test_equal_layers_are_compiled_once(monkeypatch):
    compiled = {}
    for layers in (4, 8):
        graphs: list[fx.GraphModule] = []
        monkeypatch.setattr("shardgraph.torch_api.compile_by_inductor", _counting(graphs))
        sharded = shardgraph.compile(_encoder(layers), "single", backend="inductor")
        sharded(torch.randn(2, 3, 8)).square().mean().backward()
        compiled[layers] = len(graphs)
    assert 0 < compiled[8] == compiled[4] <= 8


def never_run(inputs: list[torch.Tensor]) -> Sequence[Any]:
    raise AssertionError("this test runs no graph")


def _encoder(layers: int) -> nn.Module:
    return nn.TransformerEncoder(nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True), layers)


def _counting(graphs: list[fx.GraphModule]) -> Callable[[fx.GraphModule, list[torch.Tensor]], Run]:
    def run_as_it_is(gm: fx.GraphModule, inputs: list[torch.Tensor]) -> Run:
        graphs.append(gm)
        return torch_api.boxed(gm)

    return run_as_it_is


def _halves(model: nn.Module, plan: Plan, *inputs: torch.Tensor) -> list[fx.GraphModule]:
    program = build_program(model, plan, inputs, {})
    return [program.forward, program.backward]


def _regions(gm: fx.GraphModule) -> list[Region]:
    return [unit for unit in regions_of(gm) if not isinstance(unit, fx.Node)]


@pytest.mark.slow
@pytest.mark.parametrize("bucket", [0, 1024])
def test_deeper_models_have_no_further_regions_to_compile(bucket):
    plan = replace(preset("fsdp", {"dp": 2}), bucket=bucket)
    for six, twelve in zip(*(_halves(_encoder(n), plan, torch.randn(2, 3, 8)) for n in (6, 12)), strict=True):
        few, many = (Counter(region.text() for region in _regions(gm)) for gm in (six, twelve))
        assert few.keys() == many.keys() and few.total() < many.total()


def test_collectives_are_called_in_the_order_of_the_schedule_between_regions():
    for gm in _halves(_encoder(3), replace(preset("fsdp", {"dp": 2}), bucket=4096), torch.randn(2, 3, 8)):
        expected = [node.name for node in gm.graph.nodes if ir.is_collective(node) or ir.is_wait(node)]
        called = call_regions(gm, lambda region: never_run)
        assert [node.name for node in called.graph.nodes if ir.is_collective(node) or ir.is_wait(node)] == expected
        assert expected and not any(ir.is_started(node) for region in _regions(gm) for node in region.nodes)


def test_modules_without_modules_in_them_are_compiled_together():
    plain = nn.Sequential(nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4), nn.GELU(), nn.Linear(4, 4))
    assert [len(_regions(gm)) for gm in _halves(plain, preset("single", {}), torch.randn(2, 4))] == [1, 1]


def test_what_functions_of_python_do_is_left_to_the_run():
    graph = fx.Graph()
    x = graph.placeholder("x")
    first = graph.call_function(torch.ops.aten.sin.default, (graph.call_function(torch.ops.aten.cos.default, (x,)),))
    graph.call_function(never_run, ([x],))
    last = graph.call_function(torch.ops.aten.sin.default, (graph.call_function(torch.ops.aten.cos.default, (first,)),))
    graph.output((last,))
    for node in (x, first, last, *first.all_input_nodes, *last.all_input_nodes):
        VALUE.set(node, torch.ones(2))
    assert [len(region.nodes) for region in _regions(fx.GraphModule({}, graph))] == [2, 2]


@pytest.mark.parametrize(("shared", "in_place"), [(False, True), (True, False)])
def test_an_all_reduce_works_in_place_unless_what_it_packs_is_read_elsewhere(shared, in_place):
    graph = fx.Graph()
    x = graph.placeholder("x")
    tensors = [graph.call_function(torch.ops.aten.sin.default, (x,)) for _ in range(2)]
    pack = graph.call_function(ir.buckets.pack, (tensors, 1))
    reduce = graph.call_function(ir.ALL_REDUCE, (pack, "sum", "0"))
    wait = graph.call_function(ir.WAIT, (reduce,))
    graph.output((wait, *tensors[: int(shared)]))
    for node in (x, *tensors):
        VALUE.set(node, torch.ones(2))
    for node in (pack, reduce, wait):
        VALUE.set(node, torch.ones(4))
    IN_PLACE.set(reduce, True)
    gm = fx.GraphModule({}, graph)
    called = call_regions(gm, lambda region: never_run)
    assert (next(iter(ir.collectives(called))).target is ir.ALL_REDUCE_) == in_place


def test_without_a_compiler_the_error_names_a_package(monkeypatch):
    monkeypatch.setattr("shardgraph.torch_api.cxx_compiler_error", lambda: "no g++ found")
    with pytest.raises(shardgraph.ShardGraphError, match=r"no compiler here \(no g\+\+ found\): install one, such as"):
        shardgraph.compile(nn.Linear(2, 2), "single", backend="inductor")
