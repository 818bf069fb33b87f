"""Whether small collectives go in buckets, and of which size."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.ir import JointGraph
from shardgraph.passes.lowering import lower
from shardgraph.plans.plan import Plan
from shardgraph.report.analysis import analyze_program
from shardgraph.sizes import format_bytes, format_seconds

_LATENCY = 0.1
"""A bucket is so large that its latency is this part of its time: more bytes would save little of the rest, and hold
more memory for longer."""

_LARGE = 2**30
_SIZES = 2**16, 2**28

_WORTH = 0.99
"""Buckets are taken if a step takes at most this fraction of its time without them."""


def with_buckets(
    joint: JointGraph,
    plan: Plan,
    shapes: Mapping[str, torch.Size],
    cluster: Cluster,
    optimizer: str,
    budget: int,
    seconds: float,
) -> Plan:
    """The plan with buckets, if its predicted step takes less than ``seconds``, those without, and its peak is within
    ``budget`` bytes.
    """
    size = bucket_bytes(plan, cluster)
    if not size:
        return plan
    bucketed = replace(plan, bucket=size)
    merged = analyze_program(lower(joint, bucketed, shapes), cluster, optimizer=optimizer)
    if merged.peak_memory > budget or merged.time.total > _WORTH * seconds:
        return plan
    times = f"{format_seconds(merged.time.total)} a step and {format_bytes(merged.peak_memory)}"
    return replace(bucketed, note=f"{plan.note}; {times} with small collectives in buckets of {format_bytes(size)}")


def bucket_bytes(plan: Plan, cluster: Cluster) -> int:
    """The smallest power of two of bytes of which a collective over data-parallel ranks takes little latency.

    Of all data axes it is the largest; 0 if there is none of several ranks.
    """
    sizes = [_filling(cluster, plan, axis) for axis, size in plan.data_mesh if size > 1]
    return max(sizes, default=0)


def _filling(cluster: Cluster, plan: Plan, axis: str) -> int:
    group = cluster.group_of(plan.mesh, axis)

    def seconds(nbytes: int) -> float:
        operand = nbytes // group.ranks
        return collective_seconds("all_gather_into_tensor", operand, nbytes, group, cluster.efficiency)

    latency = seconds(0)
    wanted = latency * (1 / _LATENCY - 1) / (seconds(_LARGE) - latency) * _LARGE
    least, most = _SIZES
    size = least
    while size < min(wanted, most):
        size *= 2
    return size
