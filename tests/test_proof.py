"""Programs are proved by their text alone; what differs from the model is not."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

import shardgraph
from shardgraph.capture.capture import capture
from shardgraph.passes.lowering import lower
from shardgraph.plans.presets import preset
from shardgraph.plans.shards import named_shapes
from shardgraph.proof.prove import Proof, prove
from tests.mutants import chosen
from tests.mutation import CASES, subject
from tests.zoo import ZOO, make


@cache
def captured(name: str) -> tuple[Any, Any]:
    model, (args, kwargs) = make(name, 4)
    return capture(model, args, kwargs, device=torch.device("cpu")), named_shapes(model)


def proof(name: str, plan: str, mesh: dict[str, int]) -> Proof:
    joint, shapes = captured(name)
    return prove(lower(joint, preset(plan, mesh), shapes))


@pytest.mark.quick("*-odd-mlp", "*-conv-batch-norm", "fsdp-*-tied-transformer")
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize(
    ("plan", "mesh"),
    [
        ("ddp", {"dp": 2}),
        ("zero1", {"dp": 3}),
        ("fsdp", {"dp": 2}),
        ("fsdp", {"dp": 1024}),
        ("hsdp", {"dp_replicate": 2, "dp_shard": 2}),
    ],
)
def test_every_model_under_every_plan_of_data_parallelism_is_proved(name, plan, mesh):
    found = proof(name, plan, mesh)
    assert found.ok, str(found)


@pytest.mark.quick("*-odd-mlp", "tp-mesh0-tied-transformer")
@pytest.mark.parametrize("name", ZOO)
@pytest.mark.parametrize(("plan", "mesh"), [("tp", {"tp": 2}), ("tp+sp", {"tp": 2}), ("fsdp+tp", {"dp": 2, "tp": 2})])
def test_divided_operators_are_proved(name, plan, mesh):
    found = proof(name, plan, mesh)
    assert found.ok, str(found)


@pytest.mark.quick("a bias whose three blocks are three ranks' parts")
@pytest.mark.parametrize(
    ("name", "plan", "mesh"),
    [
        pytest.param("tied-transformer", "tp+sp", {"tp": 3}, id="a bias whose three blocks are three ranks' parts"),
        pytest.param("bert", "tp+sp", {"tp": 3}, id="rows that are looked up at places that ranks share"),
        pytest.param("mixture", "ep", {"ep": 4}, id="an expert for each rank"),
        pytest.param("llama", "tp", {"tp": 4}, id="fewer heads of keys than ranks"),
        pytest.param("tied-transformer", "zero2+tp+sp", {"dp": 2, "tp": 8}, id="a batch and a head for each rank"),
    ],
)
def test_parts_that_stand_among_other_dimensions_than_the_models_are_proved(name, plan, mesh):
    model, (args, kwargs) = make(name, 4)
    found = shardgraph.prove(model, args, plan, mesh=mesh, example_kwargs=kwargs)
    assert found.ok, str(found)


def test_one_channel_row_of_each_rank_is_proved_where_a_bias_broadcasts_over_it():
    model, (args, kwargs) = make("conv-batch-norm", 2)
    found = shardgraph.prove(model, args, "fsdp+tp+sp", mesh={"dp": 2, "tp": 2}, example_kwargs=kwargs)
    assert found.ok, str(found)


PROVED = ["cp-2", "ep-2", "fsdp-2-recompute", "zero2-2-selective", "fsdp-2-loss-chunk", "fsdp-2-offload"]
PROVED += [
    "fsdp-2-precision",
    "pp-2",
    "pp+ddp-2x2",
    "pp+fsdp-2x2",
    "pp+zero2-2x2",
    "pp+fsdp-2x2-checkpoint",
    "pp+tp-2x2",
]


@pytest.mark.quick("fsdp-2-*", "pp+tp-2x2")
@pytest.mark.parametrize("case", [case for case in CASES if case.id in PROVED], ids=lambda case: case.id)
def test_recomputed_offloaded_and_staged_programs_are_proved(case):
    found = prove(subject(case).program)
    assert found.ok, str(found)


MUTATED = ["fsdp-2", "tp+sp-2", "ep-2", "fsdp-2-loss-chunk"]


@pytest.mark.quick("fsdp-2")
@pytest.mark.parametrize("case", [case for case in CASES if case.id in MUTATED], ids=lambda case: case.id)
def test_a_program_with_a_fault_is_not_proved(case):
    made = subject(case)
    wrong = [mutant for mutant in chosen(made.program, 0, 6) if made.differs(mutant.of(made.program))]
    proved = [str(m) for m in wrong if prove(m.of(made.program)).ok and "bfloat16" not in m.fault]
    assert len(wrong) > 10 and proved == []
