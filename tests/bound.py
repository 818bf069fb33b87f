"""Bound graphs of all ranks of a program in one process, with what collectives mean in lockstep."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore

from shardgraph import ir
from shardgraph.checks.lockstep import Results, _meaning
from shardgraph.ir.attributes import ROLE
from shardgraph.mesh import Mesh
from shardgraph.runtime.bind import bind

Group = tuple[int, ...]


def bound_on_every_rank(gm: fx.GraphModule, mesh: Mesh) -> list[tuple[fx.GraphModule, dict[str, Group]]]:
    """``gm`` bound on each rank of a mesh, with the ranks of the groups that it names."""
    return [_bound(gm, mesh, rank) for rank in range(math.prod(size for _, size in mesh))]


def _bound(gm: fx.GraphModule, mesh: Mesh, rank: int) -> tuple[fx.GraphModule, dict[str, Group]]:
    axes, sizes = zip(*mesh, strict=True)
    dist.init_process_group("fake", rank=rank, world_size=math.prod(sizes), store=FakeStore())
    try:
        bound = bind(gm, init_device_mesh("cpu", sizes, mesh_dim_names=axes))
        names = {node.args[-1] for node in ir.collectives(bound)}
        groups = {name: torch._C._distributed_c10d._resolve_process_group(name) for name in names}
        return bound, {name: tuple(dist.get_process_group_ranks(group)) for name, group in groups.items()}
    finally:
        dist.destroy_process_group()


def run_bound(gm: fx.GraphModule, mesh: Mesh, inputs: Sequence[Mapping[ir.Role, Any]]) -> list[Results]:
    """Run ``gm``, bound on each rank, on inputs by role: each rank up to its next collective, then what its members
    bring to it is exchanged as :mod:`shardgraph.checks.lockstep` says. Gives each rank's results by role."""
    runs = [
        _run(bound, groups, given) for (bound, groups), given in zip(bound_on_every_rank(gm, mesh), inputs, strict=True)
    ]
    results: dict[int, Results] = {}
    waiting: dict[int, tuple[Group, fx.Node, torch.Tensor]] = {}
    answers: dict[int, Any] = dict.fromkeys(range(len(runs)))
    while len(results) < len(runs):
        for rank, answer in answers.items():
            try:
                waiting[rank] = runs[rank].send(answer)
            except StopIteration as ended:
                results[rank] = ended.value
        answers = {}
        for group in {group for group, _, _ in waiting.values()}:
            calls = [waiting.get(rank) for rank in group]
            if all(call is not None and call[0] == group for call in calls):
                nodes = [node for _, node, _ in calls]
                assert len({(node.target, node.name) for node in nodes}) == 1, f"ranks differ: {nodes}"
                answers |= dict(zip(group, _exchanged(nodes, [value for _, _, value in calls]), strict=True))
        waiting = {rank: call for rank, call in waiting.items() if rank not in answers}
        assert answers or len(results) == len(runs), f"ranks wait for ever: {waiting}"
    return [results[rank] for rank in range(len(runs))]


def _exchanged(nodes: Sequence[fx.Node], values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    if nodes[0].target is not ir.ALL_TO_ALL:
        return _meaning(nodes[0], list(values))
    pieces = [value.split(list(node.args[2])) for node, value in zip(nodes, values, strict=True)]
    return [torch.cat([pieces[source][rank] for source in range(len(values))]) for rank in range(len(values))]


def _run(
    gm: fx.GraphModule, groups: Mapping[str, Group], inputs: Mapping[ir.Role, Any]
) -> Iterator[tuple[Group, fx.Node, torch.Tensor]]:
    """One rank: yields the group, the node and the value at each collective, and is sent what it receives."""
    env: dict[fx.Node, Any] = {}
    for node in gm.graph.nodes:
        if node.op == "placeholder":
            env[node] = inputs[ROLE.of(node)]
        elif node.op == "get_attr":
            env[node] = getattr(gm, node.target)
        elif ir.is_collective(node):
            env[node] = yield groups[node.args[-1]], node, env[node.args[0]]
        elif node.target is ir.WAIT:
            env[node] = env[node.args[0]]
        elif node.op == "call_function":
            args, kwargs = fx.map_arg((node.args, node.kwargs), env.__getitem__)
            with torch.no_grad():
                env[node] = node.target(*args, **kwargs)
    return [(role, env[value] if isinstance(value, fx.Node) else value) for role, value in ir.outputs(gm)]
