"""Operations are placed once for all plans that place them alike; what is taken over equals what is placed anew."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch

from shardgraph.capture.capture import capture
from shardgraph.ir import JointGraph
from shardgraph.passes.lowering import lower
from shardgraph.passes.placing import place_operators
from shardgraph.passes.sharding.problem import OperatorPlacements
from shardgraph.plans.annotations.kinds import replicate
from shardgraph.plans.plan import Plan
from shardgraph.plans.presets import preset
from shardgraph.plans.shards import named_shapes
from tests.zoo import make

MODEL, (ARGS, KWARGS) = make("tied-transformer", 4)
SHAPES = named_shapes(MODEL)
fresh = partial(capture, MODEL, ARGS, KWARGS, device=torch.device("cpu"))


def plan(name: str, dp: int = 2, tp: int = 2) -> Plan:
    return preset(name, {"dp": dp, "tp": tp})


@pytest.fixture
def placed(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The ranks of each search for placements."""
    searched: list[int] = []
    create = OperatorPlacements.__init__

    def counted(self: OperatorPlacements, gm: object, parts: int, *args: object) -> None:
        searched.append(parts)
        create(self, gm, parts, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(OperatorPlacements, "__init__", counted)
    return searched


def text(joint: JointGraph, wanted: Plan) -> str:
    return lower(joint, place_operators(joint, wanted, SHAPES), SHAPES).text


@pytest.mark.slow
def test_a_decided_plan_is_lowered_with_what_was_placed_for_the_decision(placed):
    text(fresh(), plan("fsdp+tp"))
    assert placed == [2]


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp+tp", "zero2+tp"])
def test_plans_that_store_parameters_otherwise_share_placements_and_lower_as_by_themselves(name, placed):
    joint = fresh()
    text(joint, plan("ddp+tp"))
    shared = text(joint, plan(name, dp=4))
    assert placed == [2]
    assert shared == text(fresh(), plan(name, dp=4))


@pytest.mark.quick("ranks")
@pytest.mark.parametrize(
    "other",
    [plan("ddp+tp", tp=4), plan("ddp+tp+sp"), replace(plan("ddp+tp"), annotations=(("**.weight", replicate("tp")),))],
    ids=["ranks", "style", "annotations"],
)
def test_plans_that_place_operations_otherwise_share_nothing(other, placed):
    joint = fresh()
    text(joint, plan("ddp+tp"))
    text(joint, other)
    assert len(placed) == 2
