"""All ranks of a program in one process, in lockstep: each node runs for every rank before the next node does.

Graphs are the same text on every rank until they are bound, so one interpreter can run them for all, with the
collectives implemented by their definition. No process groups, threads or launchers are involved, and any value can be
inspected on every rank at once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.errors import CollectiveError, ShardGraphError
from shardgraph.ir import Role
from shardgraph.ir.attributes import ROLE, SOURCE
from shardgraph.mesh import Mesh, coordinates, group_along, position_of

Results = list[tuple[Role | None, Any]]


def run_lockstep(
    gm: fx.GraphModule,
    mesh: Mesh,
    inputs: Sequence[Mapping[Role, Any]],
    *,
    rng: list[torch.Tensor] | None = None,
    on_value: Callable[[fx.Node, list[Any]], None] | None = None,
) -> list[Results]:
    """Interpret ``gm`` for every rank of ``mesh``; returns each rank's results by role.

    Args:
        gm: an unbound graph with roles; see :mod:`shardgraph.ir`.
        mesh: ``(axis, size)`` pairs; ranks enumerate it row by row, the last axis fastest.
        inputs: per rank, the value of every placeholder by role.
        rng: per rank, the state of its CPU generator before the graph runs; updated in place. None: all ranks
            draw from the default generator.
        on_value: sees every node with its values, one per rank.

    Raises:
        CollectiveError: ranks pass tensors of different shapes to a collective.
        ShardGraphError: a node fails; the message names it and its line.
    """
    world = math.prod(size for _, size in mesh)
    assert len(inputs) == world, f"{len(inputs)} inputs for {world} ranks"
    last_use = _last_uses(gm)
    env: dict[fx.Node, list[Any]] = {}
    with torch.no_grad():
        for node in gm.graph.nodes:
            if node.op == "output":
                break
            env[node] = _run_node(gm, node, env, mesh, inputs, rng)
            if on_value is not None:
                on_value(node, env[node])
            for dead in last_use.get(node, ()):
                del env[dead]
    return [
        [(role, env[value][rank] if isinstance(value, fx.Node) else value) for role, value in ir.outputs(gm)]
        for rank in range(world)
    ]


def by_role(results: Results) -> dict[Role, Any]:
    """A rank's results that have a meaning outside of the graph."""
    return {role: value for role, value in results if role is not None}


def along(mesh: Mesh, axis: str, rank: int) -> tuple[int, int]:
    """The size of an axis, and the coordinate of ``rank`` along it."""
    position = position_of(mesh, axis)
    return mesh[position][1], coordinates(mesh, rank)[position]


def _last_uses(gm: fx.GraphModule) -> dict[fx.Node, list[fx.Node]]:
    """The values that each node is the last one to use."""
    used: set[fx.Node] = set()
    last: dict[fx.Node, list[fx.Node]] = {}
    for node in reversed(gm.graph.nodes):
        last[node] = [value for value in node.all_input_nodes if value not in used]
        used.update(node.all_input_nodes)
    return last


def _run_node(
    gm: fx.GraphModule,
    node: fx.Node,
    env: Mapping[fx.Node, list[Any]],
    mesh: Mesh,
    inputs: Sequence[Mapping[Role, Any]],
    rng: list[torch.Tensor] | None,
) -> list[Any]:
    if node.op == "placeholder":
        return [values[ROLE.of(node)] for values in inputs]
    if node.op == "get_attr":
        return [getattr(gm, str(node.target))] * len(inputs)
    if ir.is_collective(node):
        return _collective(node, env[node.args[0]], mesh)
    if node.target is ir.WAIT:
        return env[node.args[0]]
    results = []
    for rank in range(len(inputs)):
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n, rank=rank: env[n][rank])
        if node.target in _SYMBOLIC:
            results.append(_symbolic(node.target, args, mesh, rank))
            continue
        try:
            results.append(_call(node, args, kwargs, rng, rank))
        except Exception as error:
            where = f" ({SOURCE.of(node)})" if SOURCE.get(node) else ""
            raise ShardGraphError(f"{node.format_node()}{where} failed on rank {rank}: {error}") from error
    return results


_SYMBOLIC = (ir.trim_shard, ir.local_chunk, ir.local_part, ir.first_only, ir.first_row, ir.from_later)


def _symbolic(target: Any, args: tuple[Any, ...], mesh: Mesh, rank: int) -> Any:
    """The value on ``rank`` of an operation that depends on the rank."""
    operand, *_ = args
    size, here = along(mesh, next(arg for arg in args if isinstance(arg, str)), rank)
    if target is ir.local_part:
        _, dim, blocks, _, *back = args
        return ir.take_part(operand, dim, blocks, size, (here - sum(back)) % size)
    if target is ir.first_only:
        return torch.zeros_like(operand) if here else operand
    if target is ir.first_row:
        return operand * here
    if target is ir.from_later:
        return int(here < operand)
    start, stop = ir.chunk_bounds(args[1], size, here)
    return operand[: stop - start] if target is ir.trim_shard else operand[start:stop]


def _call(node: fx.Node, args: Any, kwargs: Any, rng: list[torch.Tensor] | None, rank: int) -> Any:
    if rng is None or torch.Tag.nondeterministic_seeded not in getattr(node.target, "tags", ()):
        return node.target(*args, **kwargs)
    before = torch.get_rng_state()
    torch.set_rng_state(rng[rank])
    try:
        return node.target(*args, **kwargs)
    finally:
        rng[rank] = torch.get_rng_state()
        torch.set_rng_state(before)


def _collective(node: fx.Node, values: list[torch.Tensor], mesh: Mesh) -> list[torch.Tensor]:
    results: list[torch.Tensor] = [torch.empty(0)] * len(values)
    for members in dict.fromkeys(group_along(mesh, ir.group_of(node), rank) for rank in range(len(values))):
        mine = [values[rank] for rank in members]
        if node.target is not ir.ALL_TO_ALL and len({tuple(value.shape) for value in mine}) > 1:
            shapes = ", ".join(f"rank {rank}: {list(values[rank].shape)}" for rank in members)
            raise CollectiveError(f"{ir.describe_collective(node)} gets different shapes: {shapes}")
        for rank, result in zip(members, _meaning(node, mine), strict=True):
            results[rank] = result
    return results


def _meaning(node: fx.Node, values: list[torch.Tensor]) -> list[torch.Tensor]:
    """The result of a collective on each member of a group, from their operands."""
    count = len(values)
    if node.target is ir.ALL_GATHER:
        return [torch.cat(values) for _ in values]
    if node.target is ir.send:
        return [values[rank - 1].clone() for rank in range(count)]
    if node.target is ir.ALL_TO_ALL:
        pieces = [value.split(list(node.args[2])) for value in values]
        return [torch.cat([pieces[source][rank] for source in range(count)]) for rank in range(count)]
    if node.args[1] == "max":
        return [torch.stack(values).amax(0) for _ in values]
    total = torch.stack(values).sum(0)
    if node.args[1] == "avg":
        total = total / count
    if node.target is ir.ALL_REDUCE:
        return [total.clone() for _ in values]
    return [chunk.clone() for chunk in total.chunk(count)] if total.numel() else [total] * count
