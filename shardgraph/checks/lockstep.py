"""All ranks of a program in one process, in lockstep: each node runs for every rank before the next node does.

Graphs are the same text on every rank until they are bound, so one interpreter can run them for all, with the
collectives implemented by their definition.
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
from shardgraph.passes.analysis.random_state import draws
from shardgraph.runtime.bind import SYMBOLIC, on_rank
from shardgraph.runtime.layouts import suited
from shardgraph.runtime.rng import HostState

Inputs = Sequence[Mapping[Role, Any]]
Results = list[tuple[Role | None, Any]]
OnValue = Callable[[fx.Node, list[Any]], None]


def run_lockstep(
    gm: fx.GraphModule,
    mesh: Mesh,
    inputs: Inputs,
    *,
    rng: list[HostState] | None = None,
    on_value: OnValue = lambda node, values: None,
) -> list[Results]:
    """Interpret ``gm`` for every rank of ``mesh``; returns each rank's results by role.

    Args:
        gm: an unbound graph with roles; see :mod:`shardgraph.ir`.
        mesh: ``(axis, size)`` pairs; ranks enumerate it row by row, the last axis fastest.
        inputs: per rank, the value of every placeholder by role.
        rng: per rank, the state of its generators before the graph runs; updated in place. None: all ranks
            draw from the default generator.
        on_value: sees every node with its values, one per rank; of the output node, each rank's results.

    Raises:
        CollectiveError: ranks pass tensors of different shapes to a collective.
        ShardGraphError: a node fails; the message names it and its line.
    """
    world = math.prod(size for _, size in mesh)
    assert len(inputs) == world, f"{len(inputs)} inputs for {world} ranks"
    with torch.no_grad():
        return _Lockstep(gm, mesh, inputs, rng, on_value).run()


def by_role(results: Results) -> dict[Role, Any]:
    """A rank's results that have a meaning outside of the graph."""
    return {role: value for role, value in results if role is not None}


def along(mesh: Mesh, axis: str, rank: int) -> tuple[int, int]:
    """The size of an axis, and the coordinate of ``rank`` along it."""
    position = position_of(mesh, axis)
    return mesh[position][1], coordinates(mesh, rank)[position]


class _Lockstep(fx.Interpreter):
    """An interpreter for which the value of a node is a list of values, one per rank."""

    def __init__(
        self, gm: fx.GraphModule, mesh: Mesh, inputs: Inputs, rng: list[HostState] | None, on_value: OnValue
    ) -> None:
        super().__init__(gm)
        self.mesh, self.inputs, self.rng, self.on_value = mesh, inputs, rng, on_value
        self.extra_traceback = False  # errors say where they occur

    def run_node(self, node: fx.Node) -> list[Any]:
        ranks = range(len(self.inputs))
        values: list[Any]
        if node.op == "output":
            values = [[(role, self._on(rank, value)) for role, value in ir.outputs(self.module)] for rank in ranks]
        elif node.op == "placeholder":
            values = [inputs[ROLE.of(node)] for inputs in self.inputs]
        elif node.op == "get_attr":
            values = [getattr(self.module, str(node.target))] * len(ranks)
        elif ir.is_collective(node):
            values = _collective(node, self.env[node.args[0]], self.mesh)
        else:
            values = [self._call(node, rank) for rank in ranks]
        self.on_value(node, values)
        return values

    def _on(self, rank: int, argument: Any) -> Any:
        return fx.map_arg(argument, lambda node: self.env[node][rank])

    def _call(self, node: fx.Node, rank: int) -> Any:
        args, kwargs = self._on(rank, (node.args, node.kwargs))
        if node.target is ir.WAIT:
            return args[0]
        if node.target in SYMBOLIC:
            here = on_rank(node.target, args, lambda axis: along(self.mesh, axis, rank))
            return here if isinstance(here, int) else here[0](*here[1])
        target = suited(node.target)
        try:
            if self.rng is None or not draws(node):
                return target(*args, **kwargs)
            before = HostState.now()
            self.rng[rank].set()
            try:
                return target(*args, **kwargs)
            finally:
                self.rng[rank] = HostState.now()
                before.set()
        except Exception as error:
            where = f" ({SOURCE.of(node)})" if SOURCE.get(node) else ""
            raise ShardGraphError(f"{node.format_node()}{where} failed on rank {rank}: {error}") from error


def _collective(node: fx.Node, values: list[torch.Tensor], mesh: Mesh) -> list[torch.Tensor]:
    results: list[torch.Tensor] = [torch.empty(0, device="cpu")] * len(values)
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
    stacked = torch.stack(values)
    total = stacked.amax(0) if node.args[1] == "max" else stacked.sum(0)
    if node.args[1] == "avg":
        total = total / count
    if node.target is ir.ALL_REDUCE:
        return [total.clone() for _ in values]
    return [chunk.clone() for chunk in total.chunk(count)] if total.numel() else [total] * count
