"""``shardgraph.visualize``: pictures of a partition plan and of its memory over a step."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import graphviz
import torch
from torch import nn

from shardgraph.api.analyze import analyze
from shardgraph.api.report_page import report_page
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import CaptureError, PlanError, ShardGraphError
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
from shardgraph.report.folding import SHALLOW, find_stack, shortened, treats_alike
from shardgraph.report.pipeline import PipelineAnalysis, analyze_pipeline
from shardgraph.search.front import Front
from shardgraph.search.machine import machine_for
from shardgraph.tracking.trace import MemoryTrace

_INSTALL = "apt-get install graphviz, or brew install graphviz"
_Drawn = Plan | ShardedModule | Analysis | PipelineAnalysis
_Call = tuple[tuple[Any, ...], dict[str, Any]]
_Outline = tuple[tree.Tree, flow.Edges]  # modules, and the data flow between them


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
        what: a compiled module, whose latest program is drawn; a plan, with its ``model`` and inputs; or an analysis,
            whose memory is drawn, and with its ``model`` and inputs its plan too; or the front of
            :func:`shardgraph.front`: memory and time of its plans, by their number of devices.
        path: the file to write. ``.svg`` has both pictures. ``.html`` is a report, one page that needs no network: key
            figures, what is worth knowing, the modules with their costs, both pictures, the streams over the step, the
            plans that were compared, and the plan as text. ``.png``, ``.pdf``, and ``.dot`` or ``.gv`` (Graphviz's
            language) have only the plan.
        model: the model of a plan or an analysis, not compiled; only shapes and dtypes of its tensors matter.
        example_inputs: positional inputs of one rank's call, real or on ``meta``.
        example_kwargs: keyword inputs of the same call.
        cluster: the cluster for the prediction, as for :func:`shardgraph.analyze`; an analysis has its own.
        measured: what a :class:`shardgraph.MemoryTracker` measured, which a report compares with the prediction.

    Without Graphviz's program ``dot``, ``.svg`` and ``.html`` show the plan as nested boxes, with a warning, and
    ``.png`` and ``.pdf`` cannot be written.

    Raises:
        PlanError: a plan is given without its model, or does not fit it.
        ShardGraphError: nothing has been compiled yet; the suffix of ``path`` is none of these; or the format needs the
            plan of an analysis given without its model, or a program that is not installed.
        CaptureError: the model cannot be traced into one graph.
        ClusterError: the cluster is unknown, malformed or smaller than the mesh.
    """
    path = Picture(path)
    ending = path.suffix.lower()
    if ending not in (".svg", ".html", ".png", ".pdf", ".dot", ".gv"):
        raise ShardGraphError(
            f"cannot draw {path.name!r}: its suffix selects the format, and is .svg, .html, .png, .pdf, .dot or .gv"
        )
    if measured is not None and (ending != ".html" or isinstance(what, Front)):
        raise ShardGraphError(f"{path.name!r} has no room for what was measured: a plan's .html has")
    if isinstance(what, Front):
        return _draw_front(what, path, ending)
    call = example_inputs, dict(example_kwargs or {})
    plan = _plan_of(what, model, call)
    if ending in (".svg", ".html"):
        analysis = _analysis_of(what, model, call, cluster)
        if isinstance(analysis, Analysis):  # of this machine's memory there is now this much, and then that much
            over_time = memory.draw_memory(analysis, limited=cluster is not None or analysis is what)
        else:
            over_time = _draw_schedule(analysis)
        drawings = {"Memory" if isinstance(analysis, Analysis) else "Schedule": over_time}
        drawings |= {"Plan": _draw_plan(*plan)} if plan else {}
        if ending == ".svg":
            picture = svg.document(f"Plan {analysis.plan.name}", list(reversed(drawings.values())))
        else:
            picture = report_page(analysis, drawings, plan[0] if plan else None, measured).html()
        path.write_text(picture, encoding="utf-8")
    elif plan is None:
        raise ShardGraphError(
            f"{path.name!r} would show the plan, and an Analysis has only its memory: give visualize the model and "
            "example_inputs too, or a path that ends in .svg or .html"
        )
    elif ending in (".dot", ".gv"):
        path.write_text(graph.plan_graph(*plan).source, encoding="utf-8")
    else:
        path.write_bytes(_render(*plan, ending.removeprefix(".")))
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


def _plan_of(what: _Drawn, model: nn.Module | None, call: _Call) -> _Outline | None:
    """The plan's modules and their data flow; None for an analysis without a model."""
    if isinstance(what, ShardedModule):
        program = what.program
        if program.plan.pipeline is not None:
            program = lower(program.joint, program.plan.of_stage, program.shapes)
        return _outline(program)
    if isinstance(what, (Analysis, PipelineAnalysis)):
        return None if model is None else _lowered(what.plan, model, call)
    if not isinstance(what, Plan):
        raise ShardGraphError(
            f"visualize draws a Plan, a compiled module or an Analysis, and this is a {type(what).__name__}: a plan is "
            "made by shardgraph.preset('fsdp', {'dp': 8}) or Plan.load"
        )
    if model is None:
        raise PlanError(
            f"plan {what.name!r} says what happens to parameters, not which there are: give visualize the model and "
            "example_inputs of one call too, or a compiled module instead of the plan"
        )
    return _lowered(annotated(what, model), model, call)


def _lowered(plan: Plan, model: nn.Module, call: _Call) -> _Outline:
    """The modules and data flow of ``model`` under ``plan``; only a few layers of a stack of equal ones are captured.

    All stages of a pipeline are drawn together.
    """
    plan = replace(plan.of_stage, bucket=0)  # buckets change no module's bytes, and cross layers
    plan.resolve(named_shapes(model))  # reject a plan that does not fit before the long work
    stack = find_stack(model)
    with torch.enable_grad():
        if stack is not None and treats_alike(plan, model, stack):
            try:
                modules, edges = _outline(build_program(shortened(model, stack, SHALLOW[0][-1]), plan, *call))
                modules.lengthen(stack.path, SHALLOW[0][-1], stack.layers)
                return modules, edges
            except (CaptureError, tree.UnknownTrafficError):
                pass  # layers that are counted, or indexed by number, cannot be left out
        return _outline(build_program(model, plan, *call))


def _outline(program: Program) -> _Outline:
    modules = tree.build_tree(program)
    return modules, flow.trace_flow(program.forward, modules.root)


def _analysis_of(
    what: _Drawn, model: nn.Module | None, call: _Call, cluster: Cluster | str | Path | None
) -> Analysis | PipelineAnalysis:
    if isinstance(what, (Analysis, PipelineAnalysis)):
        return what
    plan = what if isinstance(what, Plan) else what.plan
    machine = machine_for(cluster, plan.world_size)
    if isinstance(what, ShardedModule):
        program = what.program
        return analyze_program(program, machine) if plan.pipeline is None else analyze_pipeline(program, machine)
    assert model is not None
    return analyze(model, call[0], what, example_kwargs=call[1], cluster=machine)


def _draw_schedule(analysis: PipelineAnalysis) -> svg.Drawing:
    pipeline, cluster = analysis.plan.pipeline, analysis.cluster.name
    assert pipeline is not None
    title = f"Schedule {pipeline.schedule} of {pipeline.parts} microbatches, predicted on {cluster}"
    return gantt.draw_gantt(analysis.schedule, title)


def _draw_plan(modules: tree.Tree, edges: flow.Edges) -> svg.Drawing:
    try:
        return graph.render_svg(graph.plan_graph(modules, edges))
    except graphviz.ExecutableNotFound:
        warnings.warn(
            f"the plan is drawn as boxes, without the flow of data: Graphviz would lay it out ({_INSTALL})",
            stacklevel=3,
        )
        return boxes.draw_boxes(modules)


def _render(modules: tree.Tree, edges: flow.Edges, form: str) -> bytes:
    dot = graph.plan_graph(modules, edges)
    dot.attr("graph", dpi="144")
    try:
        return dot.pipe(format=form)
    except graphviz.ExecutableNotFound as error:
        raise ShardGraphError(
            f"a .{form} file is written by Graphviz's program 'dot', which is not on the PATH ({_INSTALL}); "
            ".svg, .html, .dot and .gv need no program"
        ) from error
