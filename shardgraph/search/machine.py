"""The cluster and the mesh of a question."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

from shardgraph.calibration import this_machine
from shardgraph.calibration.correction import shared_by
from shardgraph.cost_models.cluster import Cluster
from shardgraph.mesh import Mesh
from shardgraph.plans.plan import Plan


def machine_for(cluster: Cluster | str | Path | None, ranks: int) -> Cluster:
    """The cluster for a caller's argument.

    If only a device is named, it has enough nodes for ``ranks``; without an argument it is this machine, as if it had
    at least as many devices, or in a run over several nodes these.

    Raises:
        ClusterError: no such device or file.
    """
    if isinstance(cluster, Cluster):
        return cluster
    if cluster is None:
        machine = this_machine()
        return with_devices(machine, ranks) if machine.nodes > 1 else shared_by(ranks, machine)
    if isinstance(cluster, Path) or cluster.endswith((".yaml", ".yml")):
        return Cluster.load(cluster)
    one = Cluster.of(cluster)
    return Cluster.of(cluster, nodes=-(-ranks // one.devices_per_node))


def with_devices(cluster: Cluster, ranks: int) -> Cluster:
    """The cluster with as many nodes as ``ranks`` fill, if it has a network between nodes."""
    if cluster.inter is None:
        return cluster
    return replace(cluster, nodes=-(-ranks // cluster.devices_per_node))


def resolve_axes(plan: str | Plan, mesh: Mapping[str, int] | None, cluster: Cluster | str | Path | None) -> Mesh:
    """The mesh to plan for: the given one, else the plan's own, else the whole cluster of :func:`machine_for`;
    ``"single"`` has none."""
    if mesh is not None:
        return tuple(mesh.items())
    if isinstance(plan, Plan):
        return plan.whole_mesh
    if plan == "single":
        return ()
    machine = Cluster.detect() if cluster is None else machine_for(cluster, 1)  # only its size matters
    return default_mesh(plan, machine.world_size, machine.devices_per_node)


def default_mesh(plan: str, ranks: int, per_node: int) -> Mesh:
    """The mesh of a plan given by name alone, with ``per_node`` ranks on a node."""
    if plan == "hsdp":
        return (("dp_replicate", ranks // per_node), ("dp_shard", per_node))
    return (("pp" if plan == "pp" else "dp", ranks),)
