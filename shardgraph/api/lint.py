"""``shardgraph.lint``: what a model, under a plan, does otherwise than people expect."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardgraph.api.options import OPTIONS
from shardgraph.arguments import OPTIMIZER, checked
from shardgraph.capture.captures import Call, Captures
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import ShardGraphError
from shardgraph.findings.finding import Finding, Findings
from shardgraph.findings.model_rules import of_model, of_optimizer, sharded_already
from shardgraph.findings.program_rules import of_program
from shardgraph.module.sharded import ShardedModule
from shardgraph.plans.plan import Plan
from shardgraph.search.machine import resolve_axes
from shardgraph.search.question import Question
from shardgraph.search.source import Source


@checked(OPTIONS, optimizer=OPTIMIZER)
def lint(
    model: nn.Module | ShardedModule,
    example_inputs: tuple[Any, ...] = (),
    plan: str | Path | Plan = "fsdp",
    *,
    example_kwargs: Mapping[str, Any] | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    mesh: Mapping[str, int] | None = None,
    cluster: Cluster | str | Path | None = None,
    precision: str | None = None,
    loss_fn: Any = None,
) -> Findings:
    """Look for what trains otherwise than on one device without an error, and for what costs for nothing.

    ``print(shardgraph.lint(...))`` shows each finding with its line and a remedy; docs/lint.md has all rules. Nothing
    is run.

    Args:
        model: a model on any device, also ``meta``; or a compiled module after a call, whose latest program is looked
            at and whose plan is its own.
        example_inputs: positional inputs of one rank's call, real or on ``meta``.
        plan: as for :func:`shardgraph.compile`.
        example_kwargs: keyword inputs of the same call.
        optimizer: the optimizer that is to train the model.
        mesh: axis sizes by name, outermost first; default: as for :func:`shardgraph.analyze`.
        cluster: the devices, as for :func:`shardgraph.analyze`.
        precision: ``"bf16"`` or ``"fp16"``; default: the plan's.
        loss_fn: ``loss_fn(output, target) -> scalar``, with the target in ``example_kwargs``.

    Raises:
        CaptureError: the model cannot be traced into one graph.
        PlanError: the plan does not exist or does not fit the model or the mesh; or it is ``"auto"``.
        ShardGraphError: the compiled module has no program yet.
    """
    if isinstance(model, ShardedModule):
        found = list(of_compiled(model))
    else:
        program = _program(model, example_inputs, plan, example_kwargs, mesh, cluster, precision, loss_fn)
        found = [*of_model(model, program.plan), *of_program(program, model)]
    if optimizer is not None:
        found += of_optimizer(optimizer, model)
    return Findings.sorted(found)


def of_compiled(sharded: ShardedModule) -> list[Finding]:
    """What is found in a compiled module."""
    program = sharded.program
    return [*of_model(sharded.original, program.plan), *of_program(program, sharded)]


def of_call(call: Call, plan: Plan, cluster: Cluster) -> Findings:
    """What is found in a call under a plan that is decided."""
    source = Source(Question(call.model, plan, cluster=cluster, call=call), fold=False)
    program = source.program()
    return Findings.sorted([*of_model(call.model, program.plan), *of_program(program, call.model)])


def _program(
    model: nn.Module,
    example_inputs: tuple[Any, ...],
    plan: str | Path | Plan,
    example_kwargs: Mapping[str, Any] | None,
    mesh: Mapping[str, int] | None,
    cluster: Cluster | str | Path | None,
    precision: str | None,
    loss_fn: Any,
) -> Any:
    if plan == "auto":
        raise ShardGraphError("lint looks at one plan: let shardgraph.plan choose it, and give lint what it returns")
    for wrapped in sharded_already(model):  # a trace of it would fail for another reason
        raise ShardGraphError(str(wrapped))
    mesh_of = partial(resolve_axes, mesh=mesh, cluster=cluster)
    question = Question.of(model, plan, mesh_of, mesh is None, precision=precision, cluster=cluster)
    asked = question.about_step(example_inputs, dict(example_kwargs or {}), loss_fn)
    source = Source(asked, fold=False, captures=Captures())
    return source.program()
