"""The cluster and the mesh of a question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shardgraph.cost_models.cluster import Cluster
from shardgraph.mesh import Mesh
from shardgraph.plans.plan import Plan


def resolve_cluster(cluster: Cluster | str | Path | None, ranks: int) -> Cluster:
    """The cluster for a caller's argument, with enough nodes for ``ranks`` if only a device is named.

    Raises:
        ClusterError: no such device or file.
    """
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is None:
        return Cluster.detect()
    if isinstance(cluster, Path) or cluster.endswith((".yaml", ".yml")):
        return Cluster.load(cluster)
    one = Cluster.of(cluster)
    return Cluster.of(cluster, nodes=-(-ranks // one.devices_per_node))


def machine_for(cluster: Cluster | str | Path | None, ranks: int) -> Cluster:
    """:func:`resolve_cluster`; without a ``cluster`` there may be more ranks than this machine has devices.

    Raises:
        ClusterError: no such device or file.
    """
    machine = resolve_cluster(cluster, ranks)
    return replace(machine, devices_per_node=max(machine.devices_per_node, ranks)) if cluster is None else machine


def resolve_axes(plan: str | Plan, mesh: Mapping[str, int] | None, cluster: Cluster | str | Path | None) -> Mesh:
    """The mesh to plan for: the given one, else the plan's own, else the whole cluster.

    Raises:
        ClusterError: no such device or file.
    """
    if mesh is not None:
        return tuple(mesh.items())
    if isinstance(plan, Plan):
        return plan.whole_mesh
    machine = resolve_cluster(cluster, 1)
    return default_mesh(plan, machine.world_size, machine.devices_per_node)


def default_mesh(plan: str, ranks: int, per_node: int) -> Mesh:
    """The mesh of a plan given by name alone, with ``per_node`` ranks on a node."""
    if plan == "hsdp":
        return (("dp_replicate", ranks // per_node), ("dp_shard", per_node))
    return (("pp" if plan == "pp" else "dp", ranks),)
