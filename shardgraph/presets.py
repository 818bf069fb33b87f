"""The plans that have a name: DDP, the three ZeRO stages and hybrid sharding.

One preset is one function from a mesh to a :class:`Plan`, registered in ``PRESETS``. The stages are those
of ZeRO (Rajbhandari et al., 2020, https://arxiv.org/abs/1910.02054); the 2-D form is hybrid sharding
(Zhao et al., 2023, https://arxiv.org/abs/2304.11277).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardgraph.errors import PlanError, nearest
from shardgraph.mesh import Mesh
from shardgraph.plan import REPLICATE, SHARD, ParameterPlan, Plan


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

    Raises:
        PlanError: there is no such preset, or the mesh has not the dimensions that it needs.
    """
    axes = tuple(mesh.items()) if isinstance(mesh, Mapping) else tuple(mesh)
    if name not in PRESETS:
        raise PlanError(
            f"there is no plan called {name!r}{nearest(name, PRESETS)}; the plans are {', '.join(PRESETS)}, "
            "'auto', a Plan, or the path of a plan file (ending in .yaml or .yml)"
        )
    return PRESETS[name](axes)
