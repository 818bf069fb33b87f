"""DTensor's own sharding strategies as options, from both of its registries.

Single-dimension strategies are tables of placements. The older ones are functions, called here with every combination
of operand placements; those that need no redistribution are legal. Neither needs a process group.

Exceptions raised by a strategy, and combinations not tried, are counted. An operation whose strategy fails, for example
because another release of torch changed it, is computed in full on every rank, and the program's notes say so.
"""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections import Counter
from collections.abc import Iterator
from typing import Any

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.utils import _pytree as pytree

from shardgraph import torch_api
from shardgraph.passes.sharding.options import Operation, Option, results
from shardgraph.passes.sharding.placements import PARTIAL, REPLICATE

_MOST_COMBINATIONS = 4096

Refused = Counter[tuple[str, str]]
"""How many combinations of placements could not be used, by operator and reason."""


def has_strategy(target: Any) -> bool:
    """Whether DTensor has a strategy for the operator."""
    return target in torch_api.single_dim_strategies() or target in torch_api.op_strategies()


def strategies(operation: Operation, refused: Refused) -> list[Option]:
    """DTensor's legal placements for an operation, all shardings in one block; counts unusable ones in ``refused``."""
    tabulated = operation.node.target in torch_api.single_dim_strategies()
    found = dict.fromkeys((_from_table if tabulated else _from_function)(operation, refused))
    values = [*operation.tensors, *results(operation.node)]
    return [option for option in found if not _sums_truths(option, values)]


def notes_of(refused: Refused) -> Iterator[str]:
    """Notes for the user about combinations that could not be used."""
    for (target, reason), count in refused.items():
        yield f"{target}: {count} combinations of placements are not used: {reason}"


def _from_table(operation: Operation, refused: Refused) -> Iterator[Option]:
    node, outs = operation.node, results(operation.node)
    values = [*outs, *operation.tensors]
    args, kwargs = pytree.tree_map_only(fx.Node, _meta, _from_the_front(operation))
    try:
        rows = torch_api.single_dim_strategies()[node.target].func(node.target, args, kwargs)
    except Exception as error:  # whatever it is, this operation can be computed in full
        refused[str(node.target), _raised(error)] += 1
        return
    for row in rows:
        if len(row) != len(values):
            refused[str(node.target), f"DTensor's table has {len(row)} tensors, not {len(values)}"] += 1
            continue
        entries = [(_plain(entry), isinstance(value, torch.Tensor)) for entry, value in zip(row, values, strict=True)]
        if all(isinstance(p, Placement) or (p is None and not tensor) for p, tensor in entries):
            placements = tuple(p if tensor else None for p, tensor in entries)
            yield Option(placements[len(outs) :], placements[: len(outs)])


def _from_the_front(operation: Operation) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of an operation, with dimensions counted from the front: strategies may take -1, as that of
    ``cumsum`` does, for one that no operand is cut along."""
    node = operation.node
    rank = max(
        (each.dim() for each in (*operation.tensors, *results(node)) if isinstance(each, torch.Tensor)), default=0
    )

    def counted(name: str, value: Any) -> Any:
        if not name.startswith("dim"):
            return value
        return pytree.tree_map_only(int, lambda at: at + rank if at < 0 else at, value)

    names = [argument.name for argument in node.target._schema.arguments]
    args = tuple(counted(name, value) for name, value in zip(names, node.args, strict=False))
    return args, {name: counted(name, value) for name, value in node.kwargs.items()}


def _sums_truths(option: Option, values: list[Any]) -> bool:
    """Whether a value is true where the sum over ranks is, as DTensor has the result of ``any``: what computes with
    it would count the ranks."""
    placed = zip(values, option.operands + option.results, strict=True)
    return any(placement == PARTIAL and value.dtype == torch.bool for value, placement in placed)


def _plain(entry: Any) -> Any:
    """The placement in a table's entry; False for kinds of partial that no other operation accepts."""
    if torch_api.is_shard_placeholder(entry):
        return Shard(entry.dim)
    if isinstance(entry, Partial):
        return PARTIAL if type(entry) is Partial and entry.reduce_op == "sum" else False
    return entry


def _raised(error: Exception) -> str:
    first_line = re.sub(r" at 0x[0-9a-f]+", "", str(error).partition("\n")[0])  # the same on every rank
    return f"DTensor's strategy raised {type(error).__name__}: {first_line}"


def _from_function(operation: Operation, refused: Refused) -> Iterator[Option]:
    node, mesh = operation.node, _mesh(operation.parts)
    if not all(isinstance(each.meta["val"], torch.Tensor) for each in node.all_input_nodes):
        refused[str(node.target), "a number that each rank computes is among its arguments"] += 1
        return
    candidates: list[list[Placement]] = []
    for value in operation.tensors:
        cuts = [Shard(d) for d, size in enumerate(value.shape) if size > 1 and size % operation.parts == 0]
        candidates.append([REPLICATE, *cuts, *([PARTIAL] if value.is_floating_point() else [])])
    given = _from_the_front(operation)
    if (left := math.prod(map(len, candidates)) - _MOST_COMBINATIONS) > 0:
        refused[str(node.target), f"of one operation {_MOST_COMBINATIONS} are tried at most"] += left
    for combination in itertools.islice(itertools.product(*candidates), _MOST_COMBINATIONS):
        placements = iter(combination)
        args, kwargs = pytree.tree_map_only(
            fx.Node, lambda n, p=placements: torch_api.strategy_of(mesh, next(p), _meta(n)), given
        )
        try:
            answer = torch_api.ask_strategy(node.target, args, kwargs)
        except Exception as error:  # whatever it is, the operation can use other placements or be computed in full
            refused[str(node.target), _raised(error)] += 1
            continue
        options = (_option(spec, combination) for spec in answer)
        count = len(results(node))
        if option := next((each for each in options if each and len(each.results) == count), None):
            yield option


def _option(spec: Any, operands: tuple[Placement, ...]) -> Option | None:
    """A strategy's answer, if the operation runs on these operand placements without redistribution."""
    moves = any(cost for costs in spec.redistribute_cost or [] for cost in costs)
    if moves or (spec.input_specs is not None and tuple(s.placements[0] for s in spec.input_specs) != operands):
        return None
    specs = spec.output_specs if isinstance(spec.output_specs, tuple) else (spec.output_specs,)
    outs = tuple(None if each is None else each.placements[0] for each in specs)
    known = all(p is None or p == PARTIAL or isinstance(p, (Replicate, Shard)) for p in outs)
    return Option(operands, outs) if known else None


def _meta(node: fx.Node) -> Any:
    return torch_api.tensor_meta(node.meta["val"]) if isinstance(node.meta.get("val"), torch.Tensor) else node


_mesh = functools.cache(torch_api.mesh_without_group)
