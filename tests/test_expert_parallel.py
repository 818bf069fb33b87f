"""Experts divided among ranks with batches of their own: equal to the original, with four exchanges for each layer."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn
from transformers import MixtralConfig, MixtralForCausalLM

import shardgraph
from shardgraph import CaptureError, Plan, PlanError
from shardgraph.ir import ALL_TO_ALL, collectives, group_of
from shardgraph.nn import MoE
from shardgraph.passes.analysis.rows import node_wire_bytes
from shardgraph.passes.lowering import build_program
from shardgraph.passes.placing import place_operators
from shardgraph.passes.program import Program
from shardgraph.plans.plan import ParameterPlan
from shardgraph.plans.remembered import annotated
from shardgraph.plans.resolve import resolve_plan
from shardgraph.report.analysis import analyze_program
from tests import ranks
from tests.machines import toy_cluster
from tests.standing import on_ranks
from tests.zoo import make, mixtral

pytestmark = pytest.mark.usefixtures("shared_captures")

MESHES = {
    "ep": {"ep": 2},
    "ddp+ep": {"dp": 2, "ep": 2},
    "fsdp+ep": {"dp": 2, "ep": 2},
    "zero1+ep": {"ep": 2, "dp": 2},
    "hsdp+ep": {"dp_replicate": 2, "dp_shard": 2, "ep": 2},
}


def check(
    module: nn.Module, call, plan: str | Plan, mesh: dict[str, int], fp64: bool = True, proved: bool = True
) -> None:
    args, kwargs = call
    report = shardgraph.verify(module, args, plan, mesh=mesh, example_kwargs=kwargs, steps=3, fp64=fp64)
    assert report.ok, str(report)
    assert report.proof.ok or not proved, str(report.proof)


def program(module: nn.Module, call, plan: str | Plan, mesh: dict[str, int]) -> Program:
    return build_program(module, resolve_plan(plan, tuple(mesh.items())), *call)


def kinds(made: Program) -> list[Counter]:
    """How many collectives of each kind forward and backward have."""
    return [
        Counter(node.target.__name__.split(".")[0] for node in collectives(half))
        for half in (made.forward, made.backward)
    ]


def written(plan: str, mesh: dict[str, int], axis: str) -> Plan:
    """A preset in which experts are written to be split along ``axis`` by name."""
    found = shardgraph.preset(plan, mesh)
    entry, at = found.parameters[0][1], list(mesh).index(axis)

    def along(placement: str) -> ParameterPlan:
        return replace(entry, placements=(*entry.placements[:at], placement, *entry.placements[at + 1 :]))

    other = "replicate" if axis == "ep" else "auto"
    return replace(found, parameters=(("*", along(other)), ("*experts.*", along("split(0)"))))


# -- numerics ----------------------------------------------------------------------------------------------


@pytest.mark.quick("zero1+ep")
@pytest.mark.parametrize("plan", MESHES)
def test_training_equals_the_unsharded_model(plan):
    check(*make("mixture", 8), plan, MESHES[plan])


TOGETHER = {
    "ep+tp": {"ep": 2, "tp": 2},
    "ep+cp": {"ep": 2, "cp": 2},
    "ep+tp+sp": {"ep": 2, "tp": 2},
    "fsdp+ep+tp": {"dp": 2, "ep": 2, "tp": 2},
    "ep+cp+tp+sp": {"ep": 2, "cp": 2, "tp": 2},
}


def of_even_length(batch: int):
    """Sequences that two ranks can divide."""
    model, _ = make("mixture", 1)
    ids = torch.randint(0, 61, (batch, 8))
    return model, ((), {"input_ids": ids, "labels": ids})


@pytest.mark.slow
@pytest.mark.parametrize("plan", TOGETHER)
def test_experts_are_divided_together_with_operators_and_sequences(plan):
    check(*of_even_length(4), plan, TOGETHER[plan])


@pytest.mark.slow
def test_activations_may_be_whole_beside_experts_and_sequences():
    model, (args, kwargs) = of_even_length(4)
    report = shardgraph.verify(model, args, "ep+cp+tp", mesh=TOGETHER["ep+cp+tp+sp"], example_kwargs=kwargs, fp64=True)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("plan", TOGETHER)
def test_a_division_of_experts_operators_and_sequences_together_is_proved(plan):
    model, (args, kwargs) = of_even_length(4)
    found = shardgraph.prove(model, args, plan=plan, example_kwargs=kwargs, mesh=TOGETHER[plan])
    assert found.ok, str(found)


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "dim"), [(2, 0), (4, 2)], ids=["some experts", "a single one"])
def test_operators_divide_what_a_rank_has_of_the_experts(ranks, dim):
    made = program(*of_even_length(2), "ep+tp", {"ep": ranks, "tp": 2})
    assert made.parameters["moe.0.experts.w_in"].placements == ("split(0)", f"split({dim})")
    axes = Counter(group_of(node) for half in (made.forward, made.backward) for node in collectives(half))
    assert axes["ep"] and axes["tp"] and made.notes == []


def test_an_axis_of_operators_outside_that_of_experts_is_refused():
    with pytest.raises(PlanError, match=r"outside of the axes of operators.*\['tp'\]"):
        shardgraph.preset("ep+tp", {"tp": 2, "ep": 2})


@pytest.mark.slow
def test_four_ranks_with_an_expert_each_equal_the_unsharded_model():
    check(*make("mixture", 8), "ep", {"ep": 4})


class Layer(nn.Module):
    """Experts with what stands between their two products as an argument."""

    def __init__(self, between=torch.relu, experts: int = 4) -> None:
        super().__init__()
        self.up = nn.Parameter(torch.randn(experts, 6, 8) / 3)
        self.down = nn.Parameter(torch.randn(experts, 8, 6) / 3)
        self.scale = nn.Parameter(torch.randn(8))
        self.shift = nn.Parameter(torch.randn(6))
        self.between = between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = (x + self.shift).transpose(0, 1).contiguous()  # [experts, rows, 6]
        hidden = torch.bmm(tokens, self.up)
        hidden = self.between(self, hidden, tokens) if self.between is not torch.relu else hidden.relu()
        return torch.bmm(hidden, self.down).transpose(0, 1)


STAGES = {"pp+ep": {"pp": 2, "ep": 2}, "pp+ep+tp": {"pp": 2, "ep": 2, "tp": 2}}


@pytest.mark.quick("pp+ep")
@pytest.mark.parametrize("plan", STAGES)
def test_experts_of_each_stage_are_divided(plan):
    torch.manual_seed(0)
    check(nn.Sequential(*(Layer() for _ in range(2))), ((torch.randn(8, 4, 6),), {}), plan, STAGES[plan])


class Routed(nn.Module):
    """Layers of experts, whose losses are part of the model's."""

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.norms = nn.ModuleList(nn.LayerNorm(16) for _ in range(layers))
        self.experts = nn.ModuleList(MoE(16, 32, 4) for _ in range(layers))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        balance = x.new_zeros(())
        for norm, experts in zip(self.norms, self.experts, strict=True):
            y, own = experts(norm(x))
            x, balance = x + y, balance + own
        return x.square().mean() + 0.01 * balance


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["pp", *STAGES])
def test_tokens_of_microbatches_are_routed_as_those_of_the_whole_batch(plan):
    torch.manual_seed(0)
    check(Routed(), ((torch.randn(8, 6, 16),), {}), plan, STAGES.get(plan, {"pp": 2}))


BETWEEN = {
    "dropout draws for the own batch": lambda self, hidden, tokens: nn.functional.dropout(hidden, 0.5),
    "a scale that all experts share": lambda self, hidden, tokens: hidden.relu() * self.scale,
    "a number of the own batch": lambda self, hidden, tokens: hidden * tokens.mean(),
    "a value for each of the own tokens": lambda self, hidden, tokens: hidden * tokens.sum(-1, keepdim=True),
    "statistics over the own tokens": lambda self, hidden, tokens: hidden - hidden.mean(1, keepdim=True),
    "normalisation within a token": lambda self, hidden, tokens: hidden / hidden.abs().sum(-1, keepdim=True),
    "weights in the loss": lambda self, hidden, tokens: hidden + self.up.square().mean(),
    "weights of all experts together": lambda self, hidden, tokens: hidden * self.up.sum(0).mean(),
    "two halves": lambda self, hidden, tokens: torch.cat([c.sigmoid() for c in hidden.chunk(2, -1)], -1),
}


@pytest.mark.parametrize("between", BETWEEN)
def test_whatever_stands_between_the_products_is_right(between):
    torch.manual_seed(0)
    check(Layer(BETWEEN[between]), ((torch.randn(8, 4, 6),), {}), "ep", {"ep": 2})


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("plan", "mesh"), [("ep", {"ep": 2}), ("fsdp+ep", {"dp": 2, "ep": 2}), ("ep+tp", {"ep": 2, "tp": 2})]
)
def test_five_clipped_steps_on_real_processes_equal_the_unsharded_model(plan, mesh):
    world = torch.Size(mesh.values()).numel()
    for worst in on_ranks(ranks.parity, world, args=("mixture", plan, mesh, 0.1)):
        assert worst < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_gradients_added_up_over_microbatches_and_their_norm_equal_those_of_the_whole_batch():
    for worst, norm in on_ranks(ranks.accumulated_norm, 4, args=("mixture", "fsdp+ep", MESHES["fsdp+ep"])):
        assert worst < 1e-8 and norm < 1e-8


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_a_checkpoint_of_divided_experts_loads_under_another_plan(tmp_path):
    on_ranks(ranks.save_sharded, 4, args=("mixture", "fsdp+ep", {"dp": 2, "ep": 2}, str(tmp_path)))
    for plan, mesh in (("fsdp", {"dp": 2}), ("ep", {"ep": 2})):
        assert on_ranks(ranks.load_sharded, 2, args=("mixture", plan, mesh, str(tmp_path))) == [[], []]


# -- exchanges ---------------------------------------------------------------------------------------------


@pytest.mark.quick("fsdp+ep")
@pytest.mark.parametrize("plan", ["ep", "fsdp+ep"])
def test_a_layer_exchanges_one_tensor_before_and_one_after_its_experts_in_either_direction(plan):
    layers = 2
    made = program(*make("mixture", 2), plan, MESHES[plan])
    assert [count["all_to_all_single"] for count in kinds(made)] == [2 * layers, 2 * layers]


def test_an_exchange_is_of_the_buffers_of_all_experts():
    groups, tokens, width, experts = 2, 12, 16, 4
    moe = MoE(width, 8, experts, k=2, capacity_factor=1.0)
    made = program(moe, ((torch.zeros(groups, tokens, width),), {}), "ep", {"ep": 2})
    rows = experts * groups * moe.gate.capacity(tokens)
    for half in (made.forward, made.backward):
        for node in collectives(half):
            if node.target is ALL_TO_ALL:
                assert node.meta["val"].numel() == rows * width
                assert node_wire_bytes(node, made.plan.mesh) == rows * width * 4 // 2  # half stays


def test_experts_are_never_gathered_nor_their_gradients_reduced_along_their_axis():
    made = program(MoE(16, 8, 4), ((torch.zeros(2, 12, 16),), {}), "ep", {"ep": 2})
    tokens = 1  # nothing before the layer wants a gradient
    assert kinds(made) == [Counter(all_to_all_single=2), Counter(all_to_all_single=tokens, all_reduce=1)]  # the gate's
    assert made.notes == []


def test_dropout_between_the_products_is_drawn_for_the_own_batch_and_its_mask_exchanged_for_backward():
    made = program(Layer(BETWEEN["dropout draws for the own batch"]), ((torch.zeros(8, 4, 6),), {}), "ep", {"ep": 2})
    assert [count["all_to_all_single"] for count in kinds(made)] == [2 + 2, 2 + 1]


@pytest.mark.parametrize("degree", [2, 4])
def test_the_memory_of_experts_and_of_their_optimizer_falls_by_the_degree(degree):
    moe, call = MoE(64, 256, 4), ((torch.zeros(2, 8, 64),), {})
    experts = sum(p.numel() for p in moe.experts.parameters()) * 4
    gate = moe.gate.weight.numel() * 4
    found = analyze_program(program(moe, call, "ep", {"ep": degree}), toy_cluster())
    assert found.peak.memory["parameters"] == experts // degree + gate
    assert found.peak.memory["optimizer state"] == pytest.approx(2 * (experts // degree + gate), rel=0.01)


# -- plans -------------------------------------------------------------------------------------------------


def test_a_plan_with_experts_round_trips():
    plan = written("fsdp+ep", MESHES["fsdp+ep"], "ep")
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert plan.experts == "ep" and plan.data_size == 4


@pytest.mark.slow
def test_what_is_found_is_what_the_pattern_of_experts_names():
    call = make("mixture", 2)
    found = program(*call, "fsdp+ep", MESHES["fsdp+ep"])
    by_name = program(*call, written("fsdp+ep", MESHES["fsdp+ep"], "ep"), MESHES["fsdp+ep"])
    assert found.parameters == by_name.parameters and found.text == by_name.text
    placed = place_operators(found.joint, found.plan, found.shapes)
    assert Plan.from_yaml(placed.to_yaml()).resolve(found.shapes) == found.parameters


def test_experts_that_do_not_divide_are_refused_with_the_sizes_that_do():
    with pytest.raises(PlanError, match=r"has 6 experts, which 4 ranks.*give the axis 2 or 3 or 6 ranks"):
        program(MoE(8, 8, 6), ((torch.zeros(2, 6, 8),), {}), "ep", {"ep": 4})
    plan = written("ep", {"ep": 4}, "ep")
    with pytest.raises(PlanError, match="Use an axis of 2 or 3 or 6 ranks"):
        plan.resolve({"moe.experts.w_in": torch.Size((6, 8, 8)), "gate": torch.Size((6, 8))})


def test_a_model_without_experts_is_refused():
    with pytest.raises(PlanError, match=r"none that can be found.*plan without 'ep'"):
        program(nn.Linear(4, 4), ((torch.zeros(2, 4),), {}), "ep", {"ep": 2})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"experts": "nope"}, "experts is 'nope'; it may be an axis of the mesh"),
        ({"experts": ""}, "placements is 'auto'; it may be 'replicate' or 'shard\\(0\\)' for the axis 'ep'"),
        ({"operators": (("dp", "whole"),)}, "experts is 'ep'; it may be outside of the axes of operators"),
    ],
)
def test_a_wrong_plan_is_refused(change, message):
    with pytest.raises(PlanError, match=message):
        replace(shardgraph.preset("ddp+ep", MESHES["ddp+ep"]), **change)


def test_only_rows_of_experts_are_split():
    plan = shardgraph.preset("ep", {"ep": 2})
    with pytest.raises(PlanError, match="'split\\(0\\)' for the axis 'ep'"):
        replace(plan, parameters=(("*", replace(plan.parameters[0][1], placements=("split(1)",))),))


@pytest.mark.parametrize(
    ("name", "mesh", "message"),
    [
        ("ep", {"a": 2, "b": 2}, "call one of its axes 'ep'"),
        ("fsdp+ep", {"ep": 2}, "needs an axis for 'fsdp' beside 'ep'"),
    ],
)
def test_a_mesh_that_does_not_suit_is_refused(name, mesh, message):
    with pytest.raises(PlanError, match=message):
        shardgraph.preset(name, mesh)


# -- Mixtral -----------------------------------------------------------------------------------------------


@pytest.mark.quick("grouped_mm-tp-mesh1")
@pytest.mark.parametrize(
    ("implementation", "plan", "mesh"),
    [
        ("batched_mm", "fsdp+tp+sp", {"dp": 2, "tp": 2}),
        pytest.param("grouped_mm", "tp", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("batched_mm", "tp", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("grouped_mm", "fsdp+tp+sp", {"dp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_mixtral_trains_as_unsharded_with_the_width_of_experts_divided(implementation, plan, mesh):
    torch.manual_seed(0)
    call = mixtral(4, implementation)
    check(*call, plan, mesh, fp64=implementation == "batched_mm")  # torch has no grouped product in double precision
    placed = {fqn: entry.placements[-1] for fqn, entry in program(*call, plan, mesh).parameters.items()}
    assert placed["model.layers.0.mlp.experts.gate_up_proj"] == "split(1, blocks=2)"
    assert placed["model.layers.0.mlp.experts.down_proj"] == "split(2)"


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_mixtral_trains_as_unsharded_with_whole_experts_divided_along_an_axis_of_operators(degree):
    torch.manual_seed(0)
    mesh = {"tp": degree}
    call = mixtral(4, "grouped_mm")
    check(*call, written("tp", mesh, "tp"), mesh, fp64=False, proved=False)  # rows that are rotated to a rank's groups


class Grouped(nn.Module):
    """torch's own grouped product, of rows in as many groups as there are matrices."""

    def __init__(self) -> None:
        super().__init__()
        self.experts = nn.ParameterDict({"up": torch.randn(4, 16, 32) / 4, "down": torch.randn(4, 32, 16) / 6})
        self.to(torch.bfloat16)

    def forward(self, x: torch.Tensor, offs: torch.Tensor) -> torch.Tensor:
        rows = x.flatten(0, 1)
        hidden = nn.functional.grouped_mm(rows, self.experts["up"], offs=offs).relu()
        return nn.functional.grouped_mm(hidden, self.experts["down"], offs=offs).view(x.shape)


@pytest.mark.parametrize(
    ("plan", "proved"), [("tp", True), (written("tp", {"tp": 2}, "tp"), False)], ids=["width", "experts"]
)
def test_the_grouped_product_of_torch_is_divided(plan, proved):
    torch.manual_seed(0)
    x, offs = torch.randn(4, 8, 16, dtype=torch.bfloat16), torch.tensor([3, 3, 20, 32], dtype=torch.int32)
    check(Grouped(), ((x, offs), {}), plan, {"tp": 2}, fp64=False, proved=proved)


@pytest.mark.slow
def test_experts_that_are_picked_by_index_are_gathered_along_an_axis_of_experts_and_it_is_said():
    torch.manual_seed(0)
    call = mixtral(4)
    plan = written("ep", {"ep": 2}, "ep")
    check(*call, plan, {"ep": 2})
    assert any("gathered" in note and "index" in note for note in program(*call, plan, {"ep": 2}).notes)
    with pytest.raises(PlanError, match="none that can be found"):
        program(*call, "ep", {"ep": 2})


@pytest.mark.slow
def test_mixtral_with_the_loss_of_its_router_is_captured():
    torch.manual_seed(0)
    module, call = mixtral(4)
    module.config.output_router_logits = True
    check(module, call, "fsdp", {"dp": 2})


def test_experts_in_a_loop_are_refused_with_the_setting_that_works():
    config = MixtralConfig(
        hidden_size=16, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=2
    )
    model = MixtralForCausalLM(config)
    model.set_experts_implementation("eager")
    with pytest.raises(CaptureError, match="experts_implementation='grouped_mm' or 'batched_mm'"):
        program(model, ((torch.zeros(2, 4, dtype=torch.long),), {}), "fsdp", {"dp": 2})


def test_experts_are_annotated_along_their_axis():
    model, (args, kwargs) = make("mixture", 4)
    shardgraph.annotate(model, {"**.experts.*": shardgraph.shard(0, "ep")})
    check(model, (args, kwargs), "ep", {"ep": 2})
    other, _ = make("mixture", 4)
    shardgraph.annotate(other, {"**.experts.w_in": shardgraph.shard(1, "ep")})
    with pytest.raises(PlanError, match="divides experts, which lie along dimension 0"):
        build_program(other, annotated(resolve_plan("ep", (("ep", 2),)), other), args, kwargs)
