"""What two plans decide differently, part by part, as text."""

from __future__ import annotations

import fnmatch
from collections.abc import Iterator
from dataclasses import dataclass

from shardgraph.plans.activation_plan import Activations
from shardgraph.plans.annotations.match import written
from shardgraph.plans.offload_plan import NOTHING
from shardgraph.plans.parameter_plan import ParameterPlan
from shardgraph.plans.plan import Plan
from shardgraph.sizes import format_bytes


@dataclass(frozen=True)
class Difference:
    """A part of a plan, such as ``"mesh"`` or ``"parameter lm_head.weight"``, and what either plan decides for it."""

    part: str
    first: str
    second: str


def differences(first: Plan, second: Plan) -> tuple[Difference, ...]:
    """What differs between two plans of one model; empty if both decide the same."""
    return (*_parts(first, second), *_parameters(first, second), *_operations(first, second))


def _parts(first: Plan, second: Plan) -> Iterator[Difference]:
    texts, others = _texts(first), _texts(second)
    yield from (Difference(part, text, others[part]) for part, text in texts.items() if text != others[part])


def _texts(plan: Plan) -> dict[str, str]:
    """Every part of a plan but its parameters and operations."""
    pipeline = {
        "pipeline": "none",
        "schedule": "none",
        "microbatches": "1",
        "stages": "1",
        "stage recomputation": "none",
    }
    if plan.pipeline is not None:
        own = plan.pipeline
        begins = own.stages or own.balance
        pipeline["pipeline"] = f"{own.axis}={own.ranks}"
        pipeline["schedule"], pipeline["microbatches"] = own.schedule, str(own.parts)
        pipeline["stages"] = f"{own.count}" + (f": {', '.join(map(str, begins))}" if begins else "")
        pipeline["stage recomputation"] = own.checkpoint
    return {
        "mesh": " x ".join(f"{axis}={size}" for axis, size in plan.whole_mesh) or "one process",
        "replicas": _pairs(plan.replicas),
        "operators": _pairs(plan.operators),
        "experts": plan.experts or "none",
        **pipeline,
        "calls in a step": str(plan.calls) + (", reduced in the last" if plan.reduces_once else ""),
        "recomputation": plan.recomputed,
        "bucket": format_bytes(plan.bucket) if plan.bucket else "none",
        "prefetch": str(plan.prefetch),
        "loss in chunks": format_bytes(plan.loss_chunk) if plan.loss_chunk is not None else "no",
        "offload": "none" if plan.offload == NOTHING else str(plan.offload),
        "precision": str(plan.precision) or "as stored",
        "gradient statistics": "yes" if plan.gradient_statistics else "no",
        "annotations": ", ".join(map(written, plan.annotations)) or "none",
    }


def _pairs(pairs: tuple[tuple[str, object], ...]) -> str:
    return ", ".join(f"{key}: {value}" for key, value in pairs) or "none"


def _parameters(first: Plan, second: Plan) -> Iterator[Difference]:
    """The patterns of parameters for which the plans decide differently, those that differ alike together."""
    alike: dict[tuple[str, str], list[str]] = {}
    for pattern in dict.fromkeys(pattern for plan in (first, second) for pattern, _ in plan.parameters):
        texts = _entry(first, pattern), _entry(second, pattern)
        if texts[0] != texts[1]:
            alike.setdefault(texts, []).append(pattern)
    for (one, other), patterns in alike.items():
        more = f" and {len(patterns) - 1} more" if len(patterns) > 1 else ""
        yield Difference(f"parameter {patterns[0]}{more}", one, other)


def _entry(plan: Plan, pattern: str) -> str:
    """What a plan decides for the parameters of a pattern: the last rule that matches it decides."""
    entry: ParameterPlan | None = None
    for own, each in plan.parameters:
        if own == pattern or fnmatch.fnmatchcase(pattern, own):
            entry = each
    return "said by other patterns" if entry is None else entry.on(plan.axes)


def _operations(first: Plan, second: Plan) -> Iterator[Difference]:
    """How many operations have other placements, if both plans have them along the same axes."""
    placed = _placements(first.activations), _placements(second.activations)
    for axis in placed[0].keys() & placed[1].keys():
        one, other = (each[axis] for each in placed)
        changed = [name for name in one.keys() & other.keys() if one[name] != other[name]]
        if changed:
            name = min(changed)
            more = f" and {len(changed) - 1} more" if len(changed) > 1 else ""
            yield Difference(f"placements over {axis} of {name}{more}", one[name], other[name])


def _placements(activations: Activations | None) -> dict[str, dict[str, str]]:
    return {} if activations is None else {axis: dict(rules) for axis, rules in activations.along}
