"""The plans that have a name: DDP, the stages of ZeRO, hybrid sharding; with each of them operators or experts divided.

One preset is one function from a mesh to a :class:`Plan`, registered in ``PRESETS``. The stages are those
of ZeRO (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054); the 2-D form is hybrid sharding
(Zhao et al., 2023, https://arxiv.org/abs/2304.11277).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from shardgraph.errors import PlanError, nearest
from shardgraph.mesh import Mesh
from shardgraph.plan import AUTO, REPLICATE, SHARD, ParameterPlan, Plan


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


def preset(name: str, mesh: Mapping[str, int] | Mesh) -> Plan:
    """The plan called ``name`` on ``mesh`` (axis names to sizes, outermost first).

    ``"tp"`` divides operators along the axis ``tp``, or the only one; ``"tp+sp"`` also cuts what lies between them
    along the sequence. Either goes with a plan for the other axes: ``"fsdp+tp"``, ``"hsdp+tp+sp"``. Alone it is
    ``ddp`` there. ``"ep"`` divides experts along the axis ``ep``, likewise alone or after a plan: ``"fsdp+ep"``.

    Raises:
        PlanError: there is no such preset, or the mesh has not the dimensions that it needs.
    """
    axes = tuple(mesh.items()) if isinstance(mesh, Mapping) else tuple(mesh)
    data, plus, operators = name.partition("tp")
    if plus and operators in _STYLES and (not data or data.endswith("+")):
        return _with_operators(name, data.removesuffix("+"), _STYLES[operators], axes)
    if name == "ep" or name.endswith("+ep"):
        return _with_experts(name, name.removesuffix("ep").removesuffix("+"), axes)
    if name not in PRESETS:
        raise PlanError(
            f"there is no plan called {name!r}{nearest(name, [*PRESETS, *_OTHERS])}; the plans are "
            f"{', '.join(PRESETS)}, 'tp', 'tp+sp' and 'ep' (also after one of these, as in 'fsdp+tp'), "
            "'auto', a Plan, or the path of a plan file (ending in .yaml or .yml)"
        )
    return PRESETS[name](axes)


_STYLES = {"": "whole", "+sp": "sequence"}
_OTHERS = ("tp", "tp+sp", "ep")


def _with_operators(name: str, data: str, style: str, mesh: Mesh) -> Plan:
    """The plan ``data`` on the other axes, with operators divided along the axis ``tp``."""
    return _with_axis(name, data, "tp", "divides operators", mesh, lambda axis: {"operators": ((axis, style),)})


def _with_experts(name: str, data: str, mesh: Mesh) -> Plan:
    """The plan ``data`` on the other axes, with experts divided along the axis ``ep``."""
    return _with_axis(name, data, "ep", "divides experts", mesh, lambda axis: {"experts": axis})


def _with_axis(
    name: str, data: str, wanted: str, does: str, mesh: Mesh, fields: Callable[[str], dict[str, Any]]
) -> Plan:
    """The plan ``data`` on the other axes, ``auto`` along the axis called ``wanted``, or the only one.

    ``fields`` are those of the plan that say what the axis is for.
    """
    names = [axis for axis, _ in mesh]
    if not mesh:  # one process
        return replace(preset(data or "single", mesh), name=name)
    if wanted not in names and len(mesh) != 1:
        raise PlanError(
            f"plan {name!r} {does} along the axis {wanted!r}, and the mesh is {dict(mesh)}: call one of its axes "
            f"{wanted!r}, such as mesh={{'dp': 2, {wanted!r}: 4}}"
        )
    axis = wanted if wanted in names else names[0]
    rest = tuple((other, size) for other, size in mesh if other != axis)
    if data and not rest:
        raise PlanError(
            f"plan {name!r} needs an axis for {data!r} beside {axis!r}, and the mesh is {dict(mesh)}; give "
            f"mesh={{'dp': N, {wanted!r}: M}}, or use {wanted!r}"
        )
    plan = preset(data or ("ddp" if rest else "single"), rest)
    position = names.index(axis)
    entries = tuple(
        (pattern, replace(entry, placements=(*entry.placements[:position], AUTO, *entry.placements[position:])))
        for pattern, entry in plan.parameters
    )
    return replace(plan, name=name, mesh=mesh, parameters=entries, **fields(axis))
