"""Annotations: constraints that a person puts on any plan of a model, without editing the model."""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import replace

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import (
    Plan,
    PlanError,
    annotate,
    constrain,
    keep_gathered,
    offload,
    output,
    preset,
    recompute,
    replicate,
    reshard,
    save,
    shard,
)
from shardgraph.capture.capture import capture
from shardgraph.ir import ALL_GATHER, Parameter, collectives, copy_graph, placeholders
from shardgraph.ir.attributes import MODULES, SUBJECT
from shardgraph.passes.base import Context, run_passes
from shardgraph.passes.lowering import build_program, lower
from shardgraph.passes.placing import place_operators
from shardgraph.passes.program import Program
from shardgraph.passes.sharding.classes import classes_of
from shardgraph.passes.sharding.shard_operators import ShardOperators
from shardgraph.plans.annotations.constrain import CONSTRAIN
from shardgraph.plans.annotations.kinds import KINDS, Annotation, input, parse, precision, stage
from shardgraph.plans.annotations.match import matches
from shardgraph.plans.remembered import annotated, remembered
from shardgraph.plans.shards import named_shapes
from shardgraph.search.question import Question
from shardgraph.search.source import Source
from tests import ranks
from tests.machines import toy_cluster
from tests.standing import on_ranks
from tests.test_analysis import llama, text
from tests.zoo import make

pytestmark = pytest.mark.usefixtures("shared_captures")

TP = {"tp": 2}
BOTH = {"dp": 2, "tp": 2}
CPU = torch.device("cpu")


class Part(nn.Module):
    """Returns a tuple, and holds a module that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.twice = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
        self.norm = nn.LayerNorm(8)

    def forward(self, x: torch.Tensor, *, scale: torch.Tensor) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
        once = self.twice(self.norm(x))
        return once, {"again": self.twice(once) * scale, "unused": x + 1}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.part = Part()
        self.dropout = nn.Dropout(0.25)
        self.head = nn.Linear(8, 4)
        self.inside: Annotation | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        first, rest = self.part(x, scale=x * 2)
        hidden = self.dropout(first + rest["again"])
        if self.inside is not None:
            hidden = constrain(hidden, self.inside)
        return self.head(hidden)


def net() -> tuple[Net, tuple[torch.Tensor]]:
    torch.manual_seed(0)
    return Net().train(), (torch.randn(4, 6, 8),)


def check(
    model: nn.Module, args: tuple = (), plan: str = "tp", mesh: dict[str, int] = TP, **kwargs: torch.Tensor
) -> Plan:
    report = shardgraph.verify(model, args, plan, mesh=mesh, example_kwargs=kwargs, steps=3, fp64=True)
    assert report.ok, str(report)
    return report.plan


def placed(model: nn.Module, args: tuple = (), plan: str = "tp", mesh: dict[str, int] = TP, **kwargs: torch.Tensor):
    """The parameters' placements, and the local shape of every marked value, of forward and of backward."""
    chosen = annotated(preset(plan, mesh), model)
    joint = capture(model, args, kwargs, device=CPU, annotations=chosen.annotations)
    context = Context.of(chosen, named_shapes(model), joint.fake_mode)
    gm = copy_graph(joint.module)
    run_passes(gm, [ShardOperators(axis, style == "sequence") for axis, style in chosen.operators], context)
    marks = [tuple(node.meta["val"].shape) for node in gm.graph.nodes if node.target is CONSTRAIN]
    return {fqn: entry.placements for fqn, entry in context.parameters.items()}, marks


def lowered(model: nn.Module, plan: str, mesh: dict[str, int], *args: torch.Tensor, **kwargs: torch.Tensor) -> Program:
    return build_program(model, annotated(preset(plan, mesh), model), args, kwargs)


# -- placements ----------------------------------------------------------------------------------------------

MEGATRON = {
    "model.layers.*.self_attn.[qkv]_proj.weight": shard(0, "tp"),
    "model.layers.*.self_attn.o_proj.weight": shard(1, "tp"),
    "re:.*mlp\\.(gate|up)_proj\\.weight": shard(0, "tp"),
    "model.layers.*.mlp.down_proj.weight": shard(1, "tp"),
    "**.*norm.weight": replicate("tp"),
}


@pytest.mark.slow
def test_the_placement_of_megatron_by_hand_is_what_tp_finds():
    found, by_hand = llama(3), llama(3)
    annotate(by_hand, MEGATRON)
    programs = [lowered(model, "tp", TP, **text()) for model in (found, by_hand)]
    halves = [(program.forward, program.backward) for program in programs]
    # Of activations: what tp finds of the last norm, which is no layer's, is cut, and by hand its gradient is gathered.
    sent = [
        [
            Counter((str(n.target), n.meta["val"].numel()) for n in collectives(h) if n.meta["val"].numel() > 64)
            for h in each
        ]
        for each in halves
    ]
    assert sent[0] == sent[1] and sum(sent[0][0].values()) > 6
    layers = [{f: entry for f, entry in p.parameters.items() if ".layers." in f} for p in programs]
    assert layers[0] == layers[1]


def test_a_parameter_lies_as_it_is_annotated_though_another_placement_costs_less():
    model, args = net()
    annotate(model, {"part.twice.0.weight": shard(1, "tp"), "head.weight": replicate("tp")})
    parameters, _ = placed(model, args)
    assert (parameters["part.twice.0.weight"], parameters["head.weight"]) == (("split(1)",), ("replicate",))
    check(model, args)


def test_an_output_and_its_gradient_lie_as_annotated_at_every_call_of_the_module():
    model, args = net()
    annotate(model, {"part.twice": shard(1, "tp")})
    assert placed(model, args)[1] == [(4, 3, 8)] * 4  # two calls, forward and backward
    check(model, args)


@pytest.mark.slow
def test_a_tensor_of_a_tuple_is_named_by_its_number():
    model, args = net()
    annotate(model, {"part": [output(shard(2, "tp"), at=1), output(replicate())]})
    assert sorted(placed(model, args)[1]) == [(4, 6, 4)] * 2 + [(4, 6, 8)] * 2
    check(model, args)


@pytest.mark.quick("0")
@pytest.mark.parametrize("at", [0, "x"])
def test_an_input_lies_as_annotated(at):
    model, args = net()
    annotate(model, {"part": input(shard(-1, "tp"), at=at)})
    assert placed(model, args)[1] == [(4, 6, 4)]  # the model's input has no gradient
    check(model, args)


@pytest.mark.slow
def test_an_input_that_is_a_keyword_argument_is_named():
    model, args = net()
    annotate(model, {"part": input(shard(0, "tp"), at="scale")})
    assert placed(model, args)[1] == [(2, 6, 8)]
    check(model, args)


def test_the_inputs_and_outputs_of_the_model_are_those_of_the_module_without_a_name():
    model, args = net()
    annotate(model, {"": [input(shard(1, "tp")), output(shard(1, "tp"))]})
    assert placed(model, args)[1] == [(4, 3, 8), (4, 3, 4), (4, 3, 4)]
    check(model, args)


@pytest.mark.quick("placement4")
@pytest.mark.parametrize(
    "placement", [shard(1, "tp"), shard(2, "tp", blocks=2), shard(0, "tp"), replicate("tp"), replicate()]
)
def test_constrain_in_a_forward_is_obeyed(placement):
    model, args = net()
    model.inside = placement
    local = [4, 6, 8]
    if isinstance(placement, shard):
        local[placement.dim] //= 2
    assert placed(model, args)[1] == [tuple(local)] * 2
    check(model, args)


@pytest.mark.parametrize(("plan", "mesh"), [("fsdp", {"dp": 2}), ("single", {}), ("tp", TP)])
def test_nothing_of_constrain_is_left_in_a_program(plan, mesh):
    model, args = net()
    model.inside = shard(1, "tp")
    program = lowered(model, plan, mesh, *args)
    nodes = [*program.forward.graph.nodes, *program.backward.graph.nodes]
    assert not any("constrain" in str(node.target) for node in nodes)
    assert any(node.target is CONSTRAIN for node in program.joint.module.graph.nodes)


def test_constrain_without_a_plan_is_its_argument():
    x = torch.ones(2)
    assert constrain(x, shard(0, "tp")) is x


def test_constrain_along_an_axis_that_is_none_of_operators_is_noted():
    model, args = net()
    model.inside = shard(1, "tp")
    (note,) = lowered(model, "fsdp", {"dp": 2}, *args).notes
    assert "no effect: 'tp' is no axis of operators in plan 'fsdp'" in note and "test_annotations.py" in note


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "annotations"),
    [
        ("llama", {"model.layers.*": output(shard(1, "tp")), "model.layers.0.mlp.up_proj.weight": shard(1, "tp")}),
        pytest.param(
            "gpt2",
            {"transformer.h.*.mlp": input(shard(2, "tp")), "transformer.h.1.attn.c_attn.weight": replicate("tp")},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_models_of_transformers_are_annotated_on_meshes_with_data(name, annotations):
    model, (args, kwargs) = make(name, 4)
    annotate(model, annotations)
    check(model, args, "fsdp+tp", BOTH, **{key: value[:, :8] for key, value in kwargs.items()})


def test_a_layer_that_is_annotated_is_decided_by_itself():
    model = llama(4)
    annotate(model, {"model.layers.2": shard(1, "tp")})
    joint = capture(model, (), text(), device=CPU, annotations=remembered(model))
    classes = classes_of(joint.module, {})
    owners = placeholders(joint.module)
    keys = [classes[owners[Parameter(f"model.layers.{i}.mlp.up_proj.weight")]] for i in range(4)]
    assert keys[0] == keys[1] == keys[3] != keys[2]


def test_along_an_axis_of_data_a_parameter_is_stored_as_annotated():
    model, args = net()
    annotate(model, {"head.*": replicate("dp"), "part.twice.0.weight": shard(1, "tp")})
    entries = annotated(preset("fsdp+tp", BOTH), model).resolve(named_shapes(model))
    assert entries["head.weight"].placements == ("replicate", "auto")
    assert entries["part.twice.0.weight"].placements == ("shard(0)", "split(1)")
    check(model, args, "fsdp+tp", BOTH)


def test_a_parameter_of_ddp_is_stored_in_shards_where_that_is_annotated():
    model, args = net()
    annotate(model, {"part.**.weight": shard(0, "dp")})
    plan = check(model, args, "ddp", {"dp": 2})
    entries = plan.resolve(named_shapes(model))
    assert entries["part.norm.weight"] == preset("fsdp", {"dp": 2}).parameters[0][1]
    assert entries["head.weight"].placements == ("replicate",)


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_annotated_models_on_real_processes_equal_the_unsharded_model():
    for worst in on_ranks(ranks.annotated_parity, 2):
        assert worst < 1e-5


# -- gathering and recomputing -------------------------------------------------------------------------------


def gathers(program: Program) -> list[str]:
    """The parameters that backward gathers, under the same plan without buckets."""
    alone = lower(program.joint, replace(program.plan, bucket=0), program.shapes)
    return [SUBJECT.of(node) for node in collectives(alone.backward) if node.target is ALL_GATHER]


def test_a_parameter_that_is_kept_gathered_is_not_gathered_again_in_backward():
    model, args = net()
    again = gathers(lowered(model, "fsdp", {"dp": 2}, *args))
    annotate(model, {"head.weight": keep_gathered()})
    kept = gathers(lowered(model, "fsdp", {"dp": 2}, *args))
    assert set(again) - set(kept) == {"head.weight"}
    check(model, args, "fsdp", {"dp": 2})


def test_a_parameter_that_is_resharded_is_gathered_again_in_backward():
    model, args = net()
    annotate(model, {"head.weight": reshard()})
    assert gathers(lowered(model, "zero2", {"dp": 2}, *args)) == ["head.weight"]
    check(model, args, "zero2", {"dp": 2})


def peak(annotations: dict, layers: int = 4) -> int:
    model = llama(layers)
    annotate(model, annotations)
    call = text(8, 64)
    return shardgraph.analyze(
        model, plan="fsdp", example_kwargs=call, mesh={"dp": 2}, cluster=toy_cluster()
    ).peak_memory


@pytest.mark.slow
def test_recomputation_lowers_the_predicted_peak_and_saving_inside_of_it_raises_it_again():
    everything, nothing = peak({}), peak({"model.layers.*": recompute()})
    some = peak({"model.layers.*": recompute(), "model.layers.*.mlp": save()})
    assert nothing < 0.6 * everything and nothing < some < everything


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "mesh"), [("fsdp", {"dp": 2}), ("tp", TP), ("fsdp+tp+sp", BOTH)])
def test_recomputed_layers_with_dropout_equal_the_unsharded_model(plan, mesh):
    model, (args, _) = make("tied-transformer", 4)
    annotate(model, {"blocks.layers.*": recompute(), "blocks.layers.1.self_attn": save()})
    check(model, args, plan, mesh)


@pytest.mark.slow
def test_random_numbers_are_not_drawn_again():
    model, (args, _) = make("tied-transformer", 4)
    annotate(model, {"": recompute()})
    program = lowered(model, "fsdp", {"dp": 2}, *args)
    draws = [
        n for n in program.backward.graph.nodes if torch.Tag.nondeterministic_seeded in getattr(n.target, "tags", ())
    ]
    assert draws == [] and program.random


class Counted(nn.Module):
    """Computes with a buffer, then writes it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)
        self.register_buffer("calls", torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = torch.tanh(self.linear(x) + self.calls)
        self.calls.add_(1)
        return hidden.square()


def test_what_comes_from_a_buffer_that_forward_writes_is_not_computed_again():
    model = nn.Sequential(Counted(), nn.Linear(8, 2))
    x = torch.randn(4, 8)
    original = copy.deepcopy(model)
    expected = torch.autograd.grad(original(x).sum(), list(original.parameters()))
    annotate(model, {"0": recompute()})
    sharded = shardgraph.compile(model, "single", example_inputs=(x,))
    sharded(x).sum().backward()
    for parameter, gradient in zip(sharded.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, gradient)


def products(program: Program) -> Counter:
    """Products of matrices that backward computes again, by module."""
    mine = [
        n for n in program.backward.graph.nodes if n.target in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    ]
    return Counter(list(MODULES.of(n).values())[-1][0] for n in mine if MODULES.get(n))


def test_only_what_is_inside_of_a_recomputed_module_is_computed_again_and_not_its_result():
    model = llama(3)
    annotate(model, {"model.layers.1": recompute()})
    again = products(lowered(model, "single", {}, **text()))
    assert {name for name in again if "layers.1" not in name} == set()
    assert again["model.layers.1.mlp.up_proj"] == 1 and "model.layers.1.mlp.down_proj" not in again


def test_save_inside_of_recompute_keeps_what_it_names():
    model = llama(1)
    annotate(
        model, {"model.layers.*": recompute(), "model.layers.*.mlp": save(), "model.layers.*.mlp.up_proj": recompute()}
    )
    again = products(lowered(model, "single", {}, **text()))
    assert "model.layers.0.mlp.gate_proj" not in again
    assert "model.layers.0.self_attn.q_proj" in again


@pytest.mark.slow
def test_a_region_of_many_operations_is_recomputed():
    model = llama(8)
    annotate(model, {"model": recompute()})
    program = lowered(model, "single", {}, **text())
    assert len(program.backward.graph.nodes) > 1000


@pytest.mark.slow
def test_save_keeps_what_sequence_parallelism_would_gather_again():
    model = llama(2, vocab_size=64)
    again = Counter(gathers(lowered(model, "tp+sp", TP, **text())))
    annotate(model, {"model.layers.*": save()})
    kept = Counter(gathers(lowered(model, "tp+sp", TP, **text())))
    assert (again - kept).total() > 0 and not kept - again


# -- plans ---------------------------------------------------------------------------------------------------

EVERY = {
    "part.twice.*.weight": replicate("dp"),
    "part.twice.0.weight": [shard(0, "tp"), keep_gathered()],
    "head.weight": [shard(0, "dp"), reshard(), offload()],
    "part": [recompute(), input(shard(-1, "tp", blocks=2), at="x"), output(replicate(), at=1)],
    "re:.*norm": save(),
    "head": [precision("float64"), stage(1)],
}


def test_every_kind_is_in_the_plan_prints_and_round_trips():
    model, args = net()
    annotate(model, EVERY)
    plan = check(model, args, "fsdp+tp", BOTH)
    # Plans of data alone may ignore a parameter: test_coming_from.py.
    assert {type(annotation).__name__ for _, annotation in plan.annotations} == set(KINDS) - {"ignored"}
    assert Plan.from_yaml(plan.to_yaml()) == plan
    for pattern, annotation in plan.annotations:
        assert f"annotated {pattern!r}: {annotation}" in str(plan)
        assert parse(str(annotation)) == annotation


@pytest.mark.slow
def test_a_plan_carries_its_annotations_to_a_model_without():
    model, args = net()
    annotate(model, EVERY)
    plan = annotated(preset("fsdp+tp", BOTH), model)
    other, _ = net()
    one, two = (build_program(each, plan, args) for each in (model, other))
    assert one.text == two.text and remembered(other) == ()


def test_a_plan_with_found_placements_keeps_its_annotations():
    model, args = net()
    annotate(model, {"part.twice.0.weight": shard(1, "tp")})
    plan = annotated(preset("tp", TP), model)
    found = place_operators(capture(model, args, {}, device=CPU), plan, named_shapes(model))
    assert found.annotations == plan.annotations and found.undecided(named_shapes(model)) == []
    assert build_program(model, Plan.from_yaml(found.to_yaml()), args).parameters["part.twice.0.weight"].placements == (
        "split(1)",
    )


def test_annotations_are_written_in_a_plan_by_hand():
    text = (
        preset("tp", TP).to_yaml() + "annotations:\n- {head.weight: 'shard(1, \"tp\")'}\n- {part.twice: recompute()}\n"
    )
    plan = Plan.from_yaml(text)
    assert plan.annotations == (("head.weight", shard(1, "tp")), ("part.twice", recompute()))


def test_compile_takes_annotations_up():
    model, args = net()
    annotate(model, {"part": recompute(), "head.weight": shard(0, "tp")})
    expected = [p.clone() for p in torch.autograd.grad(model.eval()(*args).sum(), list(model.parameters()))]
    sharded = shardgraph.compile(model, "tp", example_inputs=args)  # without a mesh nothing is placed
    sharded(*args).sum().backward()
    assert sharded.plan.annotations == remembered(model)
    for parameter, grad in zip(sharded.parameters(), expected, strict=True):
        torch.testing.assert_close(parameter.grad, grad)


@pytest.mark.slow
def test_auto_leaves_out_plans_that_cannot_be_so():
    model, args = net()
    annotate(model, {"part": output(shard(1, "tp"))})
    analysis = shardgraph.analyze(model, args, "auto", mesh=BOTH, cluster=toy_cluster())
    considered = {candidate.name for candidate in analysis.plan.considered}
    assert considered and all("tp" in name for name in considered)
    with pytest.raises(
        PlanError,
        match=r"no plan on the mesh \{'dp': 2\} can be as the model is annotated:\n.*names the mesh axis 'tp'",
    ):
        shardgraph.analyze(model, args, "auto", mesh={"dp": 2}, cluster=toy_cluster())


def test_layers_that_annotations_tell_apart_are_not_folded():
    def stack(annotations):
        model = llama(13)
        annotate(model, annotations)
        question = Question.of(model, preset("fsdp", {"dp": 2}), lambda plan: plan.whole_mesh)
        return Source(question.about((), text())).stack

    assert stack({"model.layers.*": recompute()}) is not None
    assert stack({"model.layers.[0-5]": recompute()}) is None


# -- patterns and errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("layers.*.up", "layers.3.up", True),
        ("layers.*", "layers.3.up", False),
        ("layers.**", "layers.3.up", True),
        ("**.up", "up", True),
        ("layers.[01].*", "layers.2.up", False),
        ("re:.*\\.up", "layers.3.up", True),
        ("re:up", "layers.3.up", False),
        ("", "", True),
        ("*", "", False),
    ],
)
def test_a_star_is_within_one_name_and_two_are_any_number(pattern, name, expected):
    assert matches(pattern, name) is expected


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ({"head.weight": shard(0, "tp")}, {"re:head.*": replicate()}),
        ({"head.weight": shard(0, "tp")}, {"head.weight": shard(1, "tp")}),
        ({"part": output(shard(1, "tp"))}, {"p*": output(replicate("tp"))}),
        ({"head.*": keep_gathered()}, {"head.weight": reshard()}),
        ({"part": recompute()}, {"part": save()}),
    ],
)
def test_annotations_that_contradict_each_other_are_refused_and_both_are_named(first, second):
    model, _ = net()
    annotate(model, first)
    ((one, a),), ((other, b),) = first.items(), second.items()
    with pytest.raises(PlanError) as refused:
        annotate(model, second)
    assert f"{one!r}: {a} and {other!r}: {b} contradict each other" in str(refused.value)
    assert remembered(model) == ((one, a),)


def test_annotations_of_several_calls_add_up():
    model, _ = net()
    annotate(model, {"head.weight": shard(0, "tp")})
    annotate(model, {"head.weight": [shard(0, "dp"), keep_gathered()]})
    assert [annotation for _, annotation in remembered(model)] == [shard(0, "tp"), shard(0, "dp"), keep_gathered()]


def tied() -> nn.Module:
    return make("tied-transformer", 2)[0]


@pytest.mark.parametrize(
    ("model", "annotations", "message"),
    [
        (Net, {"part.twise": recompute()}, r"'part\.twise': recompute\(\) matches none of the modules.*'part\.twice'"),
        (
            Net,
            {"head.wieght": shard(0, "tp")},
            r"matches none of the parameters of this model; did you mean 'head\.weight'",
        ),
        (Net, {"head.weight": recompute()}, r"matches none of the modules"),
        (Net, {"re:(": save()}, r"'re:\(' is no regular expression"),
        (Net, {"head.weight": "shard(0)"}, r"is no annotation: use shard"),
        (tied, {"head.weight": shard(0, "tp")}, r"'head\.weight' is tied to 'embedding\.weight'"),
    ],
)
def test_a_wrong_annotation_is_refused_at_once(model, annotations, message):
    with pytest.raises(PlanError, match=message):
        annotate(model(), annotations)


@pytest.mark.parametrize(
    ("make_it", "message"),
    [
        (lambda: shard("0", "tp"), "dim of shard.* is '0'; it may be a dimension"),
        (lambda: shard(0, "tp", blocks=0), "blocks of .* is 0; it may be a whole number from 1"),
        (lambda: output("tp"), "placement of .* may be shard"),
        (lambda: parse("shart(0, 'tp')"), "no annotation 'shart'; there are .*; did you mean 'shard'"),
        (lambda: parse("shard(0"), "is no annotation"),
        (lambda: parse("shard()"), "is no annotation"),
        (lambda: parse("3"), "is no annotation; there are shard"),
    ],
)
def test_a_malformed_annotation_is_refused(make_it, message):
    with pytest.raises(PlanError, match=message):
        make_it()


@pytest.mark.parametrize(
    ("plan", "mesh", "annotations", "message"),
    [
        ("fsdp", {"dp": 2}, {"head.weight": shard(0, "tp")}, r"the mesh axis 'tp', and plan 'fsdp' has the mesh"),
        ("fsdp", {"dp": 2}, {"head.weight": shard(1, "dp")}, r"of shape \[4, 8\].*shard\(0, 'dp'\) works"),
        ("fsdp", {"dp": 2}, {"part": output(shard(0, "dp"))}, r"'dp' is an axis of data in plan 'fsdp'"),
        ("ddp", {"dp": 2}, {"head.weight": reshard()}, r"plan 'ddp' does not store it in shards"),
        ("tp", {"tp": 3}, {"head.weight": shard(0, "tp")}, r"\[4, 8\].*3 ranks and dimension 0 is 4: .* such as 6"),
        ("tp", TP, {"head.weight": shard(2, "tp")}, r"it has 2 dimensions: dim may be -2 to 1"),
        ("tp", {"tp": 4}, {"part": output(shard(1, "tp"))}, r"value of part, of shape \[4, 6, 8\].* such as 8"),
        ("cp", {"cp": 2}, {"head.weight": shard(0, "cp")}, r"sequences, along which parameters are whole"),
        ("tp", TP, {"part": output(shard(1, "tp"), at=7)}, r"constrains nothing: in this call none.*number 7"),
        ("tp", TP, {"part": input(shard(1, "tp"), at="y")}, r"forward of Part has no argument 'y'; it has x, scale"),
    ],
)  # fmt: skip
def test_what_cannot_be_under_a_plan_is_refused(plan, mesh, annotations, message):
    model, args = net()
    annotate(model, annotations)
    with pytest.raises(PlanError, match=message):
        lowered(model, plan, mesh, *args)


def test_a_placement_that_no_operation_can_use_is_refused_with_those_that_work():
    model = nn.Sequential(nn.Conv2d(4, 6, 4), nn.Flatten(), nn.Linear(6, 4))
    annotate(model, {"0.weight": shard(2, "tp")})
    with pytest.raises(
        PlanError, match=r"'0\.weight': shard\(2, \"tp\"\) cannot be for '0\.weight'.*replicate\('tp'\) would work"
    ):
        lowered(model, "tp", TP, torch.randn(2, 4, 4, 4))


def test_a_placement_that_the_plan_itself_contradicts_is_refused():
    model, _ = net()
    plan = preset("tp", TP)
    entry = replace(plan.parameters[0][1], placements=("split(1)",))
    plan = replace(
        plan, parameters=(*plan.parameters, ("head.weight", entry)), annotations=(("head.weight", shard(0, "tp")),)
    )
    with pytest.raises(PlanError, match=r"the plan's own entry places it as 'split\(1\)'"):
        plan.resolve(named_shapes(model))


def test_rows_in_blocks_are_not_stored_in_shards_as_well():
    model, _ = net()
    annotate(model, {"part.twice.0.weight": [shard(0, "tp", blocks=2), shard(0, "dp")]})
    with pytest.raises(PlanError, match=r"shard\(0, \"dp\"\) cannot be.*its rows are divided in blocks"):
        annotated(preset("fsdp+tp", BOTH), model).resolve(named_shapes(model))


def test_a_compiled_model_is_annotated_too_late():
    model, args = net()
    sharded = shardgraph.compile(model, "single", example_inputs=args)
    with pytest.raises(PlanError, match="compiled already"):
        annotate(sharded, {"head": recompute()})


@pytest.mark.parametrize("annotations", ["[3]", "[{a: recompute(), b: save()}]", "[{a: recomputed()}]", "3"])
def test_wrong_annotations_in_a_file_are_refused_naming_the_field(annotations):
    with pytest.raises(PlanError, match="the plan: annotations"):
        Plan.from_yaml(preset("fsdp", {"dp": 2}).to_yaml() + f"annotations: {annotations}\n")
