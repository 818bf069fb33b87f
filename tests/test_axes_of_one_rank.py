"""A mesh may have axes of one rank, as scripts have whose sizes are arguments: the program is that without the axis."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import shardgraph
from shardgraph.ir import collectives, group_of
from shardgraph.passes.lowering import build_program
from shardgraph.passes.placing import place_operators
from shardgraph.passes.program import Program
from shardgraph.plans.resolve import resolve_plan
from tests.zoo import make

pytestmark = pytest.mark.usefixtures("shared_captures")

PLANS = {
    "fsdp": {"dp": 1},
    "zero1": {"dp": 1},
    "hsdp": {"dp_replicate": 2, "dp_shard": 1},
    "tp": {"tp": 1},
    "fsdp+tp": {"dp": 2, "tp": 1},
    "fsdp+tp+sp": {"dp": 1, "tp": 1},
    "zero2+tp": {"dp": 1, "tp": 2},
    "cp": {"cp": 1},
    "fsdp+cp": {"dp": 2, "cp": 1},
}


def groups(program: Program) -> set[str]:
    return {group_of(node) for gm in (program.forward, program.backward) for node in collectives(gm)}


def lone(mesh: dict[str, int]) -> Iterable[str]:
    return (axis for axis, size in mesh.items() if size == 1)


@pytest.mark.quick("cp", "fsdp+cp", "fsdp+tp+sp", "tp", "zero1")
@pytest.mark.parametrize("plan", PLANS)
def test_training_is_equal_and_proved_without_a_collective_along_it(plan):
    mesh = PLANS[plan]
    module, (args, kwargs) = make("llama", 2)
    report = shardgraph.verify(module, args, plan, mesh=mesh, example_kwargs=kwargs, steps=3, fp64=True)
    assert report.ok, str(report)
    assert report.proof.ok, str(report.proof)
    program = build_program(module, resolve_plan(plan, mesh), args, kwargs)
    assert not groups(program) & set(lone(mesh))
    assert bool(groups(program)) == any(size > 1 for size in mesh.values())


@pytest.mark.slow
@pytest.mark.parametrize("mesh", [{"ep": 1}, {"dp": 2, "ep": 1}], ids=["ep", "fsdp+ep"])
def test_experts_of_one_rank_are_exchanged_with_no_other(mesh):
    module, (args, kwargs) = make("mixture", 2)
    plan = "fsdp+ep" if "dp" in mesh else "ep"
    report = shardgraph.verify(module, args, plan, mesh=mesh, example_kwargs=kwargs, steps=3, fp64=True)
    assert report.ok and report.proof.ok, str(report)
    assert "ep" not in groups(build_program(module, resolve_plan(plan, mesh), args, kwargs))


def test_annotations_along_it_hold():
    class Annotated(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = nn.Linear(8, 16), nn.Linear(16, 8)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = shardgraph.constrain(F.gelu(self.first(x)), shardgraph.shard(1, "tp"))
            return self.second(hidden).square().mean()

    model, mesh = Annotated(), {"dp": 2, "tp": 1}
    shardgraph.annotate(model, {"first.weight": shardgraph.shard(0, "tp")})
    report = shardgraph.verify(model, (torch.randn(4, 8),), "fsdp+tp", mesh=mesh, steps=2, fp64=True)
    assert report.ok and report.proof.ok, str(report)


def test_a_plan_of_such_a_mesh_is_decided():
    module, (args, kwargs) = make("llama", 2)
    shapes = {name: parameter.shape for name, parameter in module.named_parameters()}
    program = build_program(module, resolve_plan("fsdp+tp", {"dp": 2, "tp": 1}), args, kwargs)
    decided = place_operators(program.joint, program.plan, shapes)
    assert decided.decided and not decided.undecided(shapes)
