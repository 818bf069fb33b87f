"""Decides where pipeline stages begin, if a plan leaves that open."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

import torch

from shardgraph.cost_models.balance import balance
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import PlanError
from shardgraph.ir import JointGraph
from shardgraph.passes.pipeline.cuts import annotated_stages, balanced, beginnings_of
from shardgraph.plans.plan import Plan
from shardgraph.search.blocks import blocks_of


def place_stages(
    joint: JointGraph, plan: Plan, shapes: Mapping[str, torch.Size], cluster: Cluster | None = None
) -> Plan:
    """``plan`` with the first module of each pipeline stage: from annotations, from ``balance``, or the best cuts.

    The best cuts have the shortest simulated step with which every rank fits its memory, priced on ``cluster``; None:
    this machine. If the recomputation is still to be found for a budget, memory is ignored.

    Raises:
        PlanError: annotations or ``balance`` cannot be met or contradict the plan, the model has too few cut points, or
            some rank runs out of memory with every choice of cuts.
    """
    pipeline = plan.pipeline
    assert pipeline is not None
    annotated = annotated_stages(joint.module, plan.annotations)
    if annotated and (pipeline.stages or pipeline.balance) and annotated != pipeline.stages:
        raise PlanError(
            f"the annotations begin stages with {', '.join(map(repr, annotated))}, and the plan says "
            f"{f'balance {list(pipeline.balance)}' if pipeline.balance else list(pipeline.stages)}: give one of the two"
        )
    stages = annotated or pipeline.stages
    if pipeline.balance:
        stages = balanced(joint.module, pipeline.balance)
    elif not stages and pipeline.count > 1:
        stages = _best(joint, plan, shapes, cluster or Cluster.detect())
    beginnings_of(joint.module, stages)
    return replace(plan, pipeline=replace(pipeline, stages=stages, balance=()))


def _best(joint: JointGraph, plan: Plan, shapes: Mapping[str, torch.Size], cluster: Cluster) -> tuple[str, ...]:
    pipeline = plan.pipeline
    assert pipeline is not None
    blocks = blocks_of(joint, plan, shapes, cluster)
    if len(blocks.names) < pipeline.count - 1:
        raise PlanError(
            f"{pipeline.count} stages take {pipeline.count - 1} cuts, and the model has {len(blocks.names)} places for "
            f"one ({', '.join(map(repr, blocks.names))}): use fewer ranks along {pipeline.axis!r}"
        )
    limit = math.inf if plan.recompute == "budget" else cluster.device.memory
    partition = balance(blocks.costs, pipeline.order, limit=limit, prefetch=pipeline.prefetch)
    return tuple(blocks.names[cut - 1] for cut in partition.cuts[1:-1])
