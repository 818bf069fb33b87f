"""Decides where pipeline stages begin, if a plan leaves that open."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import fx

from shardgraph.cost_models.balance import balance
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.device import VIEW
from shardgraph.cost_models.optimizers import optimizer_cost
from shardgraph.cost_models.schedules import StageCost
from shardgraph.errors import PlanError
from shardgraph.ir import JointGraph, Parameter, Saved, copy_graph, outputs, placeholders
from shardgraph.passes.analysis.costs import node_costs
from shardgraph.passes.analysis.liveness import Storage, storages_of
from shardgraph.passes.analysis.rows import Prices
from shardgraph.passes.partition.split import split
from shardgraph.passes.pipeline.assign import Assignment, assign_stages
from shardgraph.passes.pipeline.cuts import CutPoint, annotated_stages, balanced, beginnings_of, cut_points
from shardgraph.passes.pipeline.extract import crossings
from shardgraph.plans.plan import Plan
from shardgraph.report.pipeline import message_seconds
from shardgraph.search.machine import machine_for


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
        stages = _best(joint, plan, shapes, cluster or machine_for(None, plan.world_size))
    beginnings_of(joint.module, stages)
    return replace(plan, pipeline=replace(pipeline, stages=stages, balance=()))


def _best(joint: JointGraph, plan: Plan, shapes: Mapping[str, torch.Size], cluster: Cluster) -> tuple[str, ...]:
    pipeline = plan.pipeline
    assert pipeline is not None
    costs, names = _blocks_of(joint, plan, shapes, cluster)
    if len(names) < pipeline.count - 1:
        places = f"{len(names)}, before {', '.join(map(repr, names))}" if names else "none"
        raise PlanError(
            f"{pipeline.count} stages take {pipeline.count - 1} cuts between modules that run one after the other, and "
            f"the model has {places}: use fewer ranks along {pipeline.axis!r}"
        )
    limit = math.inf if plan.recompute == "budget" else cluster.device.memory
    partition = balance(costs, pipeline.order, limit=limit, prefetch=pipeline.prefetch)
    return tuple(names[cut - 1] for cut in partition.cuts[1:-1])


def _blocks_of(
    joint: JointGraph, plan: Plan, shapes: Mapping[str, torch.Size], cluster: Cluster
) -> tuple[list[StageCost], list[str]]:
    """The cost of each block of a model captured for one microbatch, and the names of the modules that begin a block.

    The blocks are in forward order; no module begins the first one.

    Seconds and bytes are those of a rank that computes the microbatch alone; collectives inside a stage are left out,
    since they add alike to all stages. Parameters and the state of AdamW are the rank's part under ``plan``; gradients
    are whole along the axis that shards the parameter.
    """
    assert plan.pipeline is not None
    gm, points, assignment = _cut(joint, plan.pipeline.count)
    again = plan.pipeline.checkpoint != "never"
    saved = [0] * assignment.count if again else _saved(gm, assignment)
    fixed = _fixed(gm, assignment, plan, shapes)
    ends = crossings(gm, assignment)

    def message(nodes: Sequence[fx.Node]) -> float:
        return message_seconds((node.meta["val"] for node in nodes), plan, cluster)

    costs = []
    for number, seconds in enumerate(_seconds(gm, assignment, Prices(cluster, ()))):
        forward, weights = seconds["forward"], seconds["weights"]
        rest = seconds["backward"] - weights + (forward if again else 0.0)
        costs.append(
            StageCost(
                forward=forward,
                backward=rest + weights,
                backward_input=rest,
                backward_weight=weights,
                send_output=message(ends[number + 1][0]) if number + 1 < assignment.count else 0.0,
                send_gradient=message(ends[number - 1][1]) if number else 0.0,
                saved=saved[number],
                fixed=fixed[number],
            )
        )
    return costs, [point.name for point in points]


def blocks_of(joint: JointGraph) -> tuple[int, float]:
    """How many stages a captured model can have at most, and the bytes that usually pass from one to the next."""
    gm, points, assignment = _cut(joint, 2)
    if not points:
        return 1, 0.0
    ends = crossings(gm, assignment)
    sizes = (sum(node.meta["val"].nbytes for node in ends[number][0]) for number in range(1, assignment.count))
    return assignment.count, statistics.median(sizes)


def _cut(joint: JointGraph, stages: int) -> tuple[fx.GraphModule, list[CutPoint], Assignment]:
    """A copy of the graph, cut between the cut points that leave each block a parameter, since optimizers refuse a rank
    that has none; or between all where those are too few for so many stages."""
    gm, points = copy_graph(joint.module), cut_points(joint.module)
    named = {node.name: node for node in gm.graph.nodes}
    assignment = assign_stages(gm, [named[point.node.name] for point in points])
    begin = sorted({home for _, _, home in _homes_of_parameters(gm, assignment)})[1:]
    if len(begin) >= stages - 1:
        points = [points[block - 1] for block in begin]
        assignment = assign_stages(gm, [named[point.node.name] for point in points])
    return gm, points, assignment


def _homes_of_parameters(gm: fx.GraphModule, assignment: Assignment) -> Iterator[tuple[str, fx.Node, int]]:
    """Each parameter, by name and node, with the first block that uses it."""
    for role, node in placeholders(gm).items():
        if isinstance(role, Parameter):
            homes = (assignment.home[user] for user in node.users if user in assignment.home)
            yield role.fqn, node, min(homes, default=0)


def _seconds(gm: fx.GraphModule, assignment: Assignment, prices: Prices) -> list[dict[str, float]]:
    """Seconds of each block: of forward, of backward, and of the part of backward for weight gradients only."""
    seconds = [{"forward": 0.0, "backward": 0.0, "weights": 0.0} for _ in range(assignment.count)]
    passed = _passed_on(gm, assignment)
    for node, cost in node_costs(gm).items():
        if node not in assignment.home or node in assignment.anywhere or cost.kind in ("free", "collective"):
            continue
        block, price = seconds[assignment.home[node]], prices.view if cost.kind == VIEW else prices.computation(cost)
        block["forward" if node in assignment.inside else "backward"] += price
        if node not in assignment.inside and node not in passed:
            block["weights"] += price
    return seconds


def _passed_on(gm: fx.GraphModule, assignment: Assignment) -> set[fx.Node]:
    """The backward operations that an earlier block waits for."""
    home = assignment.home
    passed: set[fx.Node] = set()
    for node in reversed(gm.graph.nodes):
        own = home.get(node, 0)
        if any(home.get(user, own) < own or (user in passed and home[user] == own) for user in node.users):
            passed.add(node)
    return passed


def _saved(gm: fx.GraphModule, assignment: Assignment) -> list[int]:
    """Bytes that each block saves for backward."""
    forward, _ = split(copy_graph(gm))
    homes = {node.name: home for node, home in assignment.home.items() if node not in assignment.anywhere}
    saved, held = [0] * assignment.count, storages_of(forward)  # values of equal layers may be one fake tensor
    seen = set[Storage]()
    for role, value in outputs(forward):
        if not isinstance(role, Saved) or not isinstance(value, fx.Node) or value.op == "placeholder":
            continue
        tensor = isinstance(value.meta["val"], torch.Tensor)
        if tensor and value.name in homes and (storage := held[value][0]) not in seen:
            seen.add(storage)
            saved[homes[value.name]] += storage.nbytes
    return saved


def _fixed(gm: fx.GraphModule, assignment: Assignment, plan: Plan, shapes: Mapping[str, torch.Size]) -> list[int]:
    """Bytes of parameters, whole gradients and optimizer state, in the first block that uses each parameter."""
    entries, states = plan.of_stage.resolve(shapes), optimizer_cost("adamw").states
    fixed = [0] * assignment.count
    for fqn, node, home in _homes_of_parameters(gm, assignment):
        entry, value = entries[fqn], node.meta["val"]
        whole = math.prod(entry.local_shape(value.shape, plan.mesh)) * value.itemsize
        part = whole if entry.shard_axis is None else -(-whole // plan.mesh[entry.shard_axis][1])
        fixed[home] += part * (1 + states) + whole
    return fixed
