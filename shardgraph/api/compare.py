"""``shardgraph.compare``: two plans of a model, what they decide differently and what that costs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardgraph.api.analyze import analyze
from shardgraph.api.options import OPTIONS, PLAN
from shardgraph.arguments import checked, instance
from shardgraph.capture.captures import Call
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import PlanError
from shardgraph.plans.plan import Plan
from shardgraph.plans.resolve import named_or_loaded
from shardgraph.report.analysis import Analysis
from shardgraph.report.comparison import Comparison, compared
from shardgraph.report.pipeline import PipelineAnalysis

_PRICED = PLAN | instance("what shardgraph.analyze returns", Analysis, PipelineAnalysis)


@checked(OPTIONS, first=_PRICED, second=_PRICED)
def compare(
    first: Plan | str | Path | Analysis | PipelineAnalysis,
    second: Plan | str | Path | Analysis | PipelineAnalysis,
    *,
    model: nn.Module | None = None,
    example_inputs: tuple[Any, ...] = (),
    example_kwargs: Mapping[str, Any] | None = None,
    cluster: Cluster | str | Path | None = None,
    mesh: Mapping[str, int] | None = None,
    loss_fn: Callable[..., torch.Tensor] | None = None,
    optimizer: str = "adamw",
    backend: str = "eager",
) -> Comparison:
    """Compare two plans of one job, part by part: decisions, seconds of a step, bytes at the peak.

    ``print(comparison)`` shows all of it; ``comparison.table()`` the costs, ``.decisions`` what the plans decide
    differently, ``.parts`` the costs as numbers that add up, and ``.ratio`` how the seconds per sample compare.

    Args:
        first: a plan, its file or its name, which is analysed as by :func:`shardgraph.analyze`, or an analysis that
            was made.
        second: likewise, of the same job: model, length of sequences, optimizer and cluster.
        model: the model of a plan; only shapes and dtypes of its tensors matter.
        example_inputs: positional inputs of one rank's call. A plan that was chosen for a global batch is analysed for
            calls of the size that it says, whatever the number of samples here.
        example_kwargs: keyword inputs of the same call.
        cluster: as for :func:`shardgraph.analyze`; an analysis has its own.
        mesh: sizes by axis for plans that are given by name; by default the whole cluster. Other plans have their own.
        loss_fn: likewise.
        optimizer: likewise.
        backend: likewise.

    Raises:
        PlanError: a plan is given without its model, or does not fit it; or a mesh, and no plan by name.
        ShardGraphError: the two are not of one job; the message says what differs.
        CaptureError, ClusterError: as for :func:`shardgraph.analyze`.
    """

    analyses = Analysis, PipelineAnalysis
    one, other = (each if isinstance(each, analyses) else named_or_loaded(each) for each in (first, second))
    if mesh is not None and not isinstance(one, str) and not isinstance(other, str):
        raise PlanError(
            f"compare got the mesh {dict(mesh)}, and each of what it compares has a mesh of its own: leave it out, or "
            "give a plan by its name"
        )

    def priced(what: Plan | str | Analysis | PipelineAnalysis) -> Analysis | PipelineAnalysis:
        if isinstance(what, analyses):
            return what
        if model is None:
            raise PlanError(
                "a plan alone has no costs: give compare the model and example_inputs of one call too, or what "
                "shardgraph.analyze returns for either plan"
            )
        call = Call(model, example_inputs, dict(example_kwargs or {}))
        if isinstance(what, Plan) and what.samples_per_call is not None:
            call = call.resized(what.samples_per_call, call.sequence)
        options: dict[str, Any] = {"cluster": cluster, "loss_fn": loss_fn, "optimizer": optimizer, "backend": backend}
        axes = mesh if isinstance(what, str) else None
        return analyze(model, call.args, what, example_kwargs=call.kwargs, mesh=axes, **options)

    return compared(priced(one), priced(other))
