"""Attention: each query by itself, or all in their order where it is causal."""

from __future__ import annotations

from shardgraph.ir import fused
from shardgraph.proof.aligned import placed
from shardgraph.proof.definitions import HasTerms, summed
from shardgraph.proof.held import Held, UntypedError
from shardgraph.proof.labels import Label, Rule, apply, linear
from shardgraph.proof.moves import expand, squeeze, unsqueeze, view


def attention(
    typing: HasTerms,
    query: Held,
    key: Held,
    value: Held,
    mask: Held | None,
    causal: bool,
    scale: float,
    positions: Label,
) -> list[Held]:
    """The output and log-sum-exp; ``positions`` is the label of queries, or None if their order matters."""
    key, value = (_with_all_heads(each, query) for each in (key, value))
    operands, tensors = _operands(query, key, value, mask, positions)
    rows: list[Label] = ["b", "h", positions or query.shape[2]]
    rule = Rule(operands, [[*rows, value.shape[3]], rows])
    return apply(typing.terms, fused.ATTENTION, tensors, [causal, scale], rule)


def attention_backward(
    typing: HasTerms,
    gradient: Held,
    query: Held,
    key: Held,
    value: Held,
    out: Held,
    logarithm: Held,
    mask: Held | None,
    causal: bool,
    scale: float,
    positions: Label,
) -> list[Held]:
    """The gradients of queries, keys and values: those of keys and values are sums over queries."""
    given = key, value
    key, value = (_with_all_heads(each, query) for each in given)
    operands, tensors = _operands(query, key, value, mask, positions)
    rows: list[Label] = ["b", "h", positions, None]
    operands = [rows, *operands[:3], rows, rows[:3], *operands[3:]]
    tensors = [gradient, *tensors[:3], out, logarithm, *tensors[3:]]
    results: list[list[Label]] = [["b", "h", *each.shape[2:]] for each in (query, key, value)]
    results[0][2] = positions or query.shape[2]
    reduced = {} if positions is None else {str(positions): "sum"}
    rule = Rule(operands, results, reduced, linear(0))
    of_query, *of_pair = apply(typing.terms, fused.ATTENTION_BACKWARD, tensors, [causal, scale], rule)
    return [of_query, *(_over_heads(typing, each, like) for each, like in zip(of_pair, given, strict=True))]


def _with_all_heads(held: Held, query: Held) -> Held:
    """Keys or values, each head as often as queries have heads for it."""
    batch, heads, *rest = held.shape
    if heads == query.shape[1]:
        return held
    if heads == 0 or query.shape[1] % heads:
        raise UntypedError(f"{query.shape[1]} heads of queries are no multiple of {heads} heads of keys")
    times = query.shape[1] // heads
    return view(expand(unsqueeze(held, 2), [batch, heads, times, *rest]), [batch, heads * times, *rest])


def _over_heads(typing: HasTerms, gradient: Held, given: Held) -> Held:
    """The gradient of keys or values as they are ``given``: ranks that have parts of these have them of the sums."""
    (batch, every, *rest), heads = gradient.shape, given.shape[1]
    if every == heads:
        return gradient
    apart = view(gradient, [batch, heads, every // heads, *rest])
    for axis in {atom.axis for atom in given.dims[1]} & apart.marks.keys():
        apart = placed(apart, axis, 1)
    return squeeze(summed(typing, apart, 2, keep=True), 2)  # as a gradient of repeated heads is summed


def _operands(
    query: Held, key: Held, value: Held, mask: Held | None, positions: Label
) -> tuple[list[list[Label]], list[Held]]:
    keys: list[Label] = ["b", "h", None, None]
    operands, tensors = [["b", "h", positions, None], keys, keys], [query, key, value]
    if mask is not None:
        labels: list[Label] = ["b", "h", positions, None][-len(mask.dims) :]
        operands.append([label if dim else None for label, dim in zip(labels, mask.dims, strict=True)])
        tensors.append(mask)
    return operands, tensors
