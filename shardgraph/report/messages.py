"""The time of messages between the stages of a pipeline."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.plans.plan import Plan


def message_seconds(tensors: Iterable[torch.Tensor], plan: Plan, cluster: Cluster) -> float:
    """Seconds to send ``tensors`` to the previous or next stage; 0 if there are none."""
    assert plan.pipeline is not None
    nbytes = sum(tensor.nbytes for tensor in tensors)
    link = cluster.link_of(plan.whole_mesh, plan.pipeline.axis)
    return collective_seconds("send", nbytes, nbytes, 2, link, cluster.efficiency) if nbytes else 0.0
