"""Operations along some dimensions, of which they need all elements; what they do along the others runs through."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import fx

from shardgraph.proof.definitions import Typing, define, summed
from shardgraph.proof.held import Held, UntypedError
from shardgraph.proof.labels import Label, Rule, apply, jointly, linear
from shardgraph.proof.rules import Ruled, pointwise, rule

aten = torch.ops.aten

_LINEAR: dict[Any, Sequence[frozenset[int]]] = {
    **dict.fromkeys([aten.cumsum.default, aten.flip.default, aten.roll.default], linear(0)),
    **dict.fromkeys([aten.tril.default, aten.triu.default], linear(0)),
    **dict.fromkeys([aten.avg_pool2d.default, aten._adaptive_avg_pool2d.default], linear(0)),
    **dict.fromkeys([aten.avg_pool2d_backward.default, aten._adaptive_avg_pool2d_backward.default], linear(0)),
    **dict.fromkeys([aten.glu_backward.default, aten.max_pool2d_with_indices_backward.default], linear(0)),
    aten.scatter_add.default: jointly(0, 2),
}
"""``scatter`` is not linear: it is not determined which of several values of one place stays."""


@define(
    *(aten.cumsum.default, aten.cumprod.default, aten.cummax.default, aten.cummin.default, aten.logcumsumexp.default),
    *(aten.sort.default, aten.sort.stable, aten.topk.default, aten.kthvalue.default, aten.median.dim),
    *(aten.max.dim, aten.min.dim, aten.all.dim, aten.any.dim, aten.prod.dim_int),
    *(aten.var.correction, aten.std.correction, aten.var_mean.correction, aten.linalg_vector_norm.default),
    *(aten.flip.default, aten.roll.default, aten.glu.default, aten.glu_backward.default),
)
def _along(typing: Typing, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    """Along what the operation calls ``dim`` or ``dims``; all dimensions if that is not given."""
    schema: Any = node.target
    for position, argument in enumerate(schema._schema.arguments):
        if argument.name in ("dim", "dims"):
            given = args[position] if position < len(args) else kwargs.get(argument.name, argument.default_value)
            dims = [given] if isinstance(given, int) else given or range(len(args[0].dims))
            return _needing(typing, node, dims, args, kwargs)
    raise UntypedError(f"{node.target} does not say along which dimension it goes")


@define(
    *(aten.tril.default, aten.triu.default, aten.max_pool2d_with_indices.default, aten.avg_pool2d.default),
    *(aten.max_pool2d_with_indices_backward.default, aten.avg_pool2d_backward.default),
    *(aten._adaptive_avg_pool2d.default, aten._adaptive_avg_pool2d_backward.default),
)
def _of_matrices(typing: Typing, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    """Each matrix, or image, by itself."""
    return _needing(typing, node, [-2, -1], args, kwargs)


@define(aten.scatter.src, aten.scatter.value, aten.scatter_add.default)
def _scatter(typing: Typing, node: fx.Node, held: Held, dim: int, index: Held, put: Any, **kwargs: Any) -> Held:
    """Values put, or added, at places of a dimension."""
    rest = [k for k in range(len(held.dims)) if k != dim % len(held.dims)]
    for other in (index, put):
        if isinstance(other, Held) and any(other.shape[k] != held.shape[k] for k in rest):
            raise UntypedError("places are given for some of the rows alone")
    result: Held = _needing(typing, node, [dim], (held, dim, index, put), kwargs)
    return result


def _needing(typing: Typing, node: fx.Node, dims: Iterable[int], args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """An operation on tensors of one rank each, which needs these dimensions of all whole."""
    tensors = [each for each in args if isinstance(each, Held)]
    constants = [None if isinstance(each, Held) else each for each in args]
    rank = len(tensors[0].dims)
    over = {dim % rank for dim in dims} if rank else set()
    labels: list[Label] = [None if k in over else f"d{k}" for k in range(rank)]
    value = node.meta["val"]
    results: list[list[Label]] = []
    for each in [value] if isinstance(value, torch.Tensor) else value:
        kept = labels if each.dim() == rank else [label for label in labels if label is not None]
        results.append([size if label is None else label for label, size in zip(kept, each.shape, strict=True)])
    made_by = Rule([labels] * len(tensors), results, linear=_LINEAR.get(node.target, ()))
    made = apply(typing.terms, node.target, tensors, [constants, dict(kwargs)], made_by)
    return made[0] if isinstance(value, torch.Tensor) else made


@define(aten.logsumexp.default)
def _logsumexp(typing: Typing, node: fx.Node, held: Held, dims: Sequence[int], keep: bool = False) -> Held:
    """As a term what it says, which is known not to depend on what is subtracted first."""
    exponentials = pointwise(typing.terms, aten.exp.default, (held,), {})
    return pointwise(typing.terms, aten.log.default, (summed(typing, exponentials, dims, keep),), {})


# -- norms of groups of channels -------------------------------------------------------------------------------


@rule(aten.native_group_norm.default)
def _group_norm(
    held: Held, weight: Held | None, bias: Held | None, _: int, channels: int, places: int, groups: int, epsilon: float
) -> Ruled:
    """Each image by itself."""
    parameters = [each for each in (weight, bias) if each is not None]
    images: list[Label] = ["n", *[None] * (len(held.dims) - 1)]
    operands: list[list[Label]] = [images, [None], [None]]
    results: list[list[Label]] = [["n", *held.shape[1:]], ["n", groups], ["n", groups]]
    constants = [weight is None, bias is None, channels, places, groups, epsilon]
    return [held, *parameters], constants, Rule(operands[: 1 + len(parameters)], results)


@rule(aten.native_group_norm_backward.default)
def _group_norm_backward(
    gradient: Held,
    held: Held,
    mean: Held,
    rstd: Held,
    weight: Held | None,
    _: int,
    channels: int,
    places: int,
    groups: int,
    *wanted: Any,
) -> Ruled:
    """Of each image by itself; those of weights are sums over images."""
    images: list[Label] = ["n", *[None] * (len(held.dims) - 1)]
    tensors = [gradient, held, mean, rstd, *([] if weight is None else [weight])]
    operands: list[list[Label]] = [images, images, ["n", None], ["n", None], [None]]
    results: list[list[Label]] = [["n", *held.shape[1:]], [channels], [channels]]
    made = Rule(operands[: len(tensors)], results, {"n": "sum"}, linear(0))
    return tensors, [weight is None, channels, places, groups], made
