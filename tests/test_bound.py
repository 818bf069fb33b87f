"""What every rank runs, its graphs bound to its place in the mesh, against lockstep, which runs unbound graphs."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import fx, nn

from shardgraph import Pipeline, Plan, preset
from shardgraph.capture.capture import capture
from shardgraph.checks.lockstep import run_lockstep
from shardgraph.ir import Parameter, Role, Saved, placeholders
from shardgraph.mesh import Mesh, coordinates
from shardgraph.passes.lowering import lower
from shardgraph.passes.program import Program
from shardgraph.plans.shards import named_shapes, part_of
from tests.bound import run_bound
from tests.zoo import make

CPU = torch.device("cpu")


def equal_on_every_rank(gm: fx.GraphModule, mesh: Mesh, inputs: list[dict[Role, Any]]) -> list[dict[Role, Any]]:
    """Run a graph, bound and in lockstep; gives each rank's results once they are the same bits."""
    expected = run_lockstep(gm, mesh, inputs)
    for rank, (mine, theirs) in enumerate(zip(run_bound(gm, mesh, inputs), expected, strict=True)):
        for (role, value), (_, other) in zip(mine, theirs, strict=True):
            same = torch.equal(value, other) if isinstance(other, torch.Tensor) else value == other
            assert same, f"{role} of rank {rank}"
    return [{role: value for role, value in each if role is not None} for each in expected]


def given(gm: fx.GraphModule, program: Program, held: Mapping[Role, Any], rank: int) -> dict[Role, Any]:
    """A rank's inputs of a graph: what it holds, its parts of parameters, and numbers for all else."""
    generator = torch.Generator().manual_seed(rank)
    mesh, found = program.plan.mesh, dict(held)
    for role, node in placeholders(gm).items():
        value = node.meta["val"]
        if isinstance(role, Parameter):
            whole = torch.randn(program.shapes[role.fqn], generator=torch.Generator().manual_seed(7), dtype=value.dtype)
            found[role] = part_of(whole, program.parameters[role.fqn], mesh, coordinates(mesh, rank)).contiguous()
        elif role not in found and isinstance(value, torch.Tensor):
            made = torch.randint(3, value.shape, generator=generator).to(value.dtype)
            found[role] = torch.empty_strided(value.shape, value.stride(), dtype=value.dtype).copy_(made)
    return found


def check(program: Program) -> None:
    """Every stage's forward and backward, and what backward becomes under ``no_sync`` and after it."""
    mesh, plan = program.plan.mesh, program.plan
    backwards = ["backward", "local", "accumulate"] if plan.pipeline is None else ["backward", "inputs", "weights"]
    for stage in program.stages:
        held: list[dict[Role, Any]] = [{} for _ in range(len(list(_ranks(mesh))))]
        for name in ("gather", "forward", *backwards, "reduce"):
            if stage.prefix + name in program.graphs or name in backwards:
                gm = program.graph(stage.prefix + name)
                inputs = [given(gm, program, mine, rank) for rank, mine in enumerate(held)]
                for mine, result in zip(held, equal_on_every_rank(gm, mesh, inputs), strict=True):
                    mine |= {role: value for role, value in result.items() if isinstance(role, Saved)}


def _ranks(mesh: Mesh) -> range:
    size = 1
    for _, length in mesh:
        size *= length
    return range(size)


def lowered(model: nn.Module, call: Any, plan: Plan) -> Program:
    joint = capture(model, *call, device=CPU)
    return lower(joint, plan, named_shapes(model))


@pytest.mark.parametrize(
    ("plan", "mesh"),
    [
        ("fsdp", {"dp": 3}),
        ("zero2", {"dp": 2}),
        ("hsdp", {"dp_replicate": 2, "dp_shard": 2}),
        ("tp", {"tp": 2}),
        ("tp+sp", {"tp": 2}),
        ("fsdp+tp", {"dp": 2, "tp": 2}),
        ("cp", {"cp": 2}),
    ],
)
def test_bound_graphs_of_every_rank_compute_what_lockstep_does(plan, mesh):
    model, call = make("tied-transformer", 4)
    check(lowered(model.eval(), call, preset(plan, mesh)))


def test_bound_graphs_of_stages_compute_what_lockstep_does():
    model, call = make("odd-mlp", 4)
    joint, shapes = capture(model.eval(), *call, device=CPU), named_shapes(model)
    names = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    check(lower(joint, preset("pp+zero2", {"pp": 2, "dp": 2}, Pipeline(2, stages=tuple(names[1:2]))), shapes))


def test_bound_graphs_of_experts_compute_what_lockstep_does():
    model, call = make("mixture", 4)
    check(lowered(model.eval(), call, preset("ep", {"ep": 2})))
