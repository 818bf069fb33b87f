"""The named plans: DDP, the stages of ZeRO and hybrid sharding, each also with sharded operators or experts.

The stages are those of ZeRO
(Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054); the 2-D form is hybrid sharding (Zhao et al., 2023,
https://arxiv.org/abs/2304.11277).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from shardgraph.arguments import AXES, MESH, TEXT, checked, instance, of_plan
from shardgraph.errors import PlanError, nearest
from shardgraph.mesh import Mesh
from shardgraph.plans.parameter_plan import AUTO, REPLICATE, SHARD, ParameterPlan
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import Plan

PRESETS = {
    "single": ParameterPlan((REPLICATE,), "all_reduce", reshard_after_forward=False),
    "ddp": ParameterPlan((REPLICATE,), "all_reduce", reshard_after_forward=False),
    "zero1": ParameterPlan((SHARD,), "all_reduce", reshard_after_forward=False),
    "zero2": ParameterPlan((SHARD,), "reduce_scatter", reshard_after_forward=False),
    "fsdp": ParameterPlan((SHARD,), "reduce_scatter", reshard_after_forward=True),
    "hsdp": ParameterPlan((REPLICATE, SHARD), "reduce_scatter", reshard_after_forward=True),
}
"""The plan of every parameter, by the name of the plan; one that shards nothing is for a mesh of any number of axes."""

BUCKET = 8 * 2**20
"""Bytes of the buckets of named plans: gloo and NCCL spend little of the time of such a collective on latency. It is
the same for every cluster, so that a name means one program everywhere; ``"auto"`` chooses the size for its cluster."""


@checked(name=of_plan(TEXT), mesh=MESH | AXES, pipeline=of_plan(instance("a Pipeline", Pipeline)))
def preset(name: str, mesh: Mapping[str, int] | Mesh, pipeline: Pipeline | None = None) -> Plan:
    """The plan called ``name`` on ``mesh`` (axis names to sizes, outermost first).

    ``"tp"`` shards operators along the axis ``tp``; ``"tp+sp"`` also shards the activations between them along the
    sequence. ``"cp"`` shards sequences and nothing else along the axis ``cp``, ``"ep"`` shards experts along the axis
    ``ep``. On a mesh with a single axis, that axis may have any name. They combine with a plan for the other axes, and
    some with each other: ``"fsdp+tp"``, ``"hsdp+tp+sp"``, ``"fsdp+cp+tp+sp"``, ``"fsdp+ep+tp"``, with the axis ``ep``
    outside of that of operators; without one, the other axes use ``ddp``. All of these may follow ``"pp"``, which cuts
    the model into stages along the axis ``pp`` with the schedule of ``pipeline``: ``"pp"``, ``"pp+fsdp"``,
    ``"pp+fsdp+tp"``. After ``"local-sgd"`` they are for each of the replicas along the outermost axis, which
    :class:`shardgraph.LocalSGD` averages: ``"local-sgd"``, ``"local-sgd+fsdp"``.

    Raises:
        PlanError: there is no such preset, or the mesh does not have the axes that it needs.
    """
    axes = tuple(mesh.items()) if isinstance(mesh, Mapping) else tuple(mesh)
    if name.split("+")[0] == "pp":
        return _pipelined(name, axes, pipeline or Pipeline())
    if name.split("+")[0] == "local-sgd":
        return _replicated(name, axes, pipeline)
    if pipeline is not None:
        raise PlanError(f"plan {name!r} has no pipeline: ask for 'pp+{name}', with an axis 'pp' in the mesh")
    for dividing, styles in DIVIDING.items():
        data = name.removesuffix(dividing).removesuffix("+")
        if name == dividing or (name == f"{data}+{dividing}" and data in PRESETS):
            return _dividing(name, data, styles, axes)
    if name not in PRESETS:
        raise PlanError(
            f"there is no plan called {name!r}; the plans are "
            f"{', '.join(PRESETS)}, {', '.join(map(repr, DIVIDING))} (also after one of these, as in 'fsdp+tp'), 'pp' "
            "and 'local-sgd' (also before any of these, as in 'pp+fsdp'), "
            "'auto', a Plan, or the path of a plan file (ending in .yaml or .yml)"
            f"{nearest(name, [*PRESETS, *DIVIDING])}"
        )
    entry = PRESETS[name]
    if entry.shard_axis is None:
        entry = replace(entry, placements=(REPLICATE,) * len(axes))
    elif name == "hsdp" and len(axes) != 2:
        raise PlanError(
            f"plan 'hsdp' replicates over one mesh axis and shards over another, and the mesh is {dict(axes)}; "
            "give mesh={'dp_replicate': R, 'dp_shard': S} with R x S ranks"
        )
    elif name != "hsdp" and len(axes) != 1:
        raise PlanError(
            f"plan {name!r} shards over one mesh axis, and the mesh {dict(axes)} has {len(axes)}; "
            "give mesh={'dp': N}, or use 'hsdp' for a two-dimensional mesh"
        )
    return Plan(name, axes, (("*", entry),), bucket=BUCKET)


def _pipelined(name: str, mesh: Mesh, pipeline: Pipeline) -> Plan:
    """A pipeline, with the rest of ``name`` as the plan for the other axes."""
    inside = name.removeprefix("pp").removeprefix("+")
    if len(mesh) == 1:
        pipeline = replace(pipeline, axis=mesh[0][0])
    if mesh and pipeline.axis not in dict(mesh):
        raise PlanError(
            f"plan {name!r} puts stages along the axis {pipeline.axis!r}, and the mesh is {dict(mesh)}: call one of "
            f"its axes {pipeline.axis!r}, such as mesh={{{pipeline.axis!r}: 2, 'dp': 4}}"
        )
    rest = tuple((axis, size) for axis, size in mesh if axis != pipeline.axis)
    if mesh and mesh[0][0] != pipeline.axis:
        raise PlanError(
            f"the axis {pipeline.axis!r} of a pipeline is the outermost, since its ranks send least: give mesh="
            f"{dict(((pipeline.axis, dict(mesh)[pipeline.axis]), *rest))}"
        )
    if inside and mesh and not rest:
        raise PlanError(
            f"plan {name!r} needs an axis for {inside!r} beside {pipeline.axis!r}, and the mesh is {dict(mesh)}"
        )
    plan = preset(inside or ("ddp" if rest else "single"), rest)
    return replace(plan, name=name, pipeline=replace(pipeline, ranks=dict(mesh).get(pipeline.axis, 1)))


def _replicated(name: str, mesh: Mesh, pipeline: Pipeline | None) -> Plan:
    """Replicas along the outermost axis, with the rest of ``name`` as the plan of each."""
    inside, rest = name.removeprefix("local-sgd").removeprefix("+"), mesh[1:]
    if inside and mesh and not rest:
        raise PlanError(
            f"plan {name!r} needs an axis for {inside!r} beside that of the replicas, and the mesh is {dict(mesh)}: "
            f"give mesh={{'replicas': R, 'dp': N}} with R x N ranks, or use 'local-sgd'"
        )
    plan = preset(inside or ("ddp" if rest else "single"), rest, pipeline)
    return replace(plan, name=name, replicas=mesh[:1])


def refuse_pipeline(mesh: Mesh) -> None:
    """Check that ``mesh`` has no axis of pipeline stages, which ``"auto"`` would use as a data axis.

    Raises:
        PlanError: it has one.
    """
    if "pp" in dict(mesh):
        raise PlanError(
            f"plan 'auto' does not choose pipelines, and the mesh {dict(mesh)} has an axis 'pp': ask for 'pp', or "
            "'pp+' and a plan for the other axes, such as 'pp+fsdp'; the stages are chosen"
        )


DIVIDING = {
    "tp": {"tp": "whole"},
    "tp+sp": {"tp": "sequence"},
    "cp": {"cp": "context"},
    "cp+tp": {"cp": "context", "tp": "whole"},
    "cp+tp+sp": {"cp": "context", "tp": "sequence"},
    "ep": {"ep": "experts"},
    "ep+tp": {"ep": "experts", "tp": "whole"},
    "ep+tp+sp": {"ep": "experts", "tp": "sequence"},
    "ep+cp": {"ep": "experts", "cp": "context"},
    "ep+cp+tp": {"ep": "experts", "cp": "context", "tp": "whole"},
    "ep+cp+tp+sp": {"ep": "experts", "cp": "context", "tp": "sequence"},
}
"""The styles of the axes that shard operators or experts, by the name of the plan."""


def _dividing(name: str, data: str, styles: Mapping[str, str], mesh: Mesh) -> Plan:
    """The plan ``data`` for the other axes, with operators or experts sharded along the axes of ``styles``."""
    if not mesh:  # one process
        return replace(preset(data or "single", mesh), name=name)
    names = [axis for axis, _ in mesh]
    if len(mesh) == len(styles) == 1:
        styles = dict(zip(names, styles.values(), strict=True))
    if missing := [axis for axis in styles if axis not in names]:
        raise PlanError(
            f"plan {name!r} divides {'experts' if 'ep' in styles else 'operators'} along the axis {missing[0]!r}, and "
            f"the mesh is {dict(mesh)}: call one of its axes {missing[0]!r}, "
            f"such as mesh={{'dp': 2, {missing[0]!r}: 4}}"
        )
    rest = tuple((axis, size) for axis, size in mesh if axis not in styles)
    if data and not rest:
        raise PlanError(
            f"plan {name!r} needs an axis for {data!r} beside {', '.join(map(repr, styles))}, and the mesh is "
            f"{dict(mesh)}; give mesh={{'dp': N, {', '.join(f'{axis!r}: M' for axis in styles)}}}, or use "
            f"{name.removeprefix(data + '+')!r}"
        )
    plan = preset(data or ("ddp" if rest else "single"), rest)
    placed = {axis: REPLICATE if style == "context" else AUTO for axis, style in styles.items()}
    ((pattern, entry),) = plan.parameters
    placements = dict(zip(plan.axes, entry.placements, strict=True)) | placed
    entry = replace(entry, placements=tuple(placements[axis] for axis in names))
    experts = next((axis for axis, style in styles.items() if style == "experts"), "")
    operators = tuple((axis, styles[axis]) for axis in names if axis in styles and axis != experts)
    return replace(plan, name=name, mesh=mesh, parameters=((pattern, entry),), operators=operators, experts=experts)
