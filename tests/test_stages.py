"""Stage splits as a graph pass: where models are cut, what crosses, and what each stage computes; in one process."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import fx, nn

import shardgraph
from shardgraph import Pipeline, Plan, PlanError, preset, stage
from shardgraph.capture.capture import capture
from shardgraph.ir import Accumulated, Gradient, Parameter, collectives, outputs, placeholders
from shardgraph.ir.attributes import REDUCES
from shardgraph.passes.lowering import lower
from shardgraph.passes.pipeline.cuts import cut_points
from shardgraph.passes.program import Program
from shardgraph.plans.shards import named_shapes
from shardgraph.runtime.pipeline.microbatches import microbatches
from shardgraph.search.stages import place_stages
from tests import test_analysis
from tests.test_analysis import llama, text
from tests.zoo import UNet, make

pytestmark = pytest.mark.usefixtures("shared_captures")


def gpt2(layers: int) -> nn.Module:
    """A GPT-2 with weights."""
    model = test_analysis.gpt2(layers).to_empty(device="cpu")
    torch.manual_seed(0)
    model.init_weights()
    return model


def words(rows: int) -> dict[str, torch.Tensor]:
    ids = torch.randint(61, (rows, 8), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


def cut(model: nn.Module, call: dict, plan: str, mesh: dict[str, int], pipeline: Pipeline) -> Program:
    joint = capture(model, (), call, device=torch.device("cpu"))
    shapes = named_shapes(model)
    return lower(joint, place_stages(joint, preset(plan, mesh, pipeline), shapes), shapes)


def verified(name: str, plan: str, mesh: dict[str, int], pipeline: Pipeline, rows: int = 8) -> shardgraph.verify:
    model, (args, kwargs) = make(name, rows)
    wanted = preset(plan, mesh, pipeline)
    return shardgraph.verify(model, args, wanted, example_kwargs=kwargs, steps=3, fp64=True)


# -- equal to the unsharded model ------------------------------------------------------------------------------


@pytest.mark.quick("odd-mlp", "unet")
@pytest.mark.parametrize("name", ["odd-mlp", "unet", "conv-batch-norm", pytest.param("t5", marks=pytest.mark.slow)])
def test_stages_compute_what_the_model_does(name):
    verified(name, "pp", {"pp": 3}, Pipeline(4)).raise_if_failed()


@pytest.mark.quick("conv-batch-norm")
@pytest.mark.parametrize("name", ["conv-batch-norm", "tied-transformer"])
def test_stages_that_are_computed_again_do_too(name):
    verified(name, "pp", {"pp": 2}, Pipeline(4, checkpoint="except_last")).raise_if_failed()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("plan", "mesh"),
    [
        ("pp+fsdp+tp", {"pp": 2, "dp": 2, "tp": 2}),
        pytest.param("pp+hsdp", {"pp": 2, "dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.slow),
        ("pp+zero1", {"pp": 2, "dp": 2}),
        ("pp+tp+sp", {"pp": 2, "tp": 2}),
    ],
)
def test_stages_are_divided_further_under_every_other_plan(plan, mesh):
    verified("gpt2", plan, mesh, Pipeline(2, checkpoint="always")).raise_if_failed()


@pytest.mark.slow
def test_the_last_microbatch_may_be_smaller():
    verified("odd-mlp", "pp", {"pp": 2}, Pipeline(4), rows=7).raise_if_failed()


@pytest.mark.slow
def test_frozen_layers_get_no_backward():
    model = gpt2(4)
    for parameter in (*model.transformer.wte.parameters(), *model.transformer.h[:2].parameters()):
        parameter.requires_grad_(False)
    model.transformer.wpe.requires_grad_(False)
    plan = preset("pp", {"pp": 2}, Pipeline(2, stages=("transformer.h.2",)))
    program = cut(model, text(4), "pp", {"pp": 2}, Pipeline(2, stages=("transformer.h.2",)))
    assert program.stages[0].kept.backward is None
    assert program.stages[0].returned == []
    shardgraph.verify(model, (), plan, example_kwargs=words(4), fp64=True).raise_if_failed()


# -- where it is cut -------------------------------------------------------------------------------------------


def test_a_cut_between_layers_sends_hidden_states_and_nothing_else():
    model = llama(4)
    program = cut(model, text(2), "pp", {"pp": 2}, Pipeline(2, stages=("model.layers.2",)))
    received = program.stages[1].received
    hidden = (*text(2)["input_ids"].shape, model.config.hidden_size)
    assert [tuple(each.shape) for each in received] == [hidden]
    assert [tuple(each.shape) for each in program.stages[0].returned] == [hidden]


class Doubled(torch.autograd.Function):
    """``x @ weight * 2``, whose backward computes from saved values before it uses a gradient."""

    @staticmethod
    def forward(ctx, x, weight):
        ctx.save_for_backward(x, weight)
        return x @ weight * 2

    @staticmethod
    def backward(ctx, gradient):
        x, weight = ctx.saved_tensors
        return gradient @ (weight.t() * 2), (x.t() * 2) @ gradient


class Doubling(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return Doubled.apply(x, self.weight).tanh()


def test_the_backward_of_an_autograd_function_is_in_the_stage_of_its_forward():
    model = nn.Sequential(*(Doubling() for _ in range(4)))
    plan = preset("pp", {"pp": 2}, Pipeline(2, stages=("2",)))
    joint = capture(model, (torch.randn(2, 4, requires_grad=True),), {}, device=torch.device("cpu"))
    program = lower(joint, plan, named_shapes(model))
    assert [tuple(each.shape) for each in program.stages[1].received] == [(2, 4)]
    assert [tuple(each.shape) for each in program.stages[0].returned] == [(2, 4)]


def test_a_layer_that_begins_a_stage_has_its_weight_there_alone():
    model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
    joint = capture(model, (torch.randn(2, 4),), {}, device=torch.device("cpu"))
    plan = preset("pp", {"pp": 2}, Pipeline(2, stages=("1",)))
    assert lower(joint, plan, named_shapes(model)).owners["1.weight"] == (1,)


def test_skip_connections_are_handed_on_through_the_stages_between():
    joint = capture(UNet(), (torch.randn(2, 3, 8, 8),), {}, device=torch.device("cpu"))
    shapes = named_shapes(UNet())
    program = lower(joint, preset("pp", {"pp": 3}, Pipeline(3, stages=("middle", "up.1"))), shapes)
    passed = [{tuple(each.shape) for each in program.stages[number].received} for number in (1, 2)]
    assert (2, 4, 8, 8) in passed[0] & passed[1]


@pytest.mark.slow
def test_parameters_of_a_tied_layer_are_in_both_stages_and_their_gradient_in_parts():
    program = cut(gpt2(2), text(2), "pp", {"pp": 2}, Pipeline(2, stages=("transformer.h.1",)))
    assert program.owners["transformer.wte.weight"] == (0, 1)
    for each in program.stages:
        given = {role.of.fqn for role, _ in outputs(each.kept.backward) if isinstance(role, Gradient)}
        assert "transformer.wte.weight" in given


@pytest.mark.slow
def test_annotations_name_the_stages():
    model = gpt2(4)
    shardgraph.annotate(model, {"transformer.h.1": stage(1), "transformer.h.3": stage(2), "transformer.wte": stage(0)})
    report = shardgraph.verify(model, (), preset("pp", {"pp": 3}, Pipeline(4)), example_kwargs=words(4), fp64=True)
    assert report.ok
    assert report.plan.pipeline.stages == ("transformer.h.1", "transformer.h.3")


@pytest.mark.slow
def test_balance_counts_layers_of_the_longest_stack():
    joint = capture(gpt2(6), (), text(2), device=torch.device("cpu"))
    plan = preset("pp", {"pp": 3}, Pipeline(3, balance=[1, 3, 2]))
    assert place_stages(joint, plan, named_shapes(gpt2(6))).pipeline.stages == ("transformer.h.1", "transformer.h.4")


def test_a_pipeline_of_a_plan_round_trips_through_yaml():
    plan = preset("pp+fsdp", {"pp": 2, "dp": 2}, Pipeline(8, "zbv", stages=("a", "b", "c"), checkpoint="always"))
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert "4 stages, zbv, 8 microbatches" in str(plan)


def test_what_counts_batches_does_not_draw_the_backward_of_the_layer_before_into_its_stage():
    model = nn.Sequential(nn.BatchNorm2d(3), nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4), nn.Conv2d(4, 2, 3))
    joint = capture(model, (torch.randn(2, 3, 8, 8),), {}, device=torch.device("cpu"))
    program = lower(joint, preset("pp", {"pp": 2}, Pipeline(2, stages=("2",))), named_shapes(model))
    assert program.owners["1.weight"] == (0,)


# -- what a step does once -------------------------------------------------------------------------------------


def test_gradients_are_reduced_once_a_step_and_not_for_every_microbatch():
    program = cut(gpt2(2), text(2), "pp+fsdp", {"pp": 2, "dp": 2}, Pipeline(2, stages=("transformer.h.1",)))
    for each in program.stages:
        assert not [node for node in each.kept.backward.graph.nodes if node in REDUCES]
        taken = {role.of for role in placeholders(each.reduce) if isinstance(role, Accumulated)}
        assert taken == {Parameter(fqn) for fqn in each.parameters}


def test_parameters_that_are_kept_gathered_are_gathered_once_a_step():
    program = cut(gpt2(2), text(2), "pp+zero2", {"pp": 2, "dp": 2}, Pipeline(2, stages=("transformer.h.1",)))
    for each in program.stages:
        gathered = [node for node in placeholders(each.gather) if isinstance(node, Parameter)]
        assert {role.fqn for role in gathered} == {*each.parameters} and list(collectives(each.gather))
        assert not list(collectives(each.kept.forward))


# -- backward in two halves ------------------------------------------------------------------------------------


def products(gm: fx.GraphModule) -> int:
    return sum(node.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default) for node in gm.graph.nodes)


@pytest.mark.slow
def test_the_first_half_of_backward_leaves_the_products_of_weight_gradients_to_the_second():
    program = cut(gpt2(4), text(2), "pp", {"pp": 2}, Pipeline(2, stages=("transformer.h.2",)))
    inputs, weights = program.stages[1].kept.parts
    whole = products(program.stages[1].kept.backward)
    # Every linear layer has one product for its input and one for its weight.
    assert products(inputs) == products(weights) == whole // 2
    assert {type(role) for role, _ in outputs(weights)} == {Gradient}


# -- microbatches ----------------------------------------------------------------------------------------------


def test_the_rows_of_microbatches_differ_by_at_most_one():
    call = ((torch.arange(7),), {"mask": torch.ones(3, 3), "scale": 2})
    cut_up = microbatches(call, 4)
    assert [args[0].tolist() for args, _ in cut_up] == [[0, 1], [2, 3], [4, 5], [6]]
    assert all(kwargs["mask"].shape == (3, 3) and kwargs["scale"] == 2 for _, kwargs in cut_up)


# -- what cannot be --------------------------------------------------------------------------------------------


def test_a_batch_of_fewer_rows_than_microbatches_is_refused():
    with pytest.raises(PlanError, match=r"a batch of 3 rows cannot be cut into 4 microbatches: give it 4 rows or more"):
        microbatches(((torch.zeros(3),), {}), 4)


def test_a_batch_that_does_not_divide_is_cut_into_as_many():
    assert [len(args[0]) for args, _ in microbatches(((torch.zeros(6),), {}), 4)] == [2, 2, 1, 1]


def test_more_stages_than_places_to_cut_are_refused():
    model = nn.Sequential(nn.Linear(2, 2), nn.ReLU())
    with pytest.raises(PlanError, match=r"4 stages take 3 cuts .* the model has 1, before"):
        shardgraph.verify(model, (torch.randn(8, 2),), preset("pp", {"pp": 4}, Pipeline(8)))


def test_a_stage_that_begins_with_no_module_names_the_nearest():
    with pytest.raises(PlanError, match=r"'transformer.h.9'.*transformer.h"):
        cut(gpt2(2), text(2), "pp", {"pp": 2}, Pipeline(2, stages=("transformer.h.9",)))


@pytest.mark.slow
def test_stages_out_of_order_are_refused():
    with pytest.raises(PlanError, match=r"'transformer.h.0' would be empty or before"):
        cut(gpt2(2), text(2), "pp", {"pp": 3}, Pipeline(3, stages=("transformer.h.1", "transformer.h.0")))


@pytest.mark.slow
def test_annotations_that_contradict_each_other_are_named():
    model = gpt2(4)
    shardgraph.annotate(model, {"transformer.h.1": stage(2), "transformer.h.2": stage(1)})
    with pytest.raises(PlanError, match=r"'transformer.h.2': stage\(1\) and 'transformer.h.1': stage\(2\) contradict"):
        shardgraph.verify(model, (), preset("pp", {"pp": 3}, Pipeline(4)), example_kwargs=words(4))


class Counter(nn.Module):
    """Counts calls in one layer and uses the count of the next call in another."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(2, 2), nn.Linear(2, 2)
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.second(self.first(x) / (1 + self.calls))
        self.calls.add_(1)
        return x


def test_a_buffer_that_one_stage_writes_and_another_reads_is_refused():
    joint = capture(Counter(), (torch.randn(2, 2),), {}, device=torch.device("cpu"))
    plan = preset("pp", {"pp": 2}, Pipeline(2, stages=("second",)))
    with pytest.raises(PlanError, match=r"'calls' is written in stage 1 and read in stage 0"):
        lower(joint, plan, named_shapes(Counter()))


@pytest.mark.slow
def test_a_balance_that_does_not_add_up_is_refused():
    joint = capture(gpt2(3), (), text(2), device=torch.device("cpu"))
    with pytest.raises(PlanError, match=r"balance \[1, 1\] gives 2 layers to 2 stages, and the model has 3"):
        place_stages(joint, preset("pp", {"pp": 2}, Pipeline(2, balance=[1, 1])), named_shapes(gpt2(3)))


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"schedule": "zvb"}, r"no pipeline schedule 'zvb'.*did you mean 'zbv'"),
        ({"microbatches": -1}, r"microbatches is -1; it may be a whole number from 1"),
        ({"checkpoint": "sometimes"}, r"checkpoint is 'sometimes'"),
        ({"stages": ["a"], "balance": [1, 2]}, "instead of stages"),
        (
            {"schedule": "zbv", "ranks": 2, "stages": ["a"]},
            "each rank has 2 of its stages, so 4 would do",
        ),
    ],
)
def test_a_pipeline_that_cannot_be_says_what_may(wrong, message):
    with pytest.raises(PlanError, match=message):
        Pipeline(**wrong)


def test_the_axis_of_a_pipeline_is_the_outermost():
    with pytest.raises(PlanError, match=r"give mesh=\{'pp': 2, 'dp': 2\}"):
        preset("pp+fsdp", {"dp": 2, "pp": 2})


def test_one_process_cuts_its_batch_into_microbatches():
    model, (args, kwargs) = make("odd-mlp", 8)
    original = copy.deepcopy(model)

    def loss(output: dict, target: torch.Tensor) -> torch.Tensor:
        return (output["out"] - target).square().mean()

    target = torch.randn(8, 2)
    sharded = shardgraph.compile(
        model,
        "pp",
        pipeline=Pipeline(4),
        loss_fn=loss,
        example_inputs=args,
        example_kwargs={**kwargs, "target": target},
    )
    mine = sharded.train_step(*args, **kwargs, target=target)
    theirs = loss(original(*args, **kwargs), target)
    theirs.backward()
    torch.testing.assert_close(mine, theirs.detach())
    for (name, a), b in zip(sharded.named_parameters(), original.parameters(), strict=True):
        if b.grad is not None:
            torch.testing.assert_close(a.grad, b.grad, msg=name)


def test_cut_points_are_named_by_the_outermost_module_that_begins_there():
    joint = capture(gpt2(2), (), text(2), device=torch.device("cpu"))
    names = [point.name for point in cut_points(joint.module)]
    assert "transformer.h.1" in names
    assert "transformer.h.1.ln_1" not in names
