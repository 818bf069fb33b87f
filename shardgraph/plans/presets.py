"""The named plans: DDP, the stages of ZeRO and hybrid sharding, each also with sharded operators or experts.

A preset is a function from a mesh to a :class:`Plan`, registered in ``PRESETS``. The stages are those of ZeRO
(Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054); the 2-D form is hybrid sharding (Zhao et al., 2023,
https://arxiv.org/abs/2304.11277).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from shardgraph.errors import PlanError, nearest
from shardgraph.mesh import Mesh
from shardgraph.plans.parameter_plan import AUTO, REPLICATE, SHARD, ParameterPlan
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import Plan


def _single(mesh: Mesh) -> Plan:
    whole = ParameterPlan((REPLICATE,) * len(mesh), "all_reduce", reshard_after_forward=False)
    return Plan("single", mesh, (("*", whole),))


def _ddp(mesh: Mesh) -> Plan:
    replicated = ParameterPlan((REPLICATE,) * len(mesh), "all_reduce", reshard_after_forward=False)
    return Plan("ddp", mesh, (("*", replicated),))


def _sharded(name: str, gradient: str, reshard: bool) -> Callable[[Mesh], Plan]:
    def preset(mesh: Mesh) -> Plan:
        if len(mesh) != 1:
            raise PlanError(
                f"plan {name!r} shards over one mesh axis, and the mesh {dict(mesh)} has {len(mesh)}; "
                f"give mesh={{'dp': N}}, or use 'hsdp' for a two-dimensional mesh"
            )
        return Plan(name, mesh, (("*", ParameterPlan((SHARD,), gradient, reshard)),))

    return preset


def _hsdp(mesh: Mesh) -> Plan:
    if len(mesh) != 2:
        raise PlanError(
            f"plan 'hsdp' replicates over one mesh axis and shards over another, and the mesh is {dict(mesh)}; "
            "give mesh={'dp_replicate': R, 'dp_shard': S} with R x S ranks"
        )
    return Plan("hsdp", mesh, (("*", ParameterPlan((REPLICATE, SHARD), "reduce_scatter", True)),))


PRESETS: dict[str, Callable[[Mesh], Plan]] = {
    "single": _single,
    "ddp": _ddp,
    "zero1": _sharded("zero1", "all_reduce", reshard=False),
    "zero2": _sharded("zero2", "reduce_scatter", reshard=False),
    "fsdp": _sharded("fsdp", "reduce_scatter", reshard=True),
    "hsdp": _hsdp,
}


def preset(name: str, mesh: Mapping[str, int] | Mesh, pipeline: Pipeline | None = None) -> Plan:
    """The plan called ``name`` on ``mesh`` (axis names to sizes, outermost first).

    ``"tp"`` shards operators along the axis ``tp``; ``"tp+sp"`` also shards the activations between them along the
    sequence. ``"cp"`` shards sequences and nothing else along the axis ``cp``, ``"ep"`` shards experts along the axis
    ``ep``. On a mesh with a single axis, that axis may have any name. They combine with a plan for the other axes, and
    some with each other: ``"fsdp+tp"``, ``"hsdp+tp+sp"``, ``"fsdp+cp+tp"``, ``"fsdp+ep"``; without one, the other axes
    use ``ddp``. All of these may follow ``"pp"``, which cuts the model into stages along the axis ``pp`` with the
    schedule of ``pipeline``: ``"pp"``, ``"pp+fsdp"``, ``"pp+fsdp+tp"``.

    Raises:
        PlanError: there is no such preset, or the mesh does not have the axes that it needs.
    """
    axes = tuple(mesh.items()) if isinstance(mesh, Mapping) else tuple(mesh)
    if name.split("+")[0] == "pp":
        return _pipelined(name, axes, pipeline or Pipeline())
    if pipeline is not None:
        raise PlanError(f"plan {name!r} has no pipeline: ask for 'pp+{name}', with an axis 'pp' in the mesh")
    for dividing, styles in DIVIDING.items():
        data = name.removesuffix(dividing).removesuffix("+")
        if name == dividing or (name == f"{data}+{dividing}" and data in PRESETS):
            return _dividing(name, data, styles, axes)
    if name not in PRESETS:
        raise PlanError(
            f"there is no plan called {name!r}{nearest(name, [*PRESETS, *DIVIDING])}; the plans are "
            f"{', '.join(PRESETS)}, {', '.join(map(repr, DIVIDING))} (also after one of these, as in 'fsdp+tp'), 'pp' "
            "(also before any of these, as in 'pp+fsdp'), "
            "'auto', a Plan, or the path of a plan file (ending in .yaml or .yml)"
        )
    return PRESETS[name](axes)


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
    "ep": {"ep": "experts"},
}
"""The styles of the axes that shard operators or experts, by the name of the plan."""


def _dividing(name: str, data: str, styles: Mapping[str, str], mesh: Mesh) -> Plan:
    """The plan ``data`` for the other axes, with operators or experts sharded along the axes of ``styles``."""
    names = [axis for axis, _ in mesh]
    if not mesh:  # one process
        return replace(preset(data or "single", mesh), name=name)
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

    def along_all(entry: ParameterPlan) -> ParameterPlan:
        of_data = iter(entry.placements)
        placed = {axis: REPLICATE if style == "context" else AUTO for axis, style in styles.items()}
        return replace(entry, placements=tuple(placed[axis] if axis in placed else next(of_data) for axis in names))

    entries = tuple((pattern, along_all(entry)) for pattern, entry in plan.parameters)
    experts = next((axis for axis, style in styles.items() if style == "experts"), "")
    operators = tuple((axis, styles[axis]) for axis in names if axis in styles and axis != experts)
    return replace(plan, name=name, mesh=mesh, parameters=entries, operators=operators, experts=experts)
