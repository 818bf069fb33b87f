"""The size of buckets in which collectives are merged on a cluster."""

from __future__ import annotations

import math

from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.cost_models.group import Group
from shardgraph.plans.plan import Plan

_LATENCY = 0.1
"""A bucket is so large that its latency is this part of its time: more bytes would save little of the rest, and hold
more memory for longer."""

_LARGE = 2**30
_SIZES = 2**16, 2**28

_REUSED = 2**24
"""The largest bucket on a CPU. A buffer of 32 MiB or more is given back to the system each time and comes as new pages
(``DEFAULT_MMAP_THRESHOLD_MAX`` in mallopt(3)): first written at 2.7 GB/s instead of 26, which no price here has."""


def bucket_bytes(plan: Plan, cluster: Cluster, total: float = math.inf) -> int:
    """The smallest power of two of bytes of which a collective over data-parallel ranks takes little latency.

    Of ``total`` bytes in buckets nothing hides the last one: where they are few, buckets are so small that what hiding
    it would save and the latency of all are least together. Where communication slows computation, hiding saves only
    the cluster's ``overlap`` of it, and the rest counts for every collective. Of all data axes it is the largest;
    without one of several ranks that of the others, over which gradients of parameters that they do not divide are
    summed. 0 on one rank.
    """
    axes = [axis for axis, size in plan.data_mesh if size > 1] or [axis for axis, size in plan.mesh if size > 1]
    groups = (cluster.group_of(plan.mesh, axis) for axis in axes)
    return max((filling(group, cluster, total) for group in groups), default=0)


def filling(group: Group, cluster: Cluster, total: float) -> int:
    """The size of buckets for collectives over one group of ranks; see :func:`bucket_bytes`."""

    def seconds(nbytes: int) -> float:
        operand = nbytes // group.ranks
        return collective_seconds("all_gather_into_tensor", operand, nbytes, group, cluster.efficiency)

    latency = seconds(0)
    sent = latency / (seconds(_LARGE) - latency) * _LARGE  # in as much time as the latency
    overlap = cluster.overlap_on(group.where)
    slowing = (1 - overlap) / overlap if overlap else math.inf
    wanted = min(sent * (1 / _LATENCY - 1), math.sqrt(total * sent * max(slowing, 1.0)))
    least, most = _SIZES
    size = least
    while size < min(wanted, most, largest_bucket(cluster)):
        size *= 2
    return size


def largest_bucket(cluster: Cluster) -> float:
    """Bytes above which no bucket is chosen on a cluster, whatever its price."""
    return _REUSED if cluster.device.is_cpu else math.inf
