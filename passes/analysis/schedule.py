"""A program as tasks on streams: what :func:`shardgraph.cost_models.timeline.simulate` runs."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from torch import fx

from shardgraph.cost_models import compute
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.cost_models.timeline import COMPUTE, Task
from shardgraph.ir import WAIT, group_of
from shardgraph.mesh import Mesh
from shardgraph.passes.analysis.costs import NodeCost
from shardgraph.passes.analysis.wire import operation_of


def node_seconds(node: fx.Node, cost: NodeCost, cluster: Cluster, mesh: Mesh) -> float:
    """Seconds that the node takes on its stream; a collective's are those on the wire.

    Raises:
        ClusterError: the device has no rate for the node's arithmetic in its dtype.
        ShardGraphError: a collective has no formula.
    """
    if cost.kind == "free":
        return 0.0
    if cost.kind == "collective":
        axis = group_of(node)
        given, gotten = node.args[0].meta["val"].nbytes, node.meta["val"].nbytes
        link = cluster.link_of(mesh, axis)
        return collective_seconds(operation_of(node), given, gotten, dict(mesh)[axis], link, cluster.efficiency)
    return compute.seconds(cluster.device, cost.kind, cost.dtype, cost.flops, cost.moved)


def tasks_of(
    graphs: Iterable[fx.GraphModule], costs: Mapping[fx.Node, NodeCost], seconds: Mapping[fx.Node, float]
) -> list[Task]:
    """The tasks of graphs that run one after the other.

    Computation is one stream; every mesh axis has a stream for its collectives. A collective starts when the
    computation issued before it has ended, and a wait holds the computation until its collective has.
    """
    tasks: list[Task] = []
    started: dict[fx.Node, int] = {}
    latest = -1  # the last task of the computation
    for gm in graphs:
        for node in gm.graph.nodes:
            kind = costs[node].kind
            if kind == "collective":
                label = f"{operation_of(node)} of {node.meta.get('subject', node.name)}"
                after = (latest,) if latest >= 0 else ()
                started[node] = len(tasks)
                tasks.append(Task(label, group_of(node), seconds[node], after, node.name))
            elif node.target is WAIT:
                latest = len(tasks)
                tasks.append(Task("wait", COMPUTE, 0.0, (started[node.args[0]],), node.name))
            elif kind != "free":
                latest = len(tasks)
                tasks.append(Task(node.name, COMPUTE, seconds[node], (), node.name))
    return tasks
