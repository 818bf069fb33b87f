"""Ring attention: attention to the keys of one rank after another's is attention to all of them.

Of keys and values that are sent round a ring a rank has those of the rank so many places before it. Softmax over the
keys of some ranks, merged with that over the keys of others by their log-sum-exp, is softmax over both (Milakov and
Gimelshein, 2018, https://arxiv.org/abs/1805.02867). Gradients are sums over the keys, or over the queries, of all
ranks.

Under a causal mask, of striped sequences (rank ``r`` of ``n`` has the tokens ``r``, ``n + r``, ``2n + r``), a query
sees of an earlier rank's keys those up to its own place; of a later rank's, those before it (Brandon et al., 2023,
https://arxiv.org/abs/2311.09431).
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.ir import fused
from shardgraph.proof.aligned import placed
from shardgraph.proof.attention import attention, attention_backward
from shardgraph.proof.collectives import Ranks, exchange
from shardgraph.proof.definitions import DEFINED, Typing, define
from shardgraph.proof.held import Held, UntypedError, patterns, tidy
from shardgraph.proof.labels import apply
from shardgraph.proof.moves import MOVES
from shardgraph.proof.of_rank import OfRank, depends, known
from shardgraph.proof.rules import RULES, pointwise
from shardgraph.proof.shards import arranged_part, part
from shardgraph.proof.terms import Terms, joined
from shardgraph.torch_api import pytree

aten = torch.ops.aten

_ROWS = 2  # the dimension of positions in [batch, heads, positions, width]
_ROW = "row"  # the label of queries, each by itself
_ALL = 2**63 - 1


# -- what travels ----------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Elsewhere(OfRank):
    """What the rank ``back`` places before this one on the ring of ``axis`` has of ``value``.

    With ``of``, only the sum of what the ranks these numbers of places before this one add to it.
    """

    value: Held
    axis: str
    back: int
    of: frozenset[int] | None = None


def _arrived(made: Elsewhere, ranks: int) -> Held | Elsewhere:
    """The value itself, if it is this rank's and nothing is missing in it."""
    complete = made.of is None or len(made.of) == ranks
    return made.value if complete and not made.back else made


@exchange(ir.send)
def _send(terms: Terms, ranks: Ranks, held: Held, axis: str) -> Held | Elsewhere:
    if held.partial or held.uneven or axis in held.batches:
        raise UntypedError("summands, unequal rows, or batches are sent")
    return Elsewhere(held, axis, 1) if axis in held.marks else held


@known(ir.send)
def _send_on(typing: Typing, node: fx.Node, sent: Any, axis: str) -> Held | Elsewhere | None:
    if not isinstance(sent, Elsewhere) or sent.axis != axis:
        return None
    ranks = typing.ranks(axis)
    of = None if sent.of is None else frozenset((each + 1) % ranks for each in sent.of)
    return _arrived(replace(sent, back=(sent.back + 1) % ranks, of=of), ranks)


@known(*MOVES, aten.cat.default, aten.split_with_sizes.default, aten.slice.Tensor, aten._to_copy.default)
def _moved(typing: Typing, node: fx.Node, *args: Any, **kwargs: Any) -> Any:
    """What moves elements of one rank moves those that another one had likewise."""
    held = [each for each in pytree.tree_leaves((args, kwargs)) if isinstance(each, (Held, OfRank))]
    first = held[0]
    if not isinstance(first, Elsewhere):
        return None
    if not all(isinstance(each, Elsewhere) and replace(each, value=first.value) == first for each in held):
        return None
    args, kwargs = pytree.tree_map_only(Elsewhere, lambda each: each.value, (args, kwargs))
    target: Any = node.target
    made = MOVES[target](*args, **kwargs) if target in MOVES else DEFINED[target](typing, node, *args, **kwargs)
    if first.of is not None and target is aten._to_copy.default and made is not args[0]:
        raise UntypedError("summands are rounded to integers")
    return pytree.tree_map_only(Held, lambda value: replace(first, value=value.with_dims(tidy(value.dims))), made)


@known(operator.getitem)
def _item(typing: Typing, node: fx.Node, values: Sequence[Any], index: int) -> Any:
    return values[index]


@known(aten.add.Tensor)
def _more(typing: Typing, node: fx.Node, one: Any, other: Any) -> Held | Elsewhere | None:
    """The sum of what some ranks add, and others."""
    if not isinstance(one, Elsewhere) or not isinstance(other, Elsewhere) or one.of is None or other.of is None:
        return None
    if (one.value, one.axis, one.back) != (other.value, other.axis, other.back) or one.of & other.of:
        return None
    return _arrived(replace(one, of=one.of | other.of), typing.ranks(one.axis))


# -- which part of the keys a rank sees ------------------------------------------------------------------------


@dataclass(frozen=True)
class Later(OfRank):
    """1 if the rank ``back`` places before this one on the ring is a later one, else 0."""

    back: int
    axis: str


@dataclass(frozen=True)
class Fewer(OfRank):
    """``size``, less 1 if the rank is a later one."""

    size: int
    later: Later


@dataclass(frozen=True)
class Cut(OfRank):
    """``value`` without its first position, or without its last, on ranks where ``later`` is 1."""

    value: Any
    later: Later
    first: bool


@dataclass(frozen=True)
class Columns(OfRank):
    """Of a value that a rank has some rows of, those elements of another dimension that a rank's keys have.

    That is its part of each of ``blocks`` blocks of ``dim``; of the rank ``back`` places before this one.
    """

    value: Held
    dim: int
    blocks: int
    axis: str
    back: int


@define(ir.from_later)
def _later(typing: Typing, node: fx.Node, back: int, axis: str) -> Later:
    return Later(back, axis)


@known(operator.sub)
def _fewer(typing: Typing, node: fx.Node, size: Any, later: Any) -> Fewer | None:
    return Fewer(size, later) if isinstance(size, int) and isinstance(later, Later) else None


@known(aten.slice.Tensor)
def _cut(typing: Typing, node: fx.Node, value: Any, dim: int, start: Any, end: Any) -> Cut | None:
    held = value.value if isinstance(value, Elsewhere) else value
    if not isinstance(held, Held) or dim != _ROWS:
        return None
    if isinstance(start, Later) and end == _ALL:
        return Cut(value, start, first=True)
    if start == 0 and isinstance(end, Fewer) and end.size == held.shape[dim]:
        return Cut(value, end.later, first=False)
    return None


@exchange(ir.local_part)
def _part(
    terms: Terms, ranks: Ranks, held: Held, dim: int, blocks: int, axis: str, back: int = 0
) -> Held | Columns | Elsewhere:
    """This rank's part of every block, or another rank's."""
    mark, size = held.marks.get(axis), ranks(axis)
    if mark is not None and mark not in held.dims[dim]:
        return Columns(held, dim, blocks, axis, back % size)
    own = arranged_part(terms, held, dim, blocks, axis, size)
    return Elsewhere(own, axis, back % size) if back % size and axis in own.marks else own


# -- attention to the keys of one rank -------------------------------------------------------------------------


@dataclass(frozen=True)
class Ring:
    """Attention of a rank's queries to the keys of all ranks: its output and log-sum-exp.

    ``highest`` is the highest number in the mask of a query; ``columns`` is whether the mask differs between keys.
    """

    out: Held
    logarithm: Held
    axis: str
    highest: Held | None
    columns: bool


@dataclass(frozen=True)
class Seen(OfRank):
    """Output 0, or log-sum-exp 1, of attention to the keys of the ranks these numbers of places before.

    ``blind``: for queries that see none of these keys it is not yet 0, or minus infinity.
    """

    ring: Ring
    index: int
    of: frozenset[int]
    blind: bool = False


@dataclass(frozen=True)
class Operands:
    """The operands of attention to the keys of the rank ``back`` places before, and those of attention to all keys."""

    query: Held
    key: Held
    value: Held
    mask: Held | None
    others: tuple[Held, ...]  # that have a query's positions: its gradient, output and log-sum-exp
    axis: str
    back: int
    later: Later | None
    blocks: int  # in which positions are divided, each among all ranks


@define(fused.ATTENTION)
@known(fused.ATTENTION)
def _attention(
    typing: Typing, node: fx.Node, query: Any, key: Any, value: Any, mask: Any, causal: bool, scale: float
) -> list[Any] | None:
    made = _operands(typing, query, key, value, mask, causal, ())
    if made is None:
        if depends((query, key, value, mask), {}):
            return None
        return attention(typing, query, key, value, mask, causal, scale, None if causal else _ROW)
    if mask is not None and not node.args[3].meta["val"].is_floating_point():
        raise UntypedError("a mask that is not added to scores has no lowest number")
    out, logarithm = attention(typing, made.query, made.key, made.value, made.mask, causal, scale, _ROW)
    highest = None if made.mask is None else _highest(typing, made.mask)
    columns = made.mask is not None and bool(made.mask.dims[-1])
    ring = Ring(out, logarithm, made.axis, highest, columns)
    results = (Seen(ring, index, frozenset({made.back}), mask is not None) for index in range(2))
    return [_shortened(each, made.later, first=True) for each in results]


@define(fused.ATTENTION_BACKWARD)
@known(fused.ATTENTION_BACKWARD)
def _attention_backward(typing: Typing, node: fx.Node, *args: Any) -> list[Any] | None:
    gradient, query, key, value, out, logarithm, mask, causal, scale = args
    made = _operands(typing, query, key, value, mask, causal, (gradient, out, logarithm))
    if made is None:
        if depends(args, {}):
            return None
        operands = gradient, query, key, value, out, logarithm, mask
        return attention_backward(typing, *operands, causal, scale, None if causal else _ROW)
    gradient, out, logarithm = made.others
    operands = gradient, made.query, made.key, made.value, out, logarithm, made.mask
    of_query, *of_pair = attention_backward(typing, *operands, causal, scale, _ROW)
    of_queries = Elsewhere(of_query, made.axis, 0, frozenset({made.back}))
    gradients = [_shortened(of_queries, made.later, first=True)]
    for each in of_pair:  # the sum over all ranks' queries, of which this rank adds its own
        together = replace(each, partial=each.partial - {(made.axis, "sum")})
        own = part(together, _ROWS, made.blocks, made.axis, typing.ranks(made.axis))
        gradients.append(_shortened(Elsewhere(own, made.axis, made.back, frozenset({0})), made.later, first=False))
    return gradients


def _operands(
    typing: Typing, query: Any, key: Any, value: Any, mask: Any, causal: bool, others: Sequence[Any]
) -> Operands | None:
    """The operands, if keys and values are those of one rank; None if they are all.

    Raises:
        UntypedError: they do not belong together.
    """
    rows, pair = [_uncut(each, True) for each in (query, *others)], [_uncut(each, False) for each in (key, value)]
    queries, keys = [each for each, _ in rows], [each for each, _ in pair]
    here = [each.value if isinstance(each, Elsewhere) else each for each in keys]
    if not all(isinstance(each, Held) for each in (*queries, *here)):
        return None
    here = [_with_marks_of(queries[0], each) for each in here]
    axes = {atom.axis for atom in here[0].dims[_ROWS] if atom.axis is not None}
    if not axes:
        return None
    axis, pattern = axes.pop(), patterns(here[0].dims[_ROWS])
    (back, later), *rest = {(_back(each, axis), later) for each, later in pair}
    if axes or rest or {later} != {each for _, each in rows} or patterns(here[1].dims[_ROWS]) != pattern:
        raise UntypedError("queries, keys and values are not those of the same ranks")
    if axis not in {atom.axis for atom in queries[0].dims[_ROWS]}:
        raise UntypedError(f"all ranks along {axis!r} have the same queries, and unlike keys")
    if causal and (patterns(queries[0].dims[_ROWS]) != pattern or pattern[-1][0] != "mark" or mask is not None):
        raise UntypedError("under a causal mask ranks have sequences that are not divided in stripes")
    if later != (Later(back, axis) if causal and back else None):
        raise UntypedError("a rank's queries do not see the keys that they are to see of another rank's")
    blocks = math.prod(size for _, size, _ in pattern[: [kind for kind, _, _ in pattern].index("mark")])
    of_all = mask if mask is None else _of_all_keys(mask, axis, back, blocks, pattern)
    whole_key, whole_value = (_whole(each, _ROWS) for each in here)
    return Operands(queries[0], whole_key, whole_value, of_all, tuple(queries[1:]), axis, back, later, blocks)


def _with_marks_of(queries: Held, pair: Held) -> Held:
    """Keys or values with ranks' coordinates at the same batches and heads."""
    for dim, digits in enumerate(queries.dims[:_ROWS]):
        for axis in (atom.axis for atom in digits if atom.axis is not None):
            pair = placed(pair, axis, dim)
    return pair


def _uncut(value: Any, first: bool) -> tuple[Any, Later | None]:
    if not isinstance(value, Cut):
        return value, None
    if value.first != first:
        raise UntypedError("the first keys, or the last queries, are left out")
    return value.value, value.later


def _back(value: Held | Elsewhere, axis: str) -> int:
    if isinstance(value, Held):
        return 0
    if value.axis != axis or value.of is not None:
        raise UntypedError("keys are sums, or of another ring's ranks")
    return value.back


def _whole(held: Held, dim: int) -> Held:
    """The value with all of a dimension that ranks share."""
    dim %= len(held.dims)
    together = joined(atom._replace(axis=None) for atom in held.dims[dim])
    return held.with_dims([*held.dims[:dim], together, *held.dims[dim + 1 :]])


def _of_all_keys(mask: Any, axis: str, back: int, blocks: int, pattern: Any) -> Held:
    """The mask of all keys, if this is the one of the rank's."""
    if isinstance(mask, Columns):
        if (mask.dim, mask.blocks, mask.axis, mask.back) == (len(mask.value.dims) - 1, blocks, axis, back):
            return mask.value
    elif isinstance(mask, Elsewhere):
        if _back(mask, axis) == back and patterns(mask.value.dims[-1]) == pattern:
            return _whole(mask.value, -1)
    elif isinstance(mask, Held):
        if all(atom.source is None for atom in mask.dims[-1]):
            return mask
        if not back and patterns(mask.dims[-1]) == pattern:
            return _whole(mask, -1)
    raise UntypedError("a mask is not that of the keys")


def _shortened(made: Seen | Elsewhere, later: Later | None, first: bool) -> OfRank:
    return made if later is None else Cut(made, later, first)


@known(aten.constant_pad_nd.default)
def _padded(typing: Typing, node: fx.Node, cut: Any, widths: Sequence[Any], fill: float = 0) -> OfRank | None:
    """Results with the position again that was cut: nothing is seen there."""
    if not isinstance(cut, Cut):
        return None
    made, later = cut.value, cut.later
    logarithm = isinstance(made, Seen) and made.index == 1
    if isinstance(made, Held) or (isinstance(made, Elsewhere) and made.of is None):
        raise UntypedError("an operand of attention is padded")
    right = [0, 0] * (0 if logarithm else 1) + ([later, 0] if cut.first else [0, later])
    if list(widths) != right or fill != (-math.inf if logarithm else 0):
        raise UntypedError("what was not seen is padded as if it were")
    return made


# -- queries that see no key -----------------------------------------------------------------------------------


@dataclass(frozen=True)
class Highest(OfRank):
    """The highest number of a mask among the keys of the rank ``back`` places before; of all keys it is ``value``."""

    value: Held
    axis: str
    back: int


@dataclass(frozen=True)
class Hidden(OfRank):
    """Whether a query sees none of the keys of the rank ``back`` places before; with a last dimension of size 1."""

    highest: Highest
    column: bool = False


@dataclass(frozen=True)
class Unseen(OfRank):
    """Whether a query sees no key at all."""

    logarithm: Seen


def _highest(typing: Typing, mask: Held) -> Held:
    (highest,) = apply(typing.terms, aten.amax.default, *RULES[aten.amax.default](mask, [-1]))
    return highest


@known(aten.amax.default)
def _highest_of_rank(
    typing: Typing, node: fx.Node, mask: Any, dims: Sequence[int] = (), keep: bool = False
) -> Highest | None:
    if list(dims) != [-1] or keep:
        return None
    if isinstance(mask, Columns) and mask.dim == len(mask.value.dims) - 1:
        return Highest(_highest(typing, mask.value), mask.axis, mask.back)
    if isinstance(mask, Elsewhere) and mask.of is None and mask.axis in {atom.axis for atom in mask.value.dims[-1]}:
        return Highest(_highest(typing, _whole(mask.value, -1)), mask.axis, mask.back)
    return None


@define(aten.eq.Scalar)
def _equals(typing: Typing, node: fx.Node, held: Held, number: float) -> Held | Hidden:
    if number == -math.inf and len(held.partial) == 1:
        ((axis, how),) = held.partial
        if how == "max":  # over this rank's keys
            return Hidden(Highest(replace(held, partial=frozenset()), axis, 0))
    return pointwise(typing.terms, node.target, (held, number), {})


@known(aten.eq.Scalar)
def _sees_nothing(typing: Typing, node: fx.Node, value: Any, number: float) -> Hidden | Unseen | None:
    if number != -math.inf:
        return None
    if isinstance(value, Highest):
        return Hidden(value)
    if isinstance(value, Seen) and value.index == 1 and len(value.of) == typing.ranks(value.ring.axis):
        return Unseen(value)
    return None


@known(aten.masked_fill.Scalar)
def _filled(typing: Typing, node: fx.Node, value: Any, mask: Any, fill: float) -> Held | Seen | None:
    if not isinstance(value, Seen):
        return None
    if isinstance(mask, Unseen):  # the kernel has 0 for them
        return value.ring.logarithm if mask.logarithm == value and fill == 0 else None
    if mask != _blind(typing, value) or fill != (-math.inf if value.index else 0):
        return None
    return replace(value, blind=False)


def _blind(typing: Typing, seen: Seen) -> Hidden | Held | None:
    """Whether a query sees none of the keys, as a mask over the value."""
    highest, column = seen.ring.highest, not seen.index
    if highest is None or len(seen.of) > 1:
        return None
    if seen.ring.columns:
        (back,) = seen.of
        return Hidden(Highest(highest, seen.ring.axis, back), column)
    hidden = pointwise(typing.terms, aten.eq.Scalar, (highest, -math.inf), {})
    return hidden.with_dims([*hidden.dims, ()]) if column else hidden


# -- attention to the keys of several ranks --------------------------------------------------------------------


@dataclass(frozen=True)
class Share(OfRank):
    """The share of the keys of ``more`` in softmax over those and the keys of ``before``, as far as it is ``written``.

    That is ``sigmoid(logarithm of more - logarithm of before)``; a query that sees none of either has any share.
    """

    ring: Ring
    more: frozenset[int]
    before: frozenset[int]
    written: tuple[Any, ...]


_WRITTEN = (aten.sub.Tensor, aten.nan_to_num.default, aten.sigmoid.default, aten.unsqueeze.default)


@known(aten.sub.Tensor)
def _difference(typing: Typing, node: fx.Node, more: Any, before: Any) -> Share | None:
    if not _apart(more, before, 1):
        return None
    return Share(more.ring, more.of, before.of, (aten.sub.Tensor,))


@known(aten.nan_to_num.default, aten.sigmoid.default, aten.unsqueeze.default)
def _written(typing: Typing, node: fx.Node, value: Any, *rest: Any) -> Share | Hidden | None:
    if isinstance(value, Hidden) and node.target is aten.unsqueeze.default:
        return replace(value, column=True) if rest == (-1,) and not value.column else None
    written = (*value.written, node.target) if isinstance(value, Share) else ()
    options = {aten.nan_to_num.default: (0.0,), aten.sigmoid.default: (), aten.unsqueeze.default: (-1,)}
    if not written or written != _WRITTEN[: len(written)] or rest != options[node.target]:
        return None
    return replace(value, written=written)


@known(aten.lerp.Tensor)
def _averaged(typing: Typing, node: fx.Node, before: Any, more: Any, share: Any) -> Held | Seen | None:
    if not _apart(more, before, 0) or share != Share(more.ring, more.of, before.of, _WRITTEN):
        return None
    of = more.of | before.of
    return more.ring.out if len(of) == typing.ranks(more.ring.axis) else replace(more, of=of)


@known(aten.logaddexp.default)
def _together(typing: Typing, node: fx.Node, one: Any, other: Any) -> Held | Seen | None:
    if not _apart(one, other, 1):
        return None
    of, ring = one.of | other.of, one.ring
    complete = len(of) == typing.ranks(ring.axis) and ring.highest is None
    return ring.logarithm if complete else replace(one, of=of)


def _apart(one: Any, other: Any, index: int) -> bool:
    """Whether these are results of one attention, to the keys of different ranks."""
    if not isinstance(one, Seen) or not isinstance(other, Seen) or one.blind or other.blind:
        return False
    return one.ring == other.ring and one.index == other.index == index and not one.of & other.of


@known(aten._to_copy.default)
def _cast(typing: Typing, node: fx.Node, value: Any, **kwargs: Any) -> Seen | None:
    """A cast among floating dtypes is numeric, which is not what is proved."""
    dtype = kwargs.get("dtype")
    return value if isinstance(value, Seen) and dtype is not None and dtype.is_floating_point else None
