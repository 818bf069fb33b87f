"""DTensor's own strategies as options, from both of its registries.

Single-dimension strategies are tables of placements; the older ones are functions, asked here about every combination
of placements, of which those that need no redistribution are legal. Neither needs a process group.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from shardgraph import torch_api
from shardgraph.passes.sharding.options import Operation, Option, operands, results
from shardgraph.passes.sharding.placements import PARTIAL, REPLICATE

_MOST_COMBINATIONS = 4096


def has_strategy(target: Any) -> bool:
    """Whether DTensor knows the operator."""
    return target in torch_api.single_dim_strategies() or target in torch_api.op_strategies()


def strategies(operation: Operation) -> list[Option]:
    """DTensor's legal placements for an operation, every cut in one block."""
    found = _tables(operation) if operation.target in torch_api.single_dim_strategies() else _answers(operation)
    return list(dict.fromkeys(found))


def _tables(operation: Operation) -> Iterator[Option]:
    node = operation.node
    args, kwargs = pytree.tree_map_only(fx.Node, _meta, (node.args, node.kwargs))
    produced = results(node)
    given = len(operands(node))
    for row in torch_api.single_dim_strategies()[node.target].func(node.target, args, kwargs):
        row = [_plain(placement) for placement in row]
        count = len(row) - given
        if all(isinstance(p, Placement) or p is None for p in row) and count == len(produced):
            outs = [p if isinstance(v, torch.Tensor) else None for p, v in zip(row[:count], produced, strict=True)]
            if all(p is not None for p in row[count:]) and all(
                p is not None or not isinstance(v, torch.Tensor) for p, v in zip(outs, produced, strict=True)
            ):
                yield Option(tuple(row[count:]), tuple(outs))


def _plain(placement: Any) -> Any:
    """The placement of a table's entry; False for kinds of partial values that no other operation takes."""
    if torch_api.is_shard_placeholder(placement):
        return Shard(placement.dim)
    if isinstance(placement, Partial):
        return PARTIAL if type(placement) is Partial and placement.reduce_op == "sum" else False
    return placement


def _answers(operation: Operation) -> Iterator[Option]:
    node = operation.node
    tensors = operands(node)
    candidates: list[list[Placement]] = []
    for tensor in tensors:
        value = tensor.meta["val"]
        cuts = [Shard(d) for d, size in enumerate(value.shape) if size > 1 and size % operation.parts == 0]
        candidates.append([REPLICATE, *cuts, *([PARTIAL] if value.is_floating_point() else [])])
    combinations = itertools.islice(itertools.product(*candidates), _MOST_COMBINATIONS)
    for combination in combinations:
        if (outs := _ask(operation, tensors, combination)) is not None:
            yield Option(combination, outs)


def _ask(operation: Operation, tensors: list[fx.Node], given: tuple[Placement, ...]) -> tuple[Any, ...] | None:
    """The placements of the results if the operation runs on these as they are."""
    node, mesh = operation.node, _mesh(operation.parts)
    placements = iter(given)
    args, kwargs = pytree.tree_map_only(
        fx.Node, lambda n: torch_api.strategy_of(mesh, next(placements), _meta(n)), (node.args, node.kwargs)
    )
    try:
        answer = torch_api.ask_strategy(node.target, args, kwargs)
    except Exception:  # what a strategy function cannot take is not legal
        return None
    for spec in answer:
        if any(cost for costs in spec.redistribute_cost or [] for cost in costs):
            continue
        if spec.input_specs is not None and tuple(s.placements[0] for s in spec.input_specs) != given:
            continue
        outs = spec.output_specs if isinstance(spec.output_specs, tuple) else (spec.output_specs,)
        found = tuple(None if out is None else out.placements[0] for out in outs)
        if len(found) == len(results(node)) and all(p is None or _known(p) for p in found):
            return found
    return None


def _known(placement: Placement) -> bool:
    return placement == PARTIAL or isinstance(placement, (Replicate, Shard))


def _meta(node: fx.Node) -> Any:
    return torch_api.tensor_meta(node.meta["val"]) if isinstance(node.meta.get("val"), torch.Tensor) else node


@functools.cache
def _mesh(parts: int) -> Any:
    return torch_api.mesh_without_group(parts)
