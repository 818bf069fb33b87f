"""What a step costs, with or without a pipeline, in parts that add up: seconds by kind, bytes at the peak by kind."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.timeline import COPIES
from shardgraph.passes.analysis.rows import Row
from shardgraph.report.analysis import Analysis
from shardgraph.report.pipeline import PipelineAnalysis
from shardgraph.report.step import timeline_of
from shardgraph.report.transfers import transfers_of

COMPUTATION, RECOMPUTATION, IDLE, UPDATE = "computation", "recomputation", "waiting for stages", "update"
ADDITION = "gradients added up"
ONCE = "exposed, once a step"
_OVER = "exposed over "


@dataclass(frozen=True)
class Parts:
    """The predicted costs of a step, of all of a plan's calls: seconds of the busiest rank, bytes of the fullest one.

    ``seconds`` are those of the step by what it is spent on, ``memory`` the bytes at the peak by kind, ``host`` those
    in host memory.
    """

    seconds: Mapping[str, float]
    memory: Mapping[str, int]
    samples: int
    host: Mapping[str, int] = field(default_factory=dict)

    @property
    def step(self) -> float:
        """Seconds of a step."""
        return sum(self.seconds.values())

    @property
    def peak(self) -> int:
        """Bytes at the peak."""
        return sum(self.memory.values())

    @property
    def per_sample(self) -> float:
        """Seconds for each sample of the step."""
        return self.step / max(1, self.samples)


def parts_of(analysis: Analysis | PipelineAnalysis) -> Parts:
    """The parts of an analysis' costs."""
    time, again = analysis.time, recomputed(analysis)
    added = analysis.additions if isinstance(analysis, Analysis) else 0.0
    host = dict(analysis.host_peak.host) if isinstance(analysis, Analysis) else {}
    seconds = {COMPUTATION: time.compute - again - added, RECOMPUTATION: again, ADDITION: added}
    seconds |= _exposed(analysis) | {IDLE: time.bubble, UPDATE: time.optimizer}
    kept = {kind: value for kind, value in seconds.items() if value or kind == UPDATE}
    return Parts(kept, held_at_peak(analysis), analysis.samples, host)


def held_at_peak(analysis: Analysis | PipelineAnalysis) -> dict[str, int]:
    """The bytes at the peak of a step by kind."""
    if isinstance(analysis, Analysis):
        return dict(analysis.peak.memory)
    return analysis.at_peak(analysis.fullest)


def exposed_over(analysis: Analysis | PipelineAnalysis) -> dict[str, float]:
    """The exposed seconds of a step by what they are spent on: an axis and where its ranks are, or copies."""
    cluster, mesh = analysis.cluster, analysis.plan.whole_mesh

    def where(kind: str) -> str:
        axis = kind.removeprefix(_OVER)
        if axis not in dict(mesh):
            return "once a step" if kind == ONCE else kind
        return f"over {axis} {'inside a node' if cluster.group_of(mesh, axis).nodes == 1 else 'between nodes'}"

    return {where(kind): seconds for kind, seconds in _exposed(analysis).items()}


def recomputed(analysis: Analysis | PipelineAnalysis) -> float:
    """The seconds of a step in which backward computes again."""
    if isinstance(analysis, Analysis):
        rows, times = analysis.rows, analysis.plan.calls
    else:
        assert analysis.plan.pipeline is not None
        rows = tuple(row for stage in analysis.busiest for row in stage.rows)
        times = analysis.plan.pipeline.parts
    return min(times * sum(row.seconds for row in rows if row.again and not row.stream), analysis.time.compute)


def _exposed(analysis: Analysis | PipelineAnalysis) -> dict[str, float]:
    """Seconds that the computation waits for or is slowed by transfers, by the axis or direction of the transfer."""
    if not isinstance(analysis, Analysis):
        return _exposed_in_stages(analysis)
    waits: defaultdict[str, float] = defaultdict(float)
    for calls, call in ((1, analysis), (analysis.plan.calls - 1, analysis.earlier or analysis)):
        for transfer in call.transfers if calls else ():
            waits[_kind(transfer.stream)] += calls * transfer.exposed
    return _together(waits, analysis.time.exposed)


def _exposed_in_stages(analysis: PipelineAnalysis) -> dict[str, float]:
    """The same of the busiest rank of a pipeline, for all microbatches; the rest of it is done once a step."""
    assert analysis.plan.pipeline is not None
    waits: defaultdict[str, float] = defaultdict(float)
    for stage in analysis.busiest:
        for half in ("forward", "backward"):
            rows = [row for row in stage.rows if row.half == half]
            for axis, seconds in _waits(rows, analysis.cluster).items():
                waits[_kind(axis)] += analysis.plan.pipeline.parts * seconds
    waits[ONCE] += sum(stage.once for stage in analysis.busiest)
    return _together(waits, analysis.time.exposed)


def _waits(rows: Sequence[Row], cluster: Cluster) -> dict[str, float]:
    waits: defaultdict[str, float] = defaultdict(float)
    for transfer in transfers_of(rows, timeline_of(rows, cluster)):
        waits[transfer.stream] += transfer.exposed
    return waits


def _together(waits: Mapping[str, float], exposed: float) -> dict[str, float]:
    """The waits, scaled to add up to what is exposed: collectives that are slowed together are not slowed twice."""
    total = sum(waits.values())
    if not total:
        return {"exposed": exposed} if exposed else {}
    scale = exposed / total
    return {kind: scale * seconds for kind, seconds in sorted(waits.items()) if seconds}


def _kind(stream: str) -> str:
    return f"copies {stream}" if stream in COPIES else f"{_OVER}{stream}"
