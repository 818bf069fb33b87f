"""The content of a report: what a page shows of an analysis, its plan and what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from shardgraph.findings.finding import Findings
from shardgraph.pictures.page.modules import module_tree
from shardgraph.pictures.page.page import Figure, Page
from shardgraph.pictures.page.timeline import timeline_data
from shardgraph.pictures.svg import Drawing
from shardgraph.pictures.tree import Tree
from shardgraph.plans.explanation import comparison_table
from shardgraph.report.analysis import Analysis
from shardgraph.report.pipeline import PipelineAnalysis
from shardgraph.sizes import format_bytes, format_seconds
from shardgraph.tracking.trace import MemoryTrace


def report_page(
    analysis: Analysis | PipelineAnalysis,
    drawings: Mapping[str, Drawing],
    modules: Tree,
    findings: tuple[Findings, str],
    measured: MemoryTrace | None,
) -> Page:
    """The report of ``analysis``; ``modules`` are those of its plan, ``findings`` what lint finds in it, with how much
    of the model was looked at, which is all if that is empty."""
    plan = analysis.plan
    mesh = " x ".join(f"{axis}={size}" for axis, size in plan.whole_mesh) or "one process"
    texts = {"Summary": str(analysis)}
    if measured is not None and isinstance(analysis, Analysis):
        texts["Predicted beside measured"] = MemoryTrace.predicted(analysis).compare(measured)
    if plan.considered:
        texts["Why this plan"] = plan.explain()
    if isinstance(analysis, Analysis):
        texts["The slowest operations"] = analysis.table(40)
    texts |= {"The plan": str(plan), "The plan as YAML": plan.to_yaml()}
    return Page(
        title=f"Plan {plan.name} on {mesh}",
        subtitle=f"One rank of {plan.world_size} on {analysis.cluster.name}, {analysis.optimizer}. {plan.note}",
        figures=list(_figures(analysis)),
        warnings=list(_warnings(analysis)),
        findings=findings[0],
        looked_at=findings[1],
        modules=module_tree(analysis.rows, modules),
        drawings=drawings,
        timeline=timeline_data(analysis) if isinstance(analysis, Analysis) else None,
        alternatives=comparison_table(plan.considered) if plan.considered else (),
        texts=texts,
    )


def _figures(analysis: Analysis | PipelineAnalysis) -> Iterator[Figure]:
    time, device = analysis.time, analysis.cluster.device
    at = f"of {format_bytes(device.memory)}"
    at += f", at {analysis.peak.label}" if isinstance(analysis, Analysis) else ", the fullest rank"
    yield Figure("peak memory of a rank", format_bytes(analysis.peak_memory), at, bad=not analysis.fits)
    low, high = (format_seconds(end) for end in analysis.interval)
    yield Figure("a step", format_seconds(time.total), f"{low} to {high}" if low != high else "")
    yield Figure("computation", _share(time.compute + time.optimizer, time.total), format_seconds(time.compute))
    exposed = f"{format_seconds(time.exposed)} of {format_seconds(time.communication)}"
    yield Figure("exposed communication", _share(time.exposed, time.total), exposed)
    if isinstance(analysis, PipelineAnalysis):
        yield Figure("waiting for stages", _share(time.bubble, time.total), format_seconds(time.bubble))
    if analysis.mfu is not None:
        yield Figure("model FLOPs utilisation", f"{analysis.mfu:.1%}", f"of {device.name}'s peak")
    if analysis.tokens:
        yield Figure("tokens a second", f"{analysis.tokens_per_second:,.0f}", "over all ranks")


def _share(part: float, whole: float) -> str:
    return f"{part / whole:.0%}" if whole else "none"


def _warnings(analysis: Analysis | PipelineAnalysis) -> Iterator[str]:
    if not analysis.fits:
        over = analysis.peak_memory - analysis.cluster.device.memory
        yield (
            f"The peak is {format_bytes(over)} more than a device has. shardgraph.plan looks for plans that fit; "
            "recompute='full', offload='activations' and a smaller batch take less."
        )
    if isinstance(analysis, Analysis) and analysis.unpriced:
        named = ", ".join(f"{name} ({count} times)" for name, count in analysis.unpriced.items())
        yield f"Priced by the bytes that they move, for want of a formula: {named}."
    yield from (remark.strip() for remark in analysis.plan.remarks)
