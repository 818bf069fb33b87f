"""What a compilation emits for one kind of microbatch of a pipeline: a few graphs for every stage."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.errors import PlanError
from shardgraph.ir import Buffer, Forwarded, Gradient, JointGraph, Mutation, Parameter, Returned, Role
from shardgraph.passes.base import Context, run_passes
from shardgraph.passes.lowering import HALF_PASSES, RANK_PASSES, WHOLE_PASSES, check_half, placing_passes
from shardgraph.passes.offload.kept import Kept
from shardgraph.passes.offload.mark_offloaded import MarkOffloaded
from shardgraph.passes.offload.offload_activations import check_offloaded, offload_activations
from shardgraph.passes.parameters.accumulate_gradients import KeepGradientsLocal
from shardgraph.passes.partition.split import split
from shardgraph.passes.pipeline.assign import assign_stages
from shardgraph.passes.pipeline.batch_norm import BatchNorm, batch_norms
from shardgraph.passes.pipeline.cuts import beginnings_of
from shardgraph.passes.pipeline.extract import stage_graphs
from shardgraph.passes.pipeline.once import reductions_of, take_gathers
from shardgraph.passes.pipeline.recompute_stage import RecomputeStage
from shardgraph.passes.pipeline.weight_gradients import split_backward
from shardgraph.passes.program import Emitted
from shardgraph.plans.plan import ParameterPlan, Plan


@dataclass(frozen=True, eq=False)
class Halves:
    """The graphs of one stage for one microbatch.

    ``backward`` gives whole gradients of this rank's microbatch, unreduced; None where nothing before or in the stage
    is trained. ``parts`` are its two halves, the gradients of what the stage was given and those of its weights.
    """

    forward: fx.GraphModule
    backward: fx.GraphModule | None

    def graph(self, which: str) -> fx.GraphModule:
        """``"forward"``, ``"backward"``, or one part of that: ``"inputs"`` or ``"weights"``."""
        if which == "forward":
            return self.forward
        assert self.backward is not None
        return {"backward": self.backward, "inputs": self.parts[0], "weights": self.parts[1]}[which]

    @cached_property
    def parts(self) -> tuple[fx.GraphModule, fx.GraphModule]:
        """See :func:`shardgraph.passes.pipeline.weight_gradients.split_backward`."""
        assert self.backward is not None
        return split_backward(self.backward)


@dataclass(frozen=True, eq=False)
class StageProgram:
    """One stage, the same text on all of its ranks.

    ``gather`` gathers, once a step, the parameters that are kept; ``kept`` are the graphs of microbatches whose values
    are kept for backward, ``again`` of those that compute them again; ``reduce`` reduces the gradients of all of them,
    once. ``batch_norms`` are those whose statistics a training step moves.
    """

    number: int
    gather: fx.GraphModule | None
    kept: Halves
    again: Halves
    reduce: fx.GraphModule | None
    batch_norms: tuple[BatchNorm, ...]

    @property
    def parameters(self) -> list[str]:
        """The names of the parameters that the stage uses."""
        graphs = [graph for graph in (self.gather, self.kept.forward) if graph is not None]
        return [role.fqn for graph in graphs for role in ir.placeholders(graph) if isinstance(role, Parameter)]

    @property
    def written(self) -> list[str]:
        """The names of the buffers that the stage writes."""
        roles = [role for role, _ in ir.outputs(self.kept.forward)]
        return [role.of.fqn for role in roles if isinstance(role, Mutation) and isinstance(role.of, Buffer)]

    @property
    def graphs(self) -> list[fx.GraphModule]:
        """All graphs, for checks and for the text that ranks compare."""
        halves = [self.kept] if self.again is self.kept else [self.kept, self.again]
        several = [self.gather, *[graph for each in halves for graph in (each.forward, each.backward)], self.reduce]
        return [graph for graph in several if graph is not None]


@dataclass(eq=False)
class PipelineProgram(Emitted):
    """All stages for one kind of microbatch. ``joint`` is the graph as captured; ``parameters`` their plans by name."""

    joint: JointGraph
    stages: tuple[StageProgram, ...]
    plan: Plan
    parameters: Mapping[str, ParameterPlan]
    shapes: Mapping[str, torch.Size]
    context: Context

    @property
    def graphs(self) -> list[fx.GraphModule]:
        """Those of all stages."""
        return [graph for stage in self.stages for graph in stage.graphs]

    @property
    def forwards(self) -> list[fx.GraphModule]:
        """Those of every stage for a microbatch."""
        return [stage.kept.forward for stage in self.stages]

    @cached_property
    def owners(self) -> dict[str, tuple[int, ...]]:
        """The stages that use each parameter or make a part of its gradient; one that none uses is the first's."""
        found: dict[str, tuple[int, ...]] = {}
        for stage in self.stages:
            for fqn in dict.fromkeys([*stage.parameters, *sorted(trained([stage]))]):
                found[fqn] = (*found.get(fqn, ()), stage.number)
        return {fqn: found.get(fqn, (0,)) for fqn in self.shapes}


def lower_pipeline(
    joint: JointGraph, plan: Plan, shapes: Mapping[str, torch.Size], show: Callable[[str], None] = lambda stage: None
) -> PipelineProgram:
    """The stages of a graph that was captured for one microbatch; the graph is left as it is.

    Raises:
        PlanError: the plan does not fit the model, or names stages that are none.
    """
    assert plan.pipeline is not None
    inside = plan.of_stage
    context = Context.of(inside, shapes, joint.fake_mode, joint.stored)
    show("rewrite")
    gm = ir.copy_graph(joint.module)
    run_passes(gm, (*placing_passes(inside), *WHOLE_PASSES), context)
    show("split")
    graphs = stage_graphs(gm, assign_stages(gm, beginnings_of(gm, plan.pipeline.stages)))
    show("schedule")
    kept: list[Kept] = []
    stages = tuple(_stage(number, graph, context, plan, kept) for number, graph in enumerate(graphs))
    show("check")
    check_offloaded(inside, shapes, kept if any(stage.kept.backward is not None for stage in stages) else None)
    _check_buffers(stages)
    program = PipelineProgram(joint, stages, plan, context.parameters, shapes, context)
    for graph in program.graphs:
        check_half(graph, inside)
    return program


def _check_buffers(stages: Sequence[StageProgram]) -> None:
    read: dict[str, set[int]] = {}
    for stage in stages:
        for role in ir.placeholders(stage.kept.forward):
            if isinstance(role, Buffer):
                read.setdefault(role.fqn, set()).add(stage.number)
    for stage in stages:
        for fqn in stage.written:
            if others := read.get(fqn, set()) - {stage.number}:
                raise PlanError(
                    f"the buffer {fqn!r} is written in stage {stage.number} and read in stage {min(others)}, whose "
                    "ranks would not see what is written: let stages begin so that both are in one"
                )


def _stage(number: int, gm: fx.GraphModule, context: Context, plan: Plan, saved: list[Kept]) -> StageProgram:
    """The graphs of one stage from its joint graph; ``saved`` gets what it keeps for backward and could offload."""
    assert plan.pipeline is not None
    norms = tuple(batch_norms(gm))
    run_passes(gm, RANK_PASSES, context := context.of_graph())
    forward, backward = split(ir.copy_graph(gm), context.of_graph())
    reduce = None if backward is None else reductions_of(backward)
    gather = take_gathers(forward)
    last = number == plan.pipeline.count - 1
    kept = _halves(forward, backward, context, last, saved)
    again = kept
    if plan.pipeline.checkpoint != "never" and backward is not None:
        run_passes(gm, [RecomputeStage(), MarkOffloaded()], context)
        forward, backward = split(gm, context)
        take_gathers(forward)
        again = _halves(forward, backward, context, last, saved)
    for once in (gather, reduce):
        if once is not None:
            run_passes(once, HALF_PASSES, _after_split(context))
    return StageProgram(number, gather, kept, again, reduce, norms)


def _halves(
    forward: fx.GraphModule, backward: fx.GraphModule | None, context: Context, last: bool, saved: list[Kept]
) -> Halves:
    run_passes(forward, HALF_PASSES, _after_split(context))
    if backward is not None:
        run_passes(backward, [KeepGradientsLocal(), *HALF_PASSES], _after_split(context))
        trained = any(isinstance(value, fx.Node) for _, value in ir.outputs(backward))
        backward = backward if trained else None
    if backward is not None:
        saved += offload_activations(forward, backward, context, at_once=last)
    return Halves(forward, backward)


def _after_split(context: Context) -> Context:
    return context.of_graph("split")


def crossing(program: PipelineProgram, number: int) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """What stage ``number`` takes from the one before and from the one after, as fake tensors in order."""
    stage = program.stages[number]
    forward = ir.placeholders(stage.kept.forward)
    received = sorted((role.index, node) for role, node in forward.items() if isinstance(role, Forwarded))
    backward = {} if stage.kept.backward is None else ir.placeholders(stage.kept.backward)
    returned = sorted((role.index, node) for role, node in backward.items() if isinstance(role, Returned))
    return [node.meta["val"] for _, node in received], [node.meta["val"] for _, node in returned]


def gradients_of(results: Iterable[tuple[Role | None, Any]]) -> dict[str, Any]:
    """The gradients of parameters among results by role, by the parameter's name."""
    return {
        role.of.fqn: value
        for role, value in results
        if isinstance(role, Gradient) and isinstance(role.of, Parameter) and value is not None
    }


def trained(stages: Iterable[StageProgram]) -> set[str]:
    """The parameters that get a gradient in these stages."""
    halves = [stage.kept.backward for stage in stages if stage.kept.backward is not None]
    return {fqn for backward in halves for fqn in gradients_of(ir.outputs(backward))}
