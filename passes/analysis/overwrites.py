"""Which operations write their result into an operand, which nobody reads any more.

Graphs are functional, so that passes may move and prove what they do. As they run, a gradient is reduced and divided
where it is, and an operation that computes element by element writes where it reads: a new tensor for each would be
more memory, and a pass over memory that no cache holds. The numbers are the same, of the same kernels.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.ir.attributes import ROLE
from shardgraph.torch_api import OpOverload

aten = torch.ops.aten

REDUCTIONS: dict[Any, Any] = {ir.ALL_REDUCE: ir.ALL_REDUCE_, aten.div.Tensor: aten.div_.Tensor}
"""What becomes of a gradient, with the operations that do it in place."""

_OTHERWISE_NAMED: dict[Any, Any] = {
    aten.pow.Tensor_Scalar: aten.pow_.Scalar,
    aten.pow.Tensor_Tensor: aten.pow_.Tensor,
}
_COMMUTE = frozenset({aten.add.Tensor, aten.mul.Tensor})
_INTO_GRADIENT = "grad_input"
"""The overload of a backward operation whose result is written where it is told: where it reads the gradient."""


def overwrites(
    gm: fx.GraphModule, held: Mapping[fx.Node, Sequence[Any]], start: int = 0
) -> Iterator[tuple[fx.Node, fx.Node]]:
    """The nodes whose result may be in the memory of an operand, each with that operand.

    That memory is the graph's own, and dies there. ``held`` are the storages of each node's value, with their deaths if
    nothing works in place; ``start`` is the point of the first node.
    """
    made: dict[Any, bool] = {}
    for point, node in enumerate(gm.graph.nodes, start):
        for storage in held[node]:
            if storage not in made:
                made[storage] = _is_made(node)
        for operand in _operands(node):
            dying = [storage for storage in held[operand] if made[storage] and storage.death == point]
            others = (other for other in node.all_input_nodes if other is not operand)
            if dying and not any(dying[0] in held[other] for other in others) and _is_laid_out_as(operand, node):
                yield node, operand
                break


def write_in_place(node: fx.Node) -> None:
    """Have a node write its result into its first operand."""
    node.target = _in_place(node.target)
    if node.target._overloadname == _INTO_GRADIENT:
        node.kwargs = {**node.kwargs, _INTO_GRADIENT: node.args[0]}


def _operands(node: fx.Node) -> Iterator[fx.Node]:
    """The operands of a node that its operation has a form to write into."""
    if node.op != "call_function" or _in_place(node.target) is None:
        return
    commutes = node.target in _COMMUTE and not node.kwargs and len(node.args) == 2
    yield from (each for each in node.args[: 2 if commutes else 1] if isinstance(each, fx.Node))


@cache
def _in_place(target: Any) -> Any:
    """The form of an operation that writes its first operand; None if it has none."""
    if (known := REDUCTIONS.get(target) or _OTHERWISE_NAMED.get(target)) is not None:
        return known
    if not isinstance(target, OpOverload) or target.namespace != "aten" or torch.Tag.pointwise not in target.tags:
        return None
    name, overload = target._opname, target._overloadname
    written = getattr(aten, f"{name}_", None)
    if written is not None and overload in written.overloads():
        return getattr(written, overload)
    packet = target.overloadpacket
    return getattr(packet, _INTO_GRADIENT) if _INTO_GRADIENT in packet.overloads() else None


def _is_laid_out_as(given: fx.Node, node: fx.Node) -> bool:
    """Whether an operand may become the result: alike, and alone in its memory, of which a result would hold more than
    it needs otherwise."""
    operand, result = given.meta.get("val"), node.meta.get("val")
    if not isinstance(operand, torch.Tensor) or not isinstance(result, torch.Tensor):
        return False
    if (operand.dtype, operand.shape, operand.device) != (result.dtype, result.shape, result.device):
        return False
    if operand.untyped_storage().nbytes() != operand.nbytes:
        return False
    return any(
        operand.is_contiguous(memory_format=layout) and result.is_contiguous(memory_format=layout)
        for layout in _LAYOUTS.get(operand.dim(), _LAYOUTS[0])
    )


_LAYOUTS = {
    0: (torch.contiguous_format,),
    4: (torch.contiguous_format, torch.channels_last),
    5: (torch.contiguous_format, torch.channels_last_3d),
}
"""By number of dimensions; 0 stands for all others."""


def _is_made(node: fx.Node) -> bool:
    """Whether the first of what is in some memory made it, by what is known of its operation."""
    if ir.is_collective(node) or node.target is ir.buckets.pack:
        return True
    if isinstance(ROLE.get(node), ir.Accumulated):  # whoever gives it gives it away
        return True
    return isinstance(node.target, OpOverload) and node.target.namespace == "aten"
