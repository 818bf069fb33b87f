"""Operators divided among ranks: equal to the original, with the collectives that Megatron-LM places by hand."""

from __future__ import annotations

import functools
import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from operator import getitem

import pytest
import torch
from torch import fx, nn
from torch.distributed.tensor import Replicate, Shard

import shardgraph
from shardgraph import Plan, PlanError, ShardGraphError, ir, torch_api
from shardgraph.ir import collectives, take_part
from shardgraph.ir.attributes import MADE_BY, REDUCES, SUBJECT
from shardgraph.passes.lowering import build_program
from shardgraph.passes.placing import place_operators
from shardgraph.passes.program import Program
from shardgraph.passes.sharding import dtensor_rules
from shardgraph.passes.sharding.placements import PARTIAL, blocks, divides, local_shape, through_view
from shardgraph.plans.parameter_plan import split_text
from shardgraph.plans.resolve import resolve_plan
from tests import ranks
from tests.standing import on_ranks
from tests.test_analysis import gpt2, llama, text
from tests.zoo import ZOO, Loss, make

aten = torch.ops.aten
pytestmark = pytest.mark.usefixtures("shared_captures")

MESHES = {
    "tp": {"tp": 2},
    "ddp+tp": {"dp": 2, "tp": 2},
    "fsdp+tp": {"dp": 2, "tp": 2},
    "fsdp+tp+sp": {"dp": 2, "tp": 2},
    "hsdp+tp": {"dp_replicate": 2, "dp_shard": 2, "tp": 2},
    "zero2+tp+sp": {"dp": 2, "tp": 4},
}
FURTHER = [plan for plan in MESHES if plan not in ("tp", "fsdp+tp+sp")]


# -- numerics ----------------------------------------------------------------------------------------------


def check(model: str, plan: str, mesh: dict[str, int]) -> None:
    module, (args, kwargs) = make(model, 4)
    report = shardgraph.verify(module, args, plan, mesh=mesh, example_kwargs=kwargs, steps=3, fp64=True)
    assert report.ok, str(report)


@pytest.mark.quick("odd-mlp-zero2+tp+sp", "tied-transformer-tp")
@pytest.mark.parametrize(
    ("model", "plan"),
    [
        *((model, plan) for model in ("odd-mlp", "tied-transformer") for plan in MESHES),
        *(("conv-batch-norm", plan) for plan in ("tp", "fsdp+tp+sp")),
        *(pytest.param("conv-batch-norm", plan, marks=pytest.mark.slow) for plan in FURTHER),
    ],
)
def test_training_equals_the_unsharded_model(model, plan):
    check(model, plan, MESHES[plan])


@pytest.mark.parametrize(
    ("model", "plan"),
    [
        pytest.param("llama", "fsdp+tp+sp", marks=pytest.mark.slow),  # on real processes: gpt2, below
        pytest.param("gpt2", "zero2+tp+sp", marks=pytest.mark.slow),
        pytest.param("bert", "hsdp+tp", marks=pytest.mark.slow),
        pytest.param("vit", "fsdp+tp", marks=pytest.mark.slow),
    ],
)
def test_training_models_of_transformers_equals_the_unsharded_model(model, plan):
    check(model, plan, MESHES[plan])


ALL_SIZES = [
    *((plan, {"tp": size}) for plan in ("tp", "tp+sp") for size in (2, 4, 8)),
    *((f"{data}+tp", {"dp": 2, "tp": size // 2}) for data in ("ddp", "fsdp") for size in (4, 8)),
    *((plan, MESHES[plan]) for plan in ("hsdp+tp", "fsdp+tp+sp", "zero2+tp+sp")),
]


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "mesh"), ALL_SIZES, ids=str)
@pytest.mark.parametrize("model", [name for name in ZOO if name != "odd-mlp"])
def test_every_model_under_every_plan_equals_the_unsharded_model_on_2_4_and_8_ranks(model, plan, mesh):
    check(model, plan, mesh)


@pytest.mark.quick("4")
@pytest.mark.parametrize("tp", [3, 4])
def test_heads_that_do_not_divide_are_right(tp):
    check("tied-transformer", "tp+sp", {"tp": tp})  # two heads; four of three layers' dimensions do not divide by 3


@pytest.mark.slow
def test_fewer_heads_of_keys_than_ranks_are_right():
    check("llama", "tp", {"tp": 4})  # four query heads share two of keys and values


@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("model", "plan", "mesh"),
    [
        ("tied-transformer", "tp", {"tp": 2}),
        pytest.param("gpt2", "fsdp+tp+sp", {"dp": 2, "tp": 2}, marks=pytest.mark.slow),
    ],
)
def test_five_steps_on_real_processes_equal_the_unsharded_model(model, plan, mesh):
    world = torch.Size(mesh.values()).numel()
    for worst in on_ranks(ranks.parity, world, args=(model, plan, mesh, 0.5)):
        assert worst < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("plan", "mesh"), [("fsdp", {"dp": 2}), pytest.param("tp+sp", {"tp": 2}, marks=pytest.mark.slow)]
)
def test_a_checkpoint_of_divided_operators_loads_under_another_plan(plan, mesh, tmp_path):
    on_ranks(ranks.save_sharded, 2, args=("gpt2", "tp", {"tp": 2}, str(tmp_path)))
    assert on_ranks(ranks.load_sharded, 2, args=("gpt2", plan, mesh, str(tmp_path))) == [[], []]


@pytest.mark.slow
def test_each_result_of_an_operation_has_its_captured_name_by_which_a_mistake_is_told_from_one_after_it():
    model, (args, kwargs) = make("tied-transformer", 4)
    program = build_program(model, resolve_plan("tp", (("tp", 4),)), args, kwargs)
    captured = {node.name: str(node.args[1]) for node in program.joint.module.graph.nodes if node.target is getitem}
    own = (node for node in program.backward.graph.nodes if node.target is getitem and node not in MADE_BY)
    written = {node.name: str(node.args[1]) for node in own}
    assert len(written) > 5 and written.items() <= captured.items()


# -- collectives -------------------------------------------------------------------------------------------

BATCH, LENGTH, WIDTH = 2, 16, 64


@functools.cache
def program(plan: str, layers: int, ranks: int = 2) -> Program:
    model = llama(layers, hidden_size=WIDTH, vocab_size=64)
    return build_program(model, resolve_plan(plan, (("tp", ranks),)), (), text(BATCH, LENGTH))


def sent_by_a_layer(plan: str) -> dict[str, Counter]:
    """Large collectives of a half, by kind and elements: those of four layers without those of three. One reduces the
    gradients of all norms."""
    found: dict[str, Counter] = {}
    for name in ("forward", "backward"):
        three, four = (
            Counter(
                (node.target.__name__.split(".")[0], max(node.meta["val"].numel(), node.args[0].meta["val"].numel()))
                for node in collectives(getattr(program(plan, layers), name))
                if node not in REDUCES
            )
            for layers in (3, 4)
        )
        found[name] = Counter({kind: count for kind, count in (four - three).items() if kind[1] > WIDTH})
    return found


@pytest.mark.slow
def test_a_layer_of_llama_reduces_twice_in_forward_and_twice_in_backward_as_megatron_does():
    whole = ("all_reduce", BATCH * LENGTH * WIDTH)
    assert sent_by_a_layer("tp") == {"forward": {whole: 2}, "backward": {whole: 2}}


@pytest.mark.slow
def test_with_sequences_cut_each_reduction_is_a_gather_and_a_scatter_and_inputs_are_gathered_again():
    gather, scatter = ((kind, BATCH * LENGTH * WIDTH) for kind in ("all_gather_into_tensor", "reduce_scatter_tensor"))
    assert sent_by_a_layer("tp+sp") == {"forward": {gather: 2, scatter: 2}, "backward": {gather: 4, scatter: 2}}


@pytest.mark.slow
def test_gradients_of_whole_weights_are_left_to_one_reduction_not_scattered_and_gathered_at_the_end():
    model = llama(2, hidden_size=512, intermediate_size=1024)
    made = build_program(model, resolve_plan("tp+sp", (("tp", 2),)), (), text(1024))
    whole = [fqn for fqn, entry in made.parameters.items() if entry.placements == ("replicate",)]
    assert sum("mlp" in fqn for fqn in whole) == 6, "their tokens are more than their weights"
    nodes = collectives(made.backward)
    told = Counter(node.target.__name__.split(".")[0] for node in nodes if "gradient of" in SUBJECT.get(node, ""))
    assert set(told) == {"all_reduce"}


class UpAndDown(nn.Module):
    """Two layers, the second of what ``between`` makes of the first one's."""

    def __init__(self, between: Callable[[torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.up, self.down, self.between = nn.Linear(8, 16), nn.Linear(16, 8), between

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.between(self.up(x)).relu())


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_a_tensor_without_rows_is_joined_to_one_that_is_cut(dtype):
    def joined(hidden: torch.Tensor) -> torch.Tensor:
        none = hidden[: len(hidden) // 2].to(dtype)
        return torch.cat([hidden[len(hidden) // 2 :], none, torch.empty(0, dtype=hidden.dtype)])

    report = shardgraph.verify(UpAndDown(joined), (torch.randn(1, 4, 8),), "tp", fp64=True)
    assert report.ok, report


def test_a_tensor_without_rows_is_computed_with_before_it_is_joined():
    model = UpAndDown(lambda hidden: torch.cat([hidden, hidden[:0].tanh()]))
    report = shardgraph.verify(model, (torch.randn(4, 8),), "tp", fp64=True)
    assert report.ok and report.proof.ok, report


def test_column_and_row_parallel_layers_are_found_by_what_they_cost():
    placed = {fqn: entry.placements[0] for fqn, entry in program("tp", 2).parameters.items()}
    layer = {fqn.removeprefix("model.layers.1."): p for fqn, p in placed.items() if ".layers.1." in fqn}
    columns = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "mlp.gate_proj", "mlp.up_proj")
    assert {layer[f"{name}.weight"] for name in columns} == {"split(0)"}
    assert {layer[f"{name}.weight"] for name in ("self_attn.o_proj", "mlp.down_proj")} == {"split(1)"}
    assert {layer[f"{name}.weight"] for name in ("input_layernorm", "post_attention_layernorm")} == {"replicate"}


@pytest.mark.parametrize(
    ("up", "down", "shape"),
    [(nn.Linear(8, 32), nn.Linear(32, 8), (64, 8)), (nn.Conv2d(8, 32, 1), nn.Conv2d(32, 8, 1), (4, 8, 6, 6))],
    ids=["linear", "convolution"],
)
def test_a_bias_is_added_by_its_product_unless_that_is_reduced_before(up, down, shape):
    plan = shardgraph.preset("tp", {"tp": 2})
    columns, rows = (replace(plan.parameters[0][1], placements=(split,)) for split in ("split(0)", "split(1)"))
    plan = replace(plan, parameters=(*plan.parameters, ("0.weight", columns), ("2.weight", rows)))
    model, x = nn.Sequential(up, nn.GELU(), down), torch.randn(shape)
    made = build_program(model, plan, (x,))
    products = (aten.mm.default, aten.addmm.default, aten.convolution.default)
    first, second = (node for node in made.forward.graph.nodes if node.target in products)
    bias = [arg for arg in first.args if isinstance(arg, fx.Node) and arg.meta["val"].shape == (16,)]
    assert len(bias) == 1 and [arg.op for arg in bias] == ["placeholder"]
    assert [user.target for user in second.users] == [ir.ALL_REDUCE]
    assert shardgraph.verify(model, (x,), plan, fp64=True).ok


@pytest.mark.slow
def test_a_tied_vocabulary_is_cut_and_no_rank_sees_all_logits():
    vocabulary = 256
    model = Loss(gpt2(2, vocab_size=vocabulary))
    tied = build_program(model, resolve_plan("tp", (("tp", 2),)), (), text(BATCH, LENGTH))
    assert tied.parameters["model.transformer.wte.weight"].placements == ("split(0)",)
    values = [node.meta.get("val") for half in (tied.forward, tied.backward) for node in half.graph.nodes]
    logits = [v for v in values if isinstance(v, torch.Tensor) and v.dim() > 1 and v.shape[-1] == vocabulary]
    assert logits == []


@pytest.mark.slow
def test_a_fused_projection_is_cut_in_its_three_blocks():
    fused = build_program(gpt2(2), resolve_plan("tp", (("tp", 2),)), (), text(BATCH, LENGTH)).parameters
    assert fused["transformer.h.0.attn.c_attn.weight"].placements == ("split(1, blocks=3)",)


@pytest.mark.slow
@pytest.mark.parametrize("degree", [2, 4])
def test_the_memory_of_matrices_falls_by_the_degree(degree):
    whole, split = program("single", 2, 1), program("tp", 2, degree)
    matrices = [fqn for fqn, shape in whole.shapes.items() if len(shape) > 1]
    local = sum(torch.Size(split.parameters[f].local_shape(split.shapes[f], split.plan.mesh)).numel() for f in matrices)
    assert local == sum(whole.shapes[f].numel() for f in matrices) // degree


@pytest.mark.quick("32768-tp")
@pytest.mark.parametrize("style", ["tp", "tp+sp"])
@pytest.mark.parametrize("tokens", [2048, 32768, 131072])
def test_matrices_are_cut_however_long_sequences_are(tokens, style):
    """Nor does a rank multiply its part of a sequence by whole matrices, in stripes or otherwise."""
    with torch.device("meta"):
        model = wide_llama()
    split = build_program(model, resolve_plan(style, (("tp", 8),)), (), text(1, tokens)).parameters
    assert {entry.placements[0] for fqn, entry in split.items() if "norm" not in fqn} == {"split(0)", "split(1)"}


def wide_llama() -> nn.Module:
    """One layer of Llama 3 8B."""
    heads = {"num_attention_heads": 32, "num_key_value_heads": 8}
    return llama(1, hidden_size=4096, intermediate_size=14336, vocab_size=128256, **heads).bfloat16()


def test_what_has_no_rule_is_said():
    class Distances(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(8, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return torch.cdist(self.linear(x), x)

    made = build_program(Distances(), resolve_plan("tp", (("tp", 2),)), (torch.zeros(4, 8),))
    assert any("cdist" in note and "no rule" in note for note in made.notes)


class Softmax(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.softmax(self.linear(x), -1)


def notes_of_a_softmax() -> list[str]:
    return build_program(Softmax(), resolve_plan("tp", (("tp", 2),)), (torch.zeros(4, 8),)).notes


def test_strategies_that_work_need_no_note():
    assert notes_of_a_softmax() == []


def test_a_strategy_that_fails_is_noted_with_its_error(monkeypatch):
    def changed(target, args, kwargs):
        raise AttributeError(f"{target} is not what it was")

    monkeypatch.setattr(torch_api, "ask_strategy", changed)
    notes = notes_of_a_softmax()
    assert any(re.search(r"^aten\._softmax\.default: \d+ combinations .*AttributeError: .*not what", n) for n in notes)


def test_a_table_that_fails_is_noted_with_its_error(monkeypatch):
    class Tables(dict):
        def __getitem__(self, target):
            raise TypeError("tables have another form")

    monkeypatch.setattr(torch_api, "single_dim_strategies", lambda: Tables({torch.ops.aten.tanh.default: None}))
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh())
    notes = build_program(model, resolve_plan("tp", (("tp", 2),)), (torch.zeros(4, 8),)).notes
    assert any(note.startswith("aten.tanh.default: ") and "TypeError: tables have" in note for note in notes)


def test_combinations_that_are_not_tried_are_noted(monkeypatch):
    monkeypatch.setattr(dtensor_rules, "_MOST_COMBINATIONS", 2)
    assert any("_softmax.default" in note and "2 are tried at most" in note for note in notes_of_a_softmax())


# -- placements --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "cut", "after", "expected"),
    [
        ((4, 6, 8), Shard(1), (24, 8), blocks(0, 4)),  # a sequence in a batch of 4
        ((24, 8), blocks(0, 4), (4, 6, 8), Shard(1)),
        ((4, 6, 8), Shard(0), (24, 8), Shard(0)),
        ((24, 8), Shard(1), (24, 2, 4), Shard(1)),  # heads
        ((24, 2, 4), Shard(2), (24, 8), blocks(1, 2)),
        ((3, 8), Shard(0), (24,), None),  # three rows among two ranks
        ((1, 6), Shard(1), (6,), Shard(0)),
        ((4, 0, 6), Shard(0), (0, 24), None),  # no elements, as in a loop over positions before the first
        ((0, 4, 6), Shard(1), (4, 0), None),
        ((4, 6), PARTIAL, (24,), PARTIAL),
        ((4, 6), Replicate(), (24,), Replicate()),
    ],
)
def test_a_cut_goes_through_a_view(before, cut, after, expected):
    if divides(cut, before, 2):
        assert through_view(cut, before, after, 2) == expected


@pytest.mark.parametrize("cut", [Shard(1), blocks(1, 2), blocks(1, 3), Shard(0)])
def test_parts_seen_in_another_shape_are_the_parts_of_what_is_seen(cut):
    full, shape = torch.arange(4 * 12 * 2).view(4, 12, 2), (48, 2)
    other = through_view(cut, full.shape, shape, 2)
    for index in range(2):
        dims = [(p.dim, getattr(p, "split_factor", 1)) for p in (cut, other)]
        part = take_part(full, *dims[0], 2, index)
        assert part.shape == local_shape(cut, full.shape, 2)
        assert torch.equal(part.reshape(-1, 2), take_part(full.view(shape), *dims[1], 2, index))


# -- plans -------------------------------------------------------------------------------------------------


def test_a_plan_with_operators_round_trips():
    plan = shardgraph.preset("fsdp+tp+sp", {"dp": 2, "tp": 4})
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert plan.operators == (("tp", "sequence"),) and plan.data_size == 2


def test_found_placements_are_written_down_in_the_plan():
    found = program("tp", 2)
    placed = place_operators(found.joint, found.plan, found.shapes)
    assert placed.undecided(found.shapes) == []
    assert Plan.from_yaml(placed.to_yaml()).resolve(found.shapes) == found.parameters


def test_a_written_placement_is_kept():
    base = program("tp", 2)
    fqn = "model.layers.0.mlp.up_proj.weight"
    entry = base.parameters[fqn]
    plan = replace(base.plan, parameters=(*base.plan.parameters, (fqn, replace(entry, placements=("replicate",)))))
    model = llama(2, hidden_size=WIDTH, vocab_size=64)
    assert build_program(model, plan, (), text(BATCH, LENGTH)).parameters[fqn].placements == ("replicate",)


@pytest.mark.slow
def test_a_layer_of_which_the_plan_says_something_else_is_decided_by_itself():
    plan = shardgraph.preset("tp", {"tp": 2})
    other = "model.layers.2.mlp.up_proj.weight"
    entry = replace(plan.parameters[0][1], placements=("split(1)",))
    plan = replace(plan, parameters=(*plan.parameters, (other, entry)))
    made = build_program(llama(4, hidden_size=WIDTH, vocab_size=64), plan, (), text(BATCH, LENGTH)).parameters
    placed = [made[f"model.layers.{i}.mlp.up_proj.weight"].placements[0] for i in range(4)]
    assert placed == ["split(0)", "split(0)", "split(1)", "split(0)"]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"operators": (("nope", "whole"),)}, "operators is 'nope'; it may be an axis of the mesh"),
        ({"operators": (("tp", "halves"),)}, "operators.tp is 'halves'; it may be 'whole' or 'sequence'"),
        ({"operators": ()}, "placements is 'auto'; it may be 'replicate' or 'shard\\(0\\)' for the axis 'tp'"),
    ],
)
def test_a_wrong_plan_is_refused(change, message):
    with pytest.raises(PlanError, match=message):
        replace(shardgraph.preset("tp", {"tp": 2}), **change)


def test_a_split_that_does_not_divide_names_the_sizes_that_work():
    plan = shardgraph.preset("tp", {"tp": 4})
    entry = replace(plan.parameters[0][1], placements=(split_text(0),))
    with pytest.raises(PlanError, match=r"'weight' of shape \[6, 4\].*has 4 ranks: the dimension must be a multiple"):
        replace(plan, parameters=(("*", entry),)).resolve({"weight": torch.Size((6, 4))})


@pytest.mark.parametrize(
    ("name", "mesh", "message"),
    [
        ("tp", {"a": 2, "b": 2}, "call one of its axes 'tp'"),
        ("fsdp+tp", {"tp": 2}, "needs an axis for 'fsdp' beside 'tp'"),
        ("fsdp+tq", {"dp": 2, "tp": 2}, "no plan called 'fsdp\\+tq'"),
    ],
)
def test_a_mesh_that_does_not_suit_is_refused(name, mesh, message):
    with pytest.raises(PlanError, match=message):
        shardgraph.preset(name, mesh)


def test_without_example_inputs_placements_cannot_be_found():
    with pytest.raises(ShardGraphError, match="give example_inputs"):
        shardgraph.launch(ranks.compile_without_inputs, 2, args=("tp",), timeout=60)


class ByKeys(nn.Module):
    """Modules under keys that are patterns."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = nn.ModuleDict(
            {"a[0]": nn.Linear(16, 64), "a[01]?": nn.Linear(64, 16), "b*": nn.Linear(16, 16), "b1": nn.Linear(16, 16)}
        )
        shardgraph.annotate(self.parts["b*"], {"": shardgraph.recompute()})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for part in self.parts.values():
            x = part(x).relu()
        return x.square().mean()


def test_a_name_that_is_a_pattern_stands_for_itself():
    report = shardgraph.verify(ByKeys(), torch.randn(8, 16), "tp", recompute="selective")
    assert report.ok, str(report)
    plan = shardgraph.analyze(ByKeys(), torch.randn(8, 16), "tp", mesh={"tp": 2}, cluster="H100").plan
    shapes = {name: parameter.shape for name, parameter in ByKeys().named_parameters()}
    again = Plan.from_yaml(plan.to_yaml())
    assert again.resolve(shapes) == plan.resolve(shapes)
    assert len({plan.resolve(shapes)[f"parts.{key}.weight"].placements for key in ("a[0]", "a[01]?")}) == 2
