"""verify: every plan on every model of the zoo, on all ranks in this process; and that it catches what is wrong."""

from __future__ import annotations

import importlib
from dataclasses import replace

import pytest
import torch
from torch import fx, nn

import shardgraph
from shardgraph import ir
from shardgraph.checks.lockstep import run_lockstep
from shardgraph.ir.attributes import EQUALS, MADE_BY, REDUCES
from shardgraph.passes import lowering
from shardgraph.plans.batch import Batch
from tests.zoo import ZOO, make

pytestmark = pytest.mark.usefixtures("shared_captures")

PLANS = ["ddp", "zero1", "zero2", "fsdp"]
LONG = ("gpt2", "bert", "vit", "t5", "mixtral")  # models whose verification takes ten seconds or more


@pytest.mark.quick("odd-mlp-ddp-3", "odd-mlp-fsdp-3", "odd-mlp-zero1-3", "odd-mlp-zero2-3", "tied-transformer-fsdp-3")
@pytest.mark.parametrize("world_size", [2, 3, pytest.param(4, marks=pytest.mark.slow)])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["odd-mlp", "conv-batch-norm", "tied-transformer"])
def test_five_steps_equal_the_original(name, plan, world_size):
    model, (args, kwargs) = make(name, 2 * world_size)
    report = shardgraph.verify(model, args, plan, world_size=world_size, example_kwargs=kwargs, steps=5, fp64=True)
    assert report.ok, str(report)


@pytest.mark.quick("mixture", "odd-mlp", "conv-batch-norm")
@pytest.mark.parametrize("name", [pytest.param(name, marks=pytest.mark.slow) if name in LONG else name for name in ZOO])
def test_hybrid_sharding_equals_the_original(name):
    model, (args, kwargs) = make(name, 8)
    mesh = {"dp_replicate": 2, "dp_shard": 2}
    report = shardgraph.verify(model, args, "hsdp", mesh=mesh, example_kwargs=kwargs, steps=5, fp64=True)
    assert report.ok, str(report)


@pytest.mark.quick("gpt2-*")
@pytest.mark.parametrize(
    ("name", "plan", "world_size"),
    [("llama", "fsdp", 3), ("gpt2", "zero1", 3), ("bert", "zero2", 4), ("vit", "fsdp", 3)],
)
def test_five_steps_equal_the_models_of_transformers(name, plan, world_size):
    model, (args, kwargs) = make(name, 2 * world_size)
    report = shardgraph.verify(model, args, plan, world_size=world_size, example_kwargs=kwargs, steps=5, fp64=True)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("world_size", [2, 3, 4])
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", ["llama", "gpt2", "bert", "vit", "t5"])
def test_every_plan_at_every_size_equals_the_models_of_transformers(name, plan, world_size):
    test_five_steps_equal_the_models_of_transformers(name, plan, world_size)


@pytest.mark.slow
def test_single_precision_passes_too():
    model, (args, kwargs) = make("tied-transformer", 4)
    report = shardgraph.verify(model, args, "fsdp", example_kwargs=kwargs, steps=3)
    assert report.ok, str(report)


def test_a_batch_that_does_not_divide_is_given_whole_to_every_rank():
    model, (args, kwargs) = make("odd-mlp", 3)
    report = shardgraph.verify(model, args, "fsdp", example_kwargs=kwargs)
    assert report.ok and "whole batch" in str(report)


def test_the_model_is_left_as_it_was():
    model, (args, kwargs) = make("conv-batch-norm", 4)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    shardgraph.verify(model, args, "fsdp", example_kwargs=kwargs)
    torch.testing.assert_close(dict(model.state_dict()), before, rtol=0, atol=0)


ALONE = replace(shardgraph.preset("fsdp", {"dp": 2}), bucket=0)
"""A collective for each parameter."""


def _tampered(monkeypatch, change):
    """Make every program that is built from now on wrong, by ``change(forward, backward)``."""
    build = lowering.lower

    def wrong(*args, **kwargs):
        program = build(*args, **kwargs)
        change(program.forward, program.backward)
        return program

    monkeypatch.setattr(importlib.import_module("shardgraph.api.verify"), "lower", wrong)


def _verify():
    model, (args, kwargs) = make("odd-mlp", 4)
    return shardgraph.verify(model, args, ALONE, example_kwargs=kwargs, fp64=True)


class Normalized(torch.nn.Module):
    """Layers before a norm, whose outputs have a mean square, or a sum over rows, that does not depend on them."""

    def __init__(self, norm: str) -> None:
        super().__init__()
        self.first, self.second = torch.nn.Linear(8, 16), torch.nn.Linear(16, 8)
        self.norm = torch.nn.LayerNorm(8) if norm == "layer" else torch.nn.BatchNorm1d(8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.second(self.first(x).tanh()))


def _with_gradient_times(name, factor):
    """A change that makes one gradient ``factor`` times as large."""

    def change(_forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        results = ir.outputs(backward)
        gradient = dict(results)[ir.Gradient(ir.Parameter(name))]
        with backward.graph.inserting_before(backward.graph.output_node()):
            wrong = backward.graph.call_function(torch.ops.aten.mul.Tensor, (gradient, factor))
        wrong.meta["val"] = gradient.meta["val"]
        ir.set_outputs(backward, [(role, wrong if value is gradient else value) for role, value in results])

    return change


@pytest.mark.parametrize("norm", ["layer", "batch"])
@pytest.mark.parametrize("name", ["first.weight", "second.weight", "norm.weight"])
def test_one_gradient_that_is_too_large_is_caught_whatever_norm_comes_after(monkeypatch, name, norm):
    model, inputs = Normalized(norm), (torch.randn(6, 8),)
    assert shardgraph.verify(model, inputs, "ddp").ok
    _tampered(monkeypatch, _with_gradient_times(name, 4))
    report = shardgraph.verify(model, inputs, "ddp")
    assert not report.ok and report.worst[0] == f"gradient of {name} at step 0"


@pytest.mark.parametrize("norm", ["layer", "batch"])
def test_every_parameter_that_has_an_effect_has_a_gradient_that_is_compared(norm):
    coverage = shardgraph.verify(Normalized(norm), (torch.randn(6, 8),), "fsdp").coverage
    without_effect = {"second.bias"}  # before a batch norm
    assert coverage.share > 0.9 and set(coverage.hidden) <= without_effect, str(coverage)


@pytest.mark.parametrize("seed", range(5))
def test_a_narrow_output_hides_no_parameter_behind_a_norm(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 4))
    report = shardgraph.verify(model, (torch.randn(8, 4),), "fsdp", fp64=True)
    assert report.ok and not report.coverage.hidden, str(report)


def test_what_was_not_compared_is_said_and_too_little_is_not_enough():
    class Hidden(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.loud, self.unused = torch.nn.Linear(8, 8, bias=False), torch.nn.Linear(8, 8)
            self.quiet, self.frozen = torch.nn.Parameter(torch.zeros(8)), torch.nn.Linear(8, 8).requires_grad_(False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.loud(x) + self.quiet * 1e6  # whose mean is taken off again: of its gradient rounding is left
            return self.frozen(y - y.mean(0))

    torch.manual_seed(0)
    report = shardgraph.verify(Hidden(), (torch.randn(14, 8),), "fsdp", fp64=True)
    assert not report.ok and report.worst[1] < report.tolerance
    assert "NOT SHOWN EQUAL" in str(report) and "too small to be: quiet" in str(report)
    assert "does not reach unused.weight" in str(report) and "frozen: frozen.weight" in str(report)


class Quiet(torch.nn.Module):
    """Most parameters have gradients that are small and no rounding."""

    def __init__(self) -> None:
        super().__init__()
        self.loud, self.quiet = torch.nn.Linear(8, 8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.loud(x) + self.quiet(x.tanh()) * 1e-20


def test_small_gradients_that_are_no_rounding_are_compared_by_their_own_sizes(monkeypatch):
    torch.manual_seed(0)
    model, inputs = Quiet(), (torch.randn(14, 8),)
    report = shardgraph.verify(model, inputs, "fsdp")
    assert report.ok and report.coverage.share == 1, str(report)
    _tampered(monkeypatch, _with_gradient_times("quiet.weight", 1.0001))
    report = shardgraph.verify(model, inputs, "fsdp")
    assert not report.ok and report.worst[0] == "gradient of quiet.weight at step 0", str(report)


@pytest.mark.parametrize("plan", ["tp", "fsdp+tp"])
def test_views_that_are_returned_are_of_what_the_program_has_in_another_layout(plan):
    class Model(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.norm = torch.nn.Linear(5, 4), torch.nn.GroupNorm(2, 4)
            self.convolution = torch.nn.Conv1d(4, 4, 3, padding=1)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, ...]:
            x = self.norm(self.enter(x).transpose(1, 2)).transpose(1, 2)
            y = x + self.convolution(x.transpose(1, 2)).relu().transpose(1, 2)
            return y, y[:, 0], y.transpose(0, 1)

    mesh = {"dp": 2, "tp": 2} if plan == "fsdp+tp" else {"tp": 2}
    report = shardgraph.verify(Model(), (torch.randn(4, 3, 5),), plan, mesh=mesh, fp64=True)
    assert report.ok, report


def test_a_model_without_trained_parameters_is_compared_by_its_outputs():
    model = torch.nn.Linear(8, 8).requires_grad_(False)
    assert shardgraph.verify(model, (torch.randn(4, 8),), "fsdp").ok


@pytest.mark.parametrize("steps", [0, -1, 1.5])
def test_no_steps_are_refused(steps):
    with pytest.raises(shardgraph.ShardGraphError, match="whole number from 1"):
        shardgraph.verify(torch.nn.Linear(4, 4), (torch.randn(4, 4),), "fsdp", steps=steps)


def test_a_model_that_diverges_is_not_compared():
    def wild(parameters):
        return torch.optim.SGD(parameters, lr=1e300)

    with pytest.raises(shardgraph.ShardGraphError, match=r"gradient of .* is not finite at step 1.*or steps=1"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
        shardgraph.verify(model, (torch.randn(4, 4),), "fsdp", optimizer=wild, steps=4, fp64=True)


def test_the_rounding_of_what_forward_casts_to_single_precision_is_not_blown_up_by_the_optimizer():
    class Router(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = torch.nn.Linear(16, 64), torch.nn.Linear(64, 16)
            self.shift, self.weight = torch.nn.Parameter(torch.ones(())), torch.nn.Parameter(torch.randn(16, 16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits = torch.nn.functional.linear(self.up(x).relu().float(), self.down.weight.float())
            return (logits + self.shift.float()).softmax(-1).to(x.dtype) @ self.weight  # to which shift is nothing

    torch.manual_seed(0)
    report = shardgraph.verify(Router(), (torch.randn(8, 16),), "tp", fp64=True, steps=2)
    assert report.ok, str(report)


def test_rounding_is_settled_in_double_precision():
    model, inputs = Normalized("layer"), (torch.randn(6, 8),)
    report = shardgraph.verify(model, inputs, "tp", tolerance=1e-12)
    assert report.ok and report.settled and "in double precision" in str(report)


def test_buffers_are_compared_on_every_rank(monkeypatch):
    def change(forward: fx.GraphModule, _backward: fx.GraphModule) -> None:
        averages = [node for node in forward.graph.nodes if MADE_BY.get(node) == "average-buffers"]
        for node in averages:
            if ir.is_collective(node) or node.target is ir.WAIT:
                node.replace_all_uses_with(node.args[0])
            elif node.target is torch.ops.aten.div.Tensor:
                node.args = (node.args[0], 1)

    model, (args, kwargs) = make("conv-batch-norm", 4)
    _tampered(monkeypatch, change)
    apart = replace(shardgraph.preset("fsdp", {"dp": 2}), bucket=0)  # each average has nodes of its own
    report = shardgraph.verify(model, args, apart, example_kwargs=kwargs)
    assert not report.ok and report.worst[0].startswith("buffer")


def test_replicas_are_compared_on_every_rank(monkeypatch):
    def change(_forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        node = next(
            node for node in backward.graph.nodes if node.target is torch.ops.aten.div.Tensor and node in REDUCES
        )
        last = torch.ops.aten.mul.Tensor  # by 0 on the first rank alone
        with backward.graph.inserting_after(node):
            on_rank = backward.graph.call_function(ir.first_row, (1, "dp"))
        with backward.graph.inserting_after(on_rank):
            wrong = backward.graph.call_function(last, (node, on_rank))
        wrong.meta["val"] = node.meta["val"]
        node.replace_all_uses_with(wrong, delete_user_cb=lambda user: user is not wrong)

    model, (args, kwargs) = make("odd-mlp", 4)
    _tampered(monkeypatch, change)
    assert not shardgraph.verify(model, args, "ddp", example_kwargs=kwargs).ok


def test_a_wrong_mean_is_caught_and_blamed_on_the_pass(monkeypatch):
    def change(_forward: fx.GraphModule, backward: fx.GraphModule) -> None:
        node = next(n for n in backward.graph.nodes if n.target is torch.ops.aten.div.Tensor and n in REDUCES)
        node.args = (node.args[0], 3)

    _tampered(monkeypatch, change)
    report = _verify()
    assert not report.ok
    assert report.first_divergence.made_by == "reduce-gradients"
    with pytest.raises(shardgraph.ShardGraphError, match=r"NOT EQUAL.*(?s:.*)first divergence.*reduce-gradients"):
        report.raise_if_failed()


def test_a_wrong_gather_is_caught_and_blamed_on_the_pass(monkeypatch):
    def change(forward: fx.GraphModule, _backward: fx.GraphModule) -> None:
        gathered = next(n for n in forward.graph.nodes if n in EQUALS and n.op == "call_function")
        with forward.graph.inserting_before(gathered):
            wrong = forward.graph.call_function(torch.ops.aten.mul.Tensor, (gathered.args[0], 2))
        gathered.update_arg(0, wrong)

    _tampered(monkeypatch, change)
    report = _verify()
    assert not report.ok and report.first_divergence.made_by == "shard-parameters"


def test_a_wrong_operation_of_the_model_is_named_with_its_line(monkeypatch):
    def change(forward: fx.GraphModule, _backward: fx.GraphModule) -> None:
        node = next(n for n in forward.graph.nodes if n.target is torch.ops.aten.gelu.default)
        node.target = torch.ops.aten.relu.default

    _tampered(monkeypatch, change)
    divergence = _verify().first_divergence
    assert divergence.node == "gelu" and "zoo.py:" in divergence.source


TARGETED = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 5))
OF_CLASSES = {"example_kwargs": {"target": torch.arange(8) % 5}, "loss_fn": nn.functional.cross_entropy}


@pytest.mark.quick("fsdp-*", "tp-*", "pp-*")
@pytest.mark.parametrize(
    ("plan", "mesh"),
    [("fsdp", {"dp": 2}), ("zero2", {"dp": 4}), ("tp", {"tp": 2}), ("pp", {"pp": 2}), ("pp+fsdp", {"pp": 2, "dp": 2})],
)
def test_a_loss_with_a_target_is_that_of_the_program_as_for_plan_and_analyze(plan, mesh):
    x = torch.randn(8, 8)
    report = shardgraph.verify(TARGETED, (x,), plan, mesh=mesh, steps=2, **OF_CLASSES)
    assert report.ok and report.coverage.share == 1.0, str(report)


def test_a_loss_without_a_signature_takes_the_target():
    call = {"example_kwargs": {"target": torch.randn(8)}, "loss_fn": torch.dot}
    model = nn.Sequential(nn.Linear(8, 1), nn.Flatten(0))
    assert shardgraph.verify(model, (torch.randn(8, 8),), "ddp", mesh={"dp": 2}, **call).ok


def test_the_loss_with_a_target_is_of_each_call_of_a_step():
    batch = replace(shardgraph.preset("zero2", {"dp": 2}), batch=Batch(8, 2))
    report = shardgraph.verify(TARGETED, (torch.randn(8, 8),), batch, **OF_CLASSES)
    assert report.ok and "in 2 calls of each" in str(report)


def test_statistics_of_all_rows_leave_each_rank_its_part_of_the_target():
    model = nn.Sequential(nn.Linear(8, 16), nn.SyncBatchNorm(16), nn.Linear(16, 5))
    assert shardgraph.verify(model, (torch.randn(8, 8),), "ddp", mesh={"dp": 2}, **OF_CLASSES).ok


def test_a_wrong_gradient_of_a_loss_with_a_target_is_caught(monkeypatch):
    _tampered(monkeypatch, _with_gradient_times("2.weight", 1.01))
    report = shardgraph.verify(TARGETED, (torch.randn(8, 8),), "ddp", mesh={"dp": 2}, **OF_CLASSES)
    assert not report.ok and max(report.errors, key=report.errors.get) == "gradient of 2.weight at step 0"


def test_a_target_is_the_model_s_own_where_the_loss_takes_the_output_alone():
    class Own(nn.Linear):
        def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
            return super().forward(x) - target

    call = {"example_kwargs": {"target": torch.randn(8, 5)}, "loss_fn": lambda output: output.square().mean()}
    assert shardgraph.verify(Own(8, 5), (torch.randn(8, 8),), "fsdp", **call).ok


class Aside(nn.Module):
    """Returns beside its loss what no part of it is computed from."""

    def __init__(self) -> None:
        super().__init__()
        self.trunk, self.aside = nn.Linear(8, 8), nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Softplus())

    def forward(self, x: torch.Tensor) -> dict[str, torch.Tensor]:
        x = self.trunk(x)
        return {"loss": x.square().mean(), "aside": self.aside(x)}


@pytest.mark.parametrize("plan", ["ddp", "zero2", "fsdp", "tp", Batch(4, 2)], ids=str)
def test_parameters_that_only_other_outputs_than_the_loss_need_have_no_gradient_on_either_side(plan):
    calls = isinstance(plan, Batch)
    chosen = replace(shardgraph.preset("fsdp", {"dp": 2}), batch=plan) if calls else plan
    report = shardgraph.verify(Aside(), (torch.randn(4, 8),), chosen, mesh={"tp": 2} if plan == "tp" else {"dp": 2})
    assert report.ok, str(report)
    assert {*report.coverage.unreached} == {f"aside.{name}" for name, _ in Aside().aside.named_parameters()}


def test_ranks_that_bring_different_shapes_to_a_collective_are_told_so():
    model, (args, kwargs) = make("odd-mlp", 4)
    graph = lowering.build_program(model, ALONE, args, kwargs).forward
    inputs = [
        {role: torch.zeros(node.meta["val"].shape) for role, node in ir.placeholders(graph).items()} for _ in range(2)
    ]
    inputs[1][ir.Parameter("up.weight")] = torch.zeros(4, 6)
    with pytest.raises(shardgraph.CollectiveError, match=r"all_gather_into_tensor of up\.weight .*different shapes"):
        run_lockstep(graph, (("dp", 2),), inputs)


def test_a_plan_file_is_verified_on_the_mesh_that_it_has(tmp_path):
    shardgraph.preset("fsdp", {"dp": 4}).save(tmp_path / "plan.yaml")
    report = shardgraph.verify(torch.nn.Linear(4, 4), (torch.randn(4, 4),), tmp_path / "plan.yaml")
    assert report.ok and report.plan.whole_mesh == (("dp", 4),)


def test_a_mesh_that_the_plan_is_not_for_is_refused():
    plan = shardgraph.preset("fsdp", {"dp": 2})
    with pytest.raises(shardgraph.PlanError, match="is for the mesh"):
        shardgraph.verify(torch.nn.Linear(4, 4), (torch.randn(4, 4),), plan, mesh={"dp": 4})


def test_in_double_precision_attention_leaves_no_weight_out():
    layer = torch.nn.TransformerEncoderLayer(8, 2, 16, 0.0, batch_first=True)
    report = shardgraph.verify(layer, (torch.randn(2, 4, 8),), "single", fp64=True)
    assert report.coverage.noise == 0
