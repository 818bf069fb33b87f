"""Behaviours that torch's own tests of FSDP2, DDP and pipelines check, where no other test of ours does; which of ours
is for which of theirs is in docs/torch_tests.md."""

from __future__ import annotations

import gc
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import shardgraph
from shardgraph import Pipeline, Precision, precision, preset
from shardgraph.ir import REDUCE_SCATTER
from shardgraph.passes.lowering import build_program
from tests import like_torch, ranks
from tests.standing import on_ranks

pytestmark = pytest.mark.timeout(280)
EXACT = 1e-9  # double precision; what is left is the order of sums
PLANS = ["fsdp", "ddp"]
BF16, FP32 = torch.bfloat16, torch.float32

# -- training ----------------------------------------------------------------------------------------------


@pytest.mark.quick("*-fsdp")
@pytest.mark.parametrize("plan", PLANS)
@pytest.mark.parametrize("name", like_torch.MODELS)
def test_training_equals_the_unsharded_model(name, plan):
    for errors in on_ranks(like_torch.training_errors, 2, args=([name], plan)):
        assert errors[name] < EXACT


@pytest.mark.filterwarnings("ignore:shardgraph makes the gradients of sparse")
@pytest.mark.parametrize("plan", PLANS)
def test_a_sparse_embedding_trains_with_dense_gradients(plan):
    assert max(on_ranks(like_torch.sparse_error, 2, args=(plan,))) < 1e-6


@pytest.mark.parametrize("plan", PLANS)
def test_one_backward_may_follow_two_forwards(plan):
    for errors in on_ranks(like_torch.backward_after_two_forwards, 2, args=(plan,)):
        assert max(errors.values()) < EXACT, errors


@pytest.mark.parametrize("plan", PLANS)
def test_outputs_may_be_left_without_a_backward(plan):
    assert max(on_ranks(like_torch.ignored_outputs, 2, args=(plan,))) < EXACT


@pytest.mark.parametrize("plan", PLANS)
def test_the_call_after_an_error_of_forward_trains(plan):
    for told, error in on_ranks(like_torch.after_an_error_of_forward, 2, args=(plan,)):
        assert "armed" in told and error < EXACT


@pytest.mark.parametrize("plan", PLANS)
def test_what_is_frozen_after_compiling_is_not_reduced_until_it_trains_again(plan):
    for error, reduced in on_ranks(like_torch.frozen_in_turn, 2, args=(plan,)):
        assert error < EXACT and reduced == [6, 6, 12]


@pytest.mark.slow
def test_microbatches_accumulate_with_and_without_reductions_under_every_plan_of_data():
    plans: list[tuple[str, dict[str, int]]] = [(plan, {"dp": 4}) for plan in ("ddp", "zero1", "zero2", "fsdp")]
    plans.append(("hsdp", {"dp_replicate": 2, "dp_shard": 2}))
    for errors in on_ranks(like_torch.accumulation_errors, 4, args=(plans,)):
        assert max(errors.values()) < EXACT, errors


@pytest.mark.parametrize("of", ["the model", "the compiled module"])
@pytest.mark.parametrize("plan", PLANS)
def test_a_model_is_compiled_once(plan, of):
    for told in on_ranks(like_torch.compiled_again, 2, args=(plan, of)):
        assert "compiled already" in told


# -- states ------------------------------------------------------------------------------------------------


@pytest.mark.quick("ddp")
@pytest.mark.parametrize("plan", PLANS)
def test_training_goes_on_from_a_checkpoint_as_without(plan, tmp_path):
    for error, beside in on_ranks(like_torch.through_a_checkpoint, 2, args=(str(tmp_path), plan)):
        assert error == 0.0 and beside == 0.0


@pytest.mark.parametrize("plan", PLANS)
def test_a_state_is_the_memory_of_the_parameters_through_training_and_loading(plan):
    assert on_ranks(like_torch.state_shares_memory, 2, args=(plan,)) == [[], []]


@pytest.mark.parametrize("plan", PLANS)
def test_a_model_on_meta_may_be_loaded_by_parts(plan):
    assert max(on_ranks(like_torch.loaded_by_parts, 2, args=(plan,))) < EXACT


def test_shards_are_the_chunks_of_torch():
    assert on_ranks(like_torch.shards_are_chunks, 2) == [[], []]


@pytest.mark.parametrize(("plan", "mesh"), [("tp", {"tp": 2})])
def test_a_model_on_meta_whose_operators_are_divided_has_the_values_of_the_unsharded_initialisation(plan, mesh):
    assert max(on_ranks(like_torch.meta_initialisation_of_divided_operators, 2, args=(mesh, plan))) == 0.0


@pytest.mark.slow
def test_a_checkpoint_of_rows_and_columns_loads_under_other_plans(tmp_path):
    both = {"dp": 2, "tp": 2}
    on_ranks(ranks.save_sharded, 4, args=("tied-transformer", "fsdp+tp", both, str(tmp_path)))
    for plan, mesh in (("fsdp+tp", both), ("hsdp", {"dp_replicate": 2, "dp_shard": 2})):
        assert on_ranks(ranks.load_sharded, 4, args=("tied-transformer", plan, mesh, str(tmp_path))) == [[]] * 4


@pytest.mark.slow
def test_a_checkpoint_of_rows_and_columns_with_replicas_loads_under_other_plans(tmp_path):
    three = {"dp_replicate": 2, "dp_shard": 2, "tp": 2}
    on_ranks(ranks.save_sharded, 8, args=("tied-transformer", "hsdp+tp", three, str(tmp_path)))
    assert on_ranks(ranks.load_sharded, 8, args=("tied-transformer", "hsdp+tp", three, str(tmp_path))) == [[]] * 8
    assert on_ranks(ranks.load_sharded, 2, args=("tied-transformer", "fsdp", {"dp": 2}, str(tmp_path))) == [[]] * 2


@pytest.mark.quick("named-2", "of a group-2")
@pytest.mark.parametrize(("kind", "world"), [("named", 2), ("of a group", 2), ("of two groups", 4)])
def test_a_mesh_of_the_user_is_trained_on(kind, world):
    assert max(on_ranks(like_torch.on_a_mesh_of_the_user, world, args=(kind,))) < EXACT


def test_a_mesh_whose_dimensions_have_no_names_is_refused():
    for told in on_ranks(like_torch.on_a_mesh_without_names, 2):
        assert "the mesh has no dimension names" in told


@pytest.mark.parametrize(("plan", "message"), [("fsdp", "the mesh .* has 3"), ("hsdp", "give mesh=.*dp_shard")])
def test_a_mesh_of_three_axes_is_refused_by_plans_of_data(plan, message):
    with pytest.raises(shardgraph.PlanError, match=message):
        preset(plan, {"a": 2, "b": 2, "c": 2})


def test_a_container_without_a_forward_is_refused():
    with pytest.raises(shardgraph.CaptureError, match="forward of ModuleList raises NotImplementedError"):
        shardgraph.compile(nn.ModuleList([nn.Linear(4, 4)]), "single", progress=False)(torch.ones(2, 4))


# -- mixed precision ---------------------------------------------------------------------------------------


def test_what_was_frozen_at_the_first_forward_is_reduced_in_its_own_precision_later():
    for reduced, gradients in on_ranks(like_torch.reductions_after_a_frozen_forward, 2):
        assert reduced == gradients == {FP32}


@pytest.mark.parametrize(("plan", "mesh"), [("tp", {"tp": 2}), ("fsdp", {"dp": 2})])
def test_an_overflow_in_one_part_of_the_parameters_skips_the_step_on_all(plan, mesh):
    assert on_ranks(like_torch.overflow_in_one_part, 2, args=(plan, mesh)) == [([True, False, True], 4.0)] * 2


def test_a_model_in_bfloat16_is_reduced_in_the_dtype_of_its_plan():
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)).bfloat16()
    for reduce, expected in (("bfloat16", BF16), ("float32", FP32)):
        plan = replace(preset("fsdp", {"dp": 2}), precision=Precision("bfloat16", reduce=reduce))
        backward = build_program(model, plan, (torch.zeros(4, 8),)).backward
        assert {n.meta["val"].dtype for n in backward.graph.nodes if n.target is REDUCE_SCATTER} == {expected}


class TwoInputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.linear(x), y * 1


class MakesAnInput(nn.Module):
    """Hands a layer a tensor that is made in forward."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), TwoInputs()

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.second(self.first(x), torch.ones(2, 4))


def test_an_annotated_module_casts_what_forward_hands_it_and_an_unannotated_one_does_not():
    for given in ({}, {"second": precision("bfloat16", outputs="bfloat16")}):
        model = MakesAnInput()
        shardgraph.annotate(model, given)
        result, made = shardgraph.compile(model, "single", precision="bf16", progress=False)(torch.ones(2, 4))
        assert (result.dtype, made.dtype) == (BF16, BF16 if given else FP32)


@pytest.mark.parametrize("given", ["bf16", "fp16"])
@pytest.mark.parametrize(
    ("model", "shape"),
    [
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8), nn.Linear(8, 8)), (4, 8)),
        (lambda: nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), (4, 8)),
        (lambda: nn.Sequential(nn.Conv2d(1, 5, 3), nn.BatchNorm2d(5), nn.Conv2d(5, 4, 3)), (3, 1, 9, 9)),
    ],
    ids=["layer norm", "batch norm of rows", "batch norm of images"],
)
def test_norms_train_in_half_precision(model, shape, given):
    sharded = shardgraph.compile(model(), "single", precision=given, progress=False)
    output = sharded(torch.randn(shape))
    assert output.dtype == {"bf16": BF16, "fp16": torch.float16}[given]
    output.float().square().mean().backward()
    assert all(parameter.grad.isfinite().all() for parameter in sharded.parameters())


class Pair(NamedTuple):
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Inner:
    x: torch.Tensor
    y: torch.Tensor


@dataclass
class Outer:
    inner: Inner
    z: torch.Tensor


class Contained(nn.Module):
    """A layer between containers of tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, given: Any) -> Any:
        if isinstance(given, Outer):
            return Outer(Inner(self.linear(given.inner.x), self.linear(given.inner.y)), self.linear(given.z))
        return type(given)(self.linear(given.x), self.linear(given.y))


class Containers(nn.Module):
    def __init__(self, kind: type) -> None:
        super().__init__()
        self.kind, self.first, self.second = kind, Contained(), Contained()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        given = Outer(Inner(x, x.clone()), x.clone()) if self.kind is Outer else self.kind(x, x.clone())
        made = self.second(self.first(given))
        return made.inner.x + made.inner.y + made.z if isinstance(made, Outer) else made.x + made.y


@pytest.mark.parametrize("given", [None, Precision("bfloat16", reduce="float32", outputs="float32")], ids=str)
@pytest.mark.parametrize("kind", [Inner, Outer, Pair])
def test_layers_may_hand_each_other_tensors_in_containers(kind, given):
    report = shardgraph.verify(Containers(kind), (torch.randn(4, 4),), "fsdp", precision=given, steps=2, tolerance=1e-6)
    assert report.ok, report


class Region(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return checkpoint(self.linear, x.float(), use_reentrant=False).float().square().sum()


@pytest.mark.parametrize("outputs", [None, "float32"])
def test_a_checkpointed_layer_casts_as_the_same_layer_without(outputs):
    model = Region()
    shardgraph.annotate(model, {"linear": precision("bfloat16", outputs=outputs)})
    x = torch.randn(2, 4)
    shardgraph.compile(model, "single", progress=False)(x).backward()
    weight, bias = (p.detach().bfloat16().requires_grad_() for p in model.parameters())
    F.linear(x.bfloat16(), weight, bias).float().square().sum().backward()
    torch.testing.assert_close(model.linear.weight.grad, weight.grad.float(), rtol=1e-2, atol=1e-2)


# -- pipelines ---------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_step_of_a_pipeline_leaves_no_tensors_behind():
    sharded = shardgraph.compile(
        nn.Sequential(*(nn.Linear(4, 4) for _ in range(4))),
        "pp",
        pipeline=Pipeline(4, "looped-bfs", stages=("2",)),
        loss_fn=lambda output, target: (output - target).square().mean(),
        example_inputs=(torch.zeros(8, 4),),
        example_kwargs={"target": torch.zeros(8, 4)},
        progress=False,
    )

    def left() -> int:
        sharded.train_step(torch.ones(8, 4), target=torch.ones(8, 4))
        gc.collect()
        return sum(issubclass(type(each), torch.Tensor) for each in gc.get_objects())

    left()
    assert left() == left()
