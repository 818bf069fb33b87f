"""A plan holds where operations have their operands and results: compiled again, nothing is solved."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import Plan, PlanError
from shardgraph.capture.capture import capture, own_loss
from shardgraph.ir import JointGraph
from shardgraph.mesh import Mesh
from shardgraph.nn import MoE
from shardgraph.passes import milp
from shardgraph.passes.lowering import lower
from shardgraph.passes.placing import place_operators
from shardgraph.passes.program import Program
from shardgraph.plans.activation_plan import Activations
from shardgraph.plans.shards import named_shapes
from tests.test_analysis import gpt2, llama, text
from tests.zoo import make

CPU = torch.device("cpu")
WIDTH = 64


class Experts(nn.Module):
    """A mixture between two linear layers."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.moe, self.down = nn.Linear(8, 16), MoE(16, 32, 4, k=2), nn.Linear(16, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, balance = self.moe(self.up(x))
        return self.down(out).mean() + 0.01 * balance


def captured(model: nn.Module, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> JointGraph:
    return capture(model, args, kwargs or {}, device=CPU)


@functools.cache
def transformer() -> tuple[nn.Module, JointGraph]:
    model = llama(3, hidden_size=WIDTH, vocab_size=64)
    return model, captured(model, (), text(2, 16))


def decided(model: nn.Module, joint: JointGraph, plan: str, mesh: Mesh) -> Plan:
    """The plan of a name with all that was decided, as a file has it."""
    placed = place_operators(joint, shardgraph.preset(plan, dict(mesh)), named_shapes(model))
    return Plan.from_yaml(placed.to_yaml())


def program_text(program: Program) -> str:
    return "\n".join(str(half.graph) for half in (program.forward, program.backward) if half is not None)


@pytest.fixture
def no_solver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A function after whose call every search is an error."""

    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise AssertionError("something was solved")

    yield lambda: monkeypatch.setattr(milp.Program, "solve", refuse)


CASES = {
    "tp": (transformer, (("tp", 2),)),
    "fsdp+tp+sp": (transformer, (("dp", 2), ("tp", 2))),
    "cp+tp": (transformer, (("cp", 2), ("tp", 2))),
    "fsdp+ep": (lambda: ((model := Experts()), captured(model, (torch.zeros(2, 6, 8),))), (("dp", 2), ("ep", 2))),
}


@pytest.mark.quick("fsdp+ep")
@pytest.mark.parametrize("name", ["tp", pytest.param("fsdp+tp+sp", marks=pytest.mark.slow), "cp+tp", "fsdp+ep"])
def test_a_saved_plan_compiles_again_to_the_same_text_without_solving_anything(name, no_solver):
    make, mesh = CASES[name]
    model, joint = make()
    plan, shapes = shardgraph.preset(name, dict(mesh)), named_shapes(model)
    first = program_text(lower(joint, plan, shapes))
    saved = decided(model, joint, name, mesh)
    no_solver()
    again = lower(joint, place_operators(joint, saved, shapes), shapes)
    assert saved.decided and program_text(again) == first


@pytest.mark.slow
def test_a_loss_in_chunks_and_what_is_computed_again_need_no_search_once_they_are_written(no_solver):
    model, joint = transformer()
    plan = replace(
        decided(model, joint, "tp", (("tp", 2),)),
        loss_chunk=1024,
        recompute=(("model.layers.*.mlp", ("mul",)),),
    )
    placed = place_operators(joint, replace(plan, activations=None), named_shapes(model))
    first = program_text(lower(joint, placed, named_shapes(model)))
    no_solver()
    assert program_text(lower(joint, Plan.from_yaml(placed.to_yaml()), named_shapes(model))) == first


def test_rules_are_few_because_operations_follow_their_operands():
    model, joint = transformer()
    plan = decided(model, joint, "tp", (("tp", 2),))
    operations = sum(node.op == "call_function" for node in joint.module.graph.nodes)
    assert plan.activations is not None
    rules = dict(plan.activations.rules("tp") or ())
    assert len(rules) < operations / 8
    assert any(pattern.startswith("model.layers.*.mlp.") for pattern in rules)


def with_rule(plan: Plan, pattern: str, text: str) -> Plan:
    assert plan.activations is not None
    ((axis, rules),) = plan.activations.along
    return replace(plan, activations=replace(plan.activations, along=((axis, (*rules, (pattern, text))),)))


def test_an_operation_that_the_model_does_not_have_is_refused_by_name():
    model, joint = transformer()
    plan = with_rule(
        decided(model, joint, "tp", (("tp", 2),)), "model.layers.*.mlp.up_prj/mm.1", "replicate -> partial"
    )
    with pytest.raises(
        PlanError, match=r"name the operation 'model.layers.\*.mlp.up_prj/mm.1'.*did you mean.*up_proj/mm"
    ):
        lower(joint, plan, named_shapes(model))


def test_placements_that_are_not_legal_are_refused_with_those_that_are():
    model, joint = transformer()
    plan = with_rule(decided(model, joint, "tp", (("tp", 2),)), "lm_head/mm.1", "split(0), split(0) -> split(0)")
    with pytest.raises(
        PlanError, match=r"'lm_head/mm.1' with operands of shapes \[32, 64\].*may be 'replicate, replicate"
    ):
        lower(joint, plan, named_shapes(model))


def test_placements_that_do_not_go_together_are_refused():
    model, joint = transformer()
    whole = "replicate, replicate -> replicate"  # of a weight that is cut, and may not be gathered
    plan = with_rule(decided(model, joint, "tp", (("tp", 2),)), "model.layers.1.mlp.up_proj/mm.1", whole)
    with pytest.raises(
        PlanError, match=r"along 'tp' the plan has .* as split.* takes it as replicate, which cannot be"
    ):
        lower(joint, plan, named_shapes(model))


def test_a_call_of_other_shapes_takes_what_applies_and_solves_nothing(no_solver):
    model, joint = transformer()
    plan = decided(model, joint, "tp", (("tp", 2),))
    no_solver()
    with torch.no_grad():
        evaluated = captured(copy.deepcopy(model).eval(), (), text(3, 8))
    program = lower(evaluated, plan, named_shapes(model))
    assert program.backward is None
    assert any("were decided for forward and backward of int64[2, 16]" in note for note in program.notes)


def test_an_evaluation_with_gradients_takes_what_applies_of_a_plan_for_training():
    model = nn.Sequential(nn.BatchNorm1d(8), nn.Linear(8, 8), nn.Dropout(0.1))
    x = torch.randn(4, 8)
    plan = decided(model, joint := captured(model, (x,)), "tp", (("tp", 2),))
    (_, rules), call = plan.activations.along[0], plan.activations.call
    assert call == "forward and backward of float32[4, 8], buffers written: 3, random draws: 1"
    everywhere = "replicate, replicate, replicate, replicate, replicate -> " + ", ".join(["replicate"] * 5)
    rules = (*rules, ("0/batch_norm.1", everywhere))  # as a search may write it
    plan = replace(plan, activations=Activations(call, (("tp", rules),)))
    lower(joint, plan, named_shapes(model))
    evaluated = captured(copy.deepcopy(model).eval(), (x,))
    program = lower(evaluated, plan, named_shapes(model))
    assert program.backward is not None
    assert any("these do not apply" in note and "batch_norm" in note for note in program.notes)


@pytest.mark.slow
def test_a_step_for_the_loss_alone_takes_what_applies_of_a_plan_for_all_outputs():
    model = llama(3, hidden_size=WIDTH, vocab_size=64)
    model.config.use_cache = True  # keys and values are outputs too
    plan = decided(model, captured(model, (), text(2, 16)), "tp", (("tp", 2),))
    loss = capture(model, (), text(2, 16), device=CPU, loss_fn=own_loss)
    program = lower(loss, plan, named_shapes(model))
    # torch 2.12 traces no operation for all outputs that it does not trace for the loss.
    assert all("these do not apply" in note for note in program.notes), program.notes


@pytest.mark.slow
def test_a_call_of_other_shapes_trains_as_the_unsharded_model():
    model, (args, kwargs) = make("tied-transformer", 4)
    plan = decided(model, captured(model, args, kwargs), "tp", (("tp", 2),))
    _, (args, kwargs) = make("tied-transformer", 6)
    report = shardgraph.verify(model, args, plan, example_kwargs=kwargs, steps=2, fp64=True)
    assert report.ok, str(report)


@pytest.mark.slow
def test_layers_that_differ_have_rules_of_their_own():
    model = gpt2(4)
    joint, plan = captured(model, (), text(2, 16)), shardgraph.preset("tp", {"tp": 2})
    entry = replace(plan.parameters[0][1], placements=("replicate",))
    plan = replace(plan, parameters=(*plan.parameters, ("transformer.h.2.mlp.c_fc.weight", entry)))
    placed = place_operators(joint, plan, named_shapes(model))
    assert program_text(lower(joint, placed, named_shapes(model))) == program_text(
        lower(joint, plan, named_shapes(model))
    )
    assert placed.activations is not None
    assert any(pattern.startswith("transformer.h.2.") for pattern, _ in placed.activations.rules("tp") or ())


def test_activations_round_trip_through_a_file():
    plan = shardgraph.preset("tp", {"tp": 2})
    rules = (("model.layers.*.mlp.up_proj/mm.1", "replicate, split(1) -> split(1)"),)
    plan = replace(plan, activations=Activations("forward of int64[2, 16]", (("tp", rules),)))
    assert Plan.from_yaml(plan.to_yaml()) == plan


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("activations: {tp: {'a/mm.1': x -> y}}", "activations.call is None; it may be the call"),
        ("activations: {call: forward, tp: [a]}", r"activations.tp is \['a'\]; it may be a mapping of operations"),
        (
            "activations: {call: forward, tp: {'a/mm.1': replicate}}",
            "'replicate'; it may be placements of operands and",
        ),
        (
            "activations: {call: forward, dp: {}}",
            "activations is 'dp'; it may be given for axes of operators or experts",
        ),
    ],
)
def test_malformed_activations_are_refused(given, message):
    with pytest.raises(PlanError, match=message):
        Plan.from_yaml(f"{shardgraph.preset('tp', {'tp': 2}).to_yaml()}{given}\n")
