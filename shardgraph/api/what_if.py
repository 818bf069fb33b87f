"""``shardgraph.what_if``: a plan, and the best plan, under conditions that are not there."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from shardgraph.api.analyze import analyze
from shardgraph.api.options import OPTIONS
from shardgraph.api.plan import plan as best_plan
from shardgraph.arguments import PATH, WHOLE, checked, instance, number, of_plan
from shardgraph.calibration import this_machine
from shardgraph.capture.captures import Call
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import PlanError
from shardgraph.plans.adapted import adapted
from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.plan import Plan
from shardgraph.report.analysis import Analysis
from shardgraph.report.comparison import Comparison, side_by_side
from shardgraph.report.parts import parts_of
from shardgraph.report.pipeline import PipelineAnalysis
from shardgraph.search.machine import machine_for, with_devices
from shardgraph.sizes import format_bytes, parse_bytes


@dataclass(frozen=True)
class WhatIf:
    """A plan as things are, the same plan under other conditions, and the best plan under them.

    ``now``, ``same`` and ``best`` are analyses of a call, each with its plan as ``.plan``; ``best.plan`` explains
    itself. ``same`` or ``best`` is None where there is no such plan, and ``why`` says why. ``conditions`` are what was
    changed, as text, and ``budget`` the bytes that a rank may use under them.
    """

    conditions: str
    now: Analysis | PipelineAnalysis
    same: Analysis | PipelineAnalysis | None
    best: Analysis | PipelineAnalysis | None
    budget: int
    why: tuple[str, ...] = ()

    @property
    def fits(self) -> bool:
        """Whether the same plan fits under the new conditions."""
        return self.same is not None and parts_of(self.same).peak <= self.budget

    @property
    def difference(self) -> Comparison | None:
        """The same plan and the best one under the new conditions, compared; None if there are not both."""
        return Comparison(self.same, self.best) if self.same and self.best else None

    def __str__(self) -> str:
        columns = {"now": self.now, "this plan": self.same, "best plan": self.best}
        present = {name: analysis for name, analysis in columns.items() if analysis is not None}
        lines = [f"if {self.conditions}:"]
        for name, analysis in present.items():
            plan, peak = analysis.plan, parts_of(analysis).peak
            mesh = " x ".join(f"{axis}={size}" for axis, size in plan.whole_mesh) or "one process"
            over = name != "now" and peak > self.budget
            excess = f": too large, by {format_bytes(peak - self.budget)}" if over else ""
            divided = f", {plan.division}" if plan.division else ""
            lines.append(f"  {name}: {plan.name} on {mesh}{divided}{excess}")
        lines += [f"  {reason}" for reason in self.why]
        if self.difference is not None and not self.difference.decisions:
            lines.append("  this plan is the best one")
        table = side_by_side(list(present), [parts_of(analysis) for analysis in present.values()])
        return "\n".join([*lines, "", *(f"  {line}" for line in table.splitlines())])


_PLAN = of_plan(instance("a Plan", Plan) | PATH)


@checked(
    OPTIONS,
    plan=_PLAN,
    sequence=of_plan(WHOLE),
    on=OPTIONS["cluster"],
    network=of_plan(number("a number above 0, such as 0.5", lambda value: 0 < value < math.inf)),
)
def what_if(
    plan: Plan | str | Path,
    model: nn.Module,
    example_inputs: tuple[Any, ...] = (),
    *,
    sequence: int | None = None,
    global_batch: int | None = None,
    devices: int | None = None,
    on: Cluster | str | Path | None = None,
    network: float | None = None,
    example_kwargs: Mapping[str, Any] | None = None,
    cluster: Cluster | str | Path | None = None,
    memory: int | str | None = None,
    optimizer: str = "adamw",
    backend: str = "eager",
    loss_fn: Callable[..., torch.Tensor] | None = None,
    recompute: str | None = None,
    loss_chunk: int | str | None = None,
    offload: str | Offload | None = None,
    seconds: float | None = None,
    progress: bool | None = None,
) -> WhatIf:
    """What a plan costs under other conditions, and which plan is best under them; nothing is run.

        print(shardgraph.what_if(plan, model, example_kwargs=batch, cluster="H100", sequence=8192))

    Of the conditions ``sequence``, ``global_batch``, ``devices``, ``on`` and ``network`` at least one is given. The
    same plan has more or fewer data ranks on other numbers of devices, and calls as large as now.

    Args:
        plan: a plan, or the path of its file.
        model: the model of the plan; only shapes and dtypes of its tensors matter.
        example_inputs: positional inputs of one rank's call. If the plan was chosen for a global batch, the number of
            samples does not matter; else a step has as many on every data rank.
        sequence: sequences of this length.
        global_batch: steps of so many samples, of all ranks.
        devices: so many ranks.
        on: another cluster, as for :func:`shardgraph.analyze`.
        network: so many times the bandwidth between nodes, such as 0.5; of a single node, between its devices.
        example_kwargs, cluster, memory, optimizer, backend, loss_fn: the job as it is, as for :func:`shardgraph.plan`.
        recompute, loss_chunk, offload: what the best plan has in any case, as for :func:`shardgraph.plan`.
        seconds: a limit on the search for the best plan.
        progress: as for :func:`shardgraph.plan`.

    Raises:
        PlanError: no condition is given, one is malformed, or the plan does not fit the model.
        CaptureError: the model cannot be traced into one graph, as it is or at that length.
        ClusterError: a cluster is unknown, malformed or has fewer devices.
    """
    plan = plan if isinstance(plan, Plan) else Plan.load(plan)
    given = {"sequence": sequence, "global_batch": global_batch, "devices": devices, "on": on, "network": network}
    if all(value is None for value in given.values()):
        raise PlanError(f"what_if needs a condition that is not there: {', '.join(given)}")

    ranks = devices or plan.world_size
    here = machine_for(cluster or this_machine(), plan.world_size)
    there = with_devices(here if on is None else machine_for(on, ranks), ranks)
    there = there if network is None else _with_network(there, network)

    call = Call(model, example_inputs, dict(example_kwargs or {}))
    if sequence is not None and not call.sequence:
        raise PlanError("sequence is for inputs of token ids or vectors: the first tensor of these has no sequences")
    per_call = plan.samples_per_call or max(1, call.batch)
    samples = global_batch or per_call * plan.data_size * plan.calls
    options: dict[str, Any] = {"optimizer": optimizer, "backend": backend, "loss_fn": loss_fn}

    def analysed(plan: Plan, cluster: Cluster, length: int) -> Analysis | PipelineAnalysis:
        rows = call.resized(plan.samples_per_call or per_call, length)
        return analyze(model, rows.args, plan, example_kwargs=rows.kwargs, cluster=cluster, **options)

    now = analysed(plan, here, call.sequence)
    length, why = sequence or call.sequence, []
    same = best = None
    try:
        same = analysed(adapted(plan, ranks, samples, per_call), there, length)
    except PlanError as error:
        why.append(f"this plan cannot be: {error}")
    example = call.resized(per_call, length)
    asked: dict[str, Any] = {"cluster": there, "devices": ranks, "memory": memory, "global_batch": samples}
    asked |= {"recompute": recompute, "loss_chunk": loss_chunk, "offload": offload}
    asked |= {"precision": plan.precision, "seconds": seconds, "progress": progress}
    try:
        chosen = best_plan(model, example.args, example_kwargs=example.kwargs, **asked, **options)
        best = analysed(chosen, there, length)
    except PlanError as error:
        why.append(f"no plan: {error}")
    return WhatIf(_conditions(given, there), now, same, best, _budget(memory, there), tuple(why))


def _budget(memory: int | str | None, cluster: Cluster) -> int:
    return cluster.device.memory if memory is None else parse_bytes(memory)


def _with_network(cluster: Cluster, factor: float) -> Cluster:
    """The cluster with links of another bandwidth: those between nodes, or of a single node those inside."""
    if cluster.nodes > 1 and cluster.inter is not None:
        return replace(cluster, inter=replace(cluster.inter, bandwidth=factor * cluster.inter.bandwidth))
    return replace(cluster, intra=replace(cluster.intra, bandwidth=factor * cluster.intra.bandwidth))


def _conditions(given: Mapping[str, Any], cluster: Cluster) -> str:
    said = {
        "sequence": "sequences had {}",
        "global_batch": "steps had {} samples",
        "devices": "there were {} devices",
        "on": f"it ran on {cluster.name}",
        "network": "the network had {:g} times the bandwidth",
    }
    return " and ".join(said[name].format(value) for name, value in given.items() if value is not None)
