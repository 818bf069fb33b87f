"""``shardgraph.visualize``: pictures of a partition plan and of its memory over a step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import graphviz
import torch
from torch import nn

from shardgraph.api.analyze import analyze
from shardgraph.api.lint import of_call, of_compiled
from shardgraph.api.options import OPTIONS
from shardgraph.api.report_page import report_page
from shardgraph.arguments import PATH, checked, instance
from shardgraph.capture.captures import Call
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import CaptureError, PlanError, ShardGraphError, shown
from shardgraph.findings.finding import Findings
from shardgraph.findings.model_rules import of_model
from shardgraph.findings.program_rules import of_program
from shardgraph.module.sharded import ShardedModule
from shardgraph.passes.lowering import build_program, lower
from shardgraph.passes.program import Program
from shardgraph.pictures import boxes, flow, front, gantt, graph, memory, svg, tree
from shardgraph.pictures.page.page import Page
from shardgraph.pictures.picture import Picture
from shardgraph.plans.plan import Plan
from shardgraph.plans.remembered import annotated
from shardgraph.plans.shards import named_shapes
from shardgraph.report.analysis import Analysis, analyze_program
from shardgraph.report.folding import SHALLOW, shortened, stack_of_forms
from shardgraph.report.pipeline import PipelineAnalysis, analyze_pipeline
from shardgraph.report.treatments import treats_alike
from shardgraph.search.front import Front
from shardgraph.search.machine import machine_for
from shardgraph.tracking.trace import MemoryTrace

_INSTALL = "apt-get install graphviz, or brew install graphviz"
_Drawn = Plan | ShardedModule | Analysis | PipelineAnalysis


@checked(OPTIONS, path=PATH, measured=instance("a MemoryTrace", MemoryTrace))
def visualize(
    what: Plan | ShardedModule | Analysis | PipelineAnalysis | Front,
    path: str | Path,
    *,
    model: nn.Module | None = None,
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    cluster: Cluster | str | Path | None = None,
    measured: MemoryTrace | None = None,
) -> Path:
    """Write a picture of a partition plan and of one rank's memory over a step; returns its path, which a notebook
    shows as the picture.

    The plan shows modules as nested clusters with their collectives and the bytes that a rank sends in one step;
    parameters, coloured by placement, with their global and local shape (rank 0's, the largest) and bytes per rank; and
    the data flow between modules. Consecutive layers that are equal in every respect are drawn once. The memory picture
    shows the live bytes at each operation by kind, with the peak and, if it is near, the device's memory; for a
    pipeline, instead, the schedule: the actions, idle time and memory of each rank.

    Nothing is run, and no process group or weights are needed.

    Args:
        what: a compiled module, whose latest program is drawn; a plan, with its ``model`` and inputs; an analysis, of
            the model and inputs that it was made of; or the front of :func:`shardgraph.front`: memory and time of its
            plans, by their number of devices.
        path: the file to write. ``.svg`` has both pictures. ``.html`` is a report, one page that needs no network: key
            figures, what is worth knowing, what :func:`shardgraph.lint` finds, the modules with their costs, both
            pictures, the streams over the step, the plans that were compared, and the plan as text. ``.png``,
            ``.pdf``, and ``.dot`` or ``.gv`` (Graphviz's language) have only the plan.
        model: the model of a plan, not compiled; only shapes and dtypes of its tensors matter.
        example_inputs: positional inputs of one rank's call, real or on ``meta``.
        example_kwargs: keyword inputs of the same call.
        cluster: the cluster for the prediction, as for :func:`shardgraph.analyze`; an analysis has its own.
        measured: what a :class:`shardgraph.MemoryTracker` measured, which a report compares with the prediction.

    Without Graphviz's program ``dot``, ``.svg`` and ``.html`` show the plan as nested boxes, with a warning, and
    ``.png`` and ``.pdf`` cannot be written.

    Raises:
        PlanError: a plan is given without its model, or does not fit it.
        ShardGraphError: nothing has been compiled yet; the suffix of ``path`` is none of these; or the format needs a
            program that is not installed.
        CaptureError: the model cannot be traced into one graph.
        ClusterError: the cluster is unknown, malformed or smaller than the mesh.
    """
    path = Picture(path)
    ending = path.format()
    if measured is not None and (ending != ".html" or isinstance(what, Front)):
        raise ShardGraphError(f"{path.name!r} has no room for what was measured: a plan's .html has")
    if isinstance(what, Front):
        return _draw_front(what, path, ending)
    call = _call_of(what, model, example_inputs, dict(example_kwargs or {}))
    outline = _outline_of(what, call)
    if ending in (".svg", ".html"):
        analysis = _analysis_of(what, call, cluster)
        if isinstance(analysis, Analysis):  # of this machine's memory there is now this much, and then that much
            over_time = memory.draw_memory(analysis, limited=cluster is not None or analysis is what)
        else:
            over_time = _draw_schedule(analysis)
        drawings = {"Memory" if isinstance(analysis, Analysis) else "Schedule": over_time, "Plan": _draw_plan(outline)}
        if ending == ".svg":
            picture = svg.document(f"Plan {analysis.plan.name}", list(reversed(drawings.values())))
        else:
            findings = _findings_of(what, call, analysis, outline)
            picture = report_page(analysis, drawings, outline.modules, findings, measured).html()
        path.write_text(picture, encoding="utf-8")
    elif ending in (".dot", ".gv"):
        path.write_text(outline.dot().source, encoding="utf-8")
    else:
        path.write_bytes(_render(outline, ending.removeprefix(".")))
    return path


def _draw_front(what: Front, path: Path, ending: str) -> Path:
    if ending not in (".svg", ".html"):
        raise ShardGraphError(f"cannot draw {path.name!r}: a front is drawn as .svg or .html, which browsers show")
    title, drawings = f"Plans on {what.cluster}", [front.draw_front(what)]
    if ending == ".svg":
        picture = svg.document(title, drawings)
    else:
        picture = Page(title, drawings={"Memory and time": drawings[0]}, texts={"As text": str(what)}).html()
    path.write_text(picture, encoding="utf-8")
    return path


@dataclass(frozen=True)
class _Outline:
    """The modules of a program and the data flow between them. ``program`` is one of ``model`` with fewer of its equal
    layers, which are all in ``modules``; ``looked_at`` says so, or is empty."""

    modules: tree.Tree
    edges: flow.Edges
    program: Program
    model: nn.Module
    looked_at: str = ""

    @classmethod
    def of(cls, program: Program, model: nn.Module, looked_at: str = "") -> _Outline:
        modules = tree.build_tree(program)
        return cls(modules, flow.trace_flow(program.forward, modules.root), program, model, looked_at)

    def dot(self) -> graphviz.Digraph:
        return graph.plan_graph(self.modules, self.edges)


def _call_of(what: _Drawn, model: nn.Module | None, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    """The call that is drawn; None for a compiled module, which has its program."""
    if isinstance(what, ShardedModule):
        return None
    if isinstance(what, (Analysis, PipelineAnalysis)):
        if what.call is None:
            raise ShardGraphError("this is the analysis of a compiled program: give visualize the compiled module")
        return what.call if model is None else Call(model, args, kwargs, training=what.call.training)
    if not isinstance(what, Plan):
        raise ShardGraphError(
            f"visualize(): what is {shown(what)}; it may be a Plan, a compiled module, an Analysis or a Front: a plan "
            "is made by shardgraph.preset('fsdp', {'dp': 8}) or Plan.load"
        )
    if model is None:
        raise PlanError(
            f"plan {what.name!r} says what happens to parameters, not which there are: give visualize the model and "
            "example_inputs of one call too, or a compiled module instead of the plan"
        )
    return Call(model, args, kwargs)


def _outline_of(what: _Drawn, call: Call | None) -> _Outline:
    """The plan's modules and their data flow; all stages of a pipeline are drawn together."""
    if isinstance(what, ShardedModule):
        program, plan = what.program, what.program.plan
        if plan.pipeline is not None:
            program = lower(program.joint, plan.of_stage, program.shapes)
        outline = _Outline.of(program, what.original)
    else:
        assert call is not None
        plan = annotated(what, call.model) if isinstance(what, Plan) else what.plan
        outline = _lowered(plan.of_stage, call)
    sent_in = "step" if plan.calls == 1 else "call" if plan.reduces(0) else "last call"
    told: Any = {"stages": str(plan.pipeline or ""), "division": plan.division, "sent_in": sent_in}
    return replace(outline, modules=replace(outline.modules, mesh=plan.whole_mesh, **told))


def _lowered(plan: Plan, call: Call) -> _Outline:
    """The modules and data flow of a call under ``plan``; only a few layers of a stack of equal ones are captured."""
    plan = replace(plan, bucket=0)  # buckets change no module's bytes, and cross layers
    plan.resolve(named_shapes(call.model))  # reject a plan that does not fit before the long work
    stack, equal = stack_of_forms(call.model), SHALLOW[0][-1]
    if stack is not None and stack.period == 1 and treats_alike(plan, call.model, stack):
        try:
            short, few = shortened(call.model, (stack, equal)), f"{stack.up_to(equal)} of {stack.layers} layers"
            outline = _Outline.of(_program(plan, replace(call, model=short)), short, few)
            outline.modules.lengthen(stack, equal)
            return outline
        except (CaptureError, tree.UnknownTrafficError):
            pass  # layers that are counted, or indexed by number, cannot be left out
    return _Outline.of(_program(plan, call), call.model)


def _program(plan: Plan, call: Call) -> Program:
    with torch.set_grad_enabled(call.training):
        return build_program(call.model, plan, call.args, call.kwargs, loss_fn=call.loss_fn)


def _analysis_of(what: _Drawn, call: Call | None, cluster: Cluster | str | Path | None) -> Analysis | PipelineAnalysis:
    if isinstance(what, (Analysis, PipelineAnalysis)):
        return what
    plan = what if isinstance(what, Plan) else what.plan
    machine = machine_for(cluster, plan.world_size)
    if isinstance(what, ShardedModule):
        program = what.program
        return analyze_program(program, machine) if plan.pipeline is None else analyze_pipeline(program, machine)
    assert call is not None
    return analyze(call.model, call.args, what, example_kwargs=call.kwargs, cluster=machine)


def _findings_of(
    what: _Drawn, call: Call | None, analysis: Analysis | PipelineAnalysis, outline: _Outline
) -> tuple[Findings, str]:
    """What lint finds in what is drawn, and how much of it was looked at."""
    if isinstance(what, ShardedModule):
        return Findings.sorted(of_compiled(what)), ""
    assert call is not None
    if analysis.plan.pipeline is not None:  # whose outline has no stages
        return of_call(analysis.call or call, analysis.plan, analysis.cluster), ""
    found = [*of_model(call.model, analysis.plan), *of_program(outline.program, outline.model)]
    return Findings.sorted(found), outline.looked_at


def _draw_schedule(analysis: PipelineAnalysis) -> svg.Drawing:
    pipeline, cluster = analysis.plan.pipeline, analysis.cluster.name
    assert pipeline is not None
    title = f"Schedule {pipeline.schedule} of {pipeline.parts} microbatches, predicted on {cluster}, without the update"
    return gantt.draw_gantt(analysis.schedule, title)


def _draw_plan(outline: _Outline) -> svg.Drawing:
    try:
        return graph.render_svg(outline.dot())
    except graphviz.ExecutableNotFound:
        warnings.warn(
            f"the plan is drawn as boxes, without the flow of data: Graphviz would lay it out ({_INSTALL})",
            stacklevel=3,
        )
        return boxes.draw_boxes(outline.modules)


def _render(outline: _Outline, form: str) -> bytes:
    dot = outline.dot()
    dot.attr("graph", dpi="144")
    try:
        return dot.pipe(format=form)
    except graphviz.ExecutableNotFound as error:
        raise ShardGraphError(
            f"a .{form} file is written by Graphviz's program 'dot', which is not on the PATH ({_INSTALL}); "
            ".svg, .html, .dot and .gv need no program"
        ) from error
