"""Operations by labels: which dimensions of operands and results run together, as in Einstein's notation.

A dimension of ranks' coordinates goes through an operation if its label is one that the operation treats element by
element, or that it sums over, and all operands with the label are divided alike.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from shardgraph.proof.aligned import aligned
from shardgraph.proof.arranged import unarranged
from shardgraph.proof.held import Held, MixedError, UntypedError, divided, of_term, patterns, through, whole_size
from shardgraph.proof.reordered import reorderings
from shardgraph.proof.terms import Terms, View, repeated, repeats

Label = str | int | None
"""None: a dimension that the operation needs whole. A number: one of a result that has this size on every rank."""

Pattern = tuple[tuple[str, int, str | None], ...]
"""How a whole dimension is divided: see :func:`shardgraph.proof.held.patterns`."""


@dataclass(frozen=True)
class Rule:
    """``operands`` and ``results`` have a label for each dimension.

    ``reduced`` are the labels that a result has not, with the operation by which ranks' results are combined. An
    operation is linear in each set of operands in ``linear``: in all of a set together. ``divisions`` say how labels
    that only results have are divided.
    """

    operands: Sequence[Sequence[Label]]
    results: Sequence[Sequence[Label]]
    reduced: Mapping[str, str] = field(default_factory=dict)
    linear: Sequence[frozenset[int]] = ()
    divisions: Mapping[str, Pattern] = field(default_factory=dict)


@dataclass(frozen=True)
class Whole:
    """One result, of ``sizes``, of an operation on whole values, which no rank need have."""

    operation: Any
    index: int
    operands: Sequence[View]
    constants: Any
    rule: Rule
    sizes: Sequence[int]


Lemma = Callable[[Terms, Whole], View | None]
LEMMAS: list[Lemma] = []
"""What operations on certain terms are equal to; None where a lemma has nothing to say. The first one decides."""


def lemma(function: Lemma) -> Lemma:
    """Register a lemma."""
    LEMMAS.append(function)
    return function


def result(terms: Terms, made: Whole) -> View:
    """The result of an operation on whole values, by the lemmas; a term of its own if none applies."""
    for each in LEMMAS:
        found = each(terms, made)
        if found is not None:
            return found
    term = terms.make((made.operation, made.index), [made.operands, made.constants], made.sizes)
    return of_term(term).view


def linear(*positions: int) -> tuple[frozenset[int], ...]:
    """Linear in each of these operands alone."""
    return tuple(frozenset({position}) for position in positions)


def jointly(*positions: int) -> tuple[frozenset[int], ...]:
    """Linear in these operands together."""
    return (frozenset(positions),)


def apply(terms: Terms, operation: Any, tensors: Sequence[Held], constants: Any, rule: Rule) -> list[Held]:
    """The results of an operation on what ranks hold.

    Raises:
        UntypedError: the ranks' results are not parts, or summands, of the whole operation's.
    """
    again = _repeated_along(tensors, rule)
    tensors = [_once(lifted(terms, each), own, again) for each, own in zip(tensors, rule.operands, strict=True)]
    # Where a result is put together of operands, their elements have places in it.
    orders = [] if rule.divisions else reorderings(tensors, rule.operands, rule.results)
    for order in orders:
        tensors = [order.of(each, labels) for each, labels in zip(tensors, rule.operands, strict=True)]
    pattern = _patterns(tensors, rule) | rule.divisions
    factor, tensors = _pulled(tensors, rule)
    _same_batches(tensors, pattern)
    _check_axes(tensors, {label: own for label, own in pattern.items() if _kept(label, rule)})
    operands = [_whole(each, labels, pattern) for each, labels in zip(tensors, rule.operands, strict=True)]
    results = []
    for index, labels in enumerate(rule.results):
        if not rule.divisions:
            _check_kept(pattern, {*labels, *rule.reduced})
        summed, reduced = _reduced(pattern, {label: how for label, how in rule.reduced.items() if label not in labels})
        partial = reduced | _partial(tensors, rule, {axis for axis, _ in reduced})
        sizes = [_size(pattern, label) for label in labels]
        view = result(terms, Whole(operation, index, operands, constants, rule, sizes))
        own = [(("own", size, None),) for size in sizes]
        dims = [divided(k, pattern.get(label, own[k])) for k, label in enumerate(labels)]
        seen = through(dims, view.dims)
        for order in orders:
            seen = order.back(seen, labels)
        wide = [repeated(again[label]) if label in again else dim for label, dim in zip(labels, seen, strict=True)]
        made = Held(view.term, factor * view.factor, tuple(wide), partial, summed)
        _check_batches(made)
        check_summands(made, {axis for dim in dims for atom in dim if (axis := atom.axis) is not None})
        results.append(made)
    return results


def _repeated_along(tensors: Sequence[Held], rule: Rule) -> dict[Label, int]:
    """The sizes of labels along which all operands repeat, so that results do."""
    sizes: dict[Label, int] = {}
    varying: set[Label] = {None, *rule.reduced}
    for tensor, labels in zip(tensors, rule.operands, strict=True):
        for dim, label, size in zip(tensor.dims, labels, tensor.shape, strict=True):
            if repeats(dim):
                sizes[label] = max(size, sizes.get(label, 1))
            else:
                varying.add(label)
    return {label: size for label, size in sizes.items() if label not in varying}


def _once(held: Held, labels: Sequence[Label], again: Mapping[Label, int]) -> Held:
    return held.with_dims([() if label in again else dim for dim, label in zip(held.dims, labels, strict=True)])


def _whole(held: Held, labels: Sequence[Label], pattern: Mapping[Any, Pattern]) -> View:
    """The whole operand; one that repeats along a dimension repeats as often as the others have elements there."""
    view = unarranged(held.view)
    dims = [
        repeated(whole_size(pattern[label])) if label is not None and repeats(dim) else dim
        for label, dim in zip(labels, view.dims, strict=True)
    ]
    return replace(view, dims=tuple(dims))


def elementwise(
    terms: Terms, operation: Any, tensors: Sequence[Held], constants: Any, linear_in: Sequence[frozenset[int]] = ()
) -> Held:
    """An operation of the elements at one place of all operands, which broadcast."""
    rank = max((len(each.dims) for each in tensors), default=0)
    wide = aligned([each.with_dims([*[()] * (rank - len(each.dims)), *each.dims]) for each in tensors])
    labels: list[Label] = [f"d{k}" for k in range(rank)]
    (result,) = apply(terms, operation, wide, constants, Rule([labels] * len(wide), [labels], linear=linear_in))
    return result


def lifted(terms: Terms, held: Held) -> Held:
    """A sum over batches as a term of its own, for operations that are not linear in it."""
    if held.uneven is not None:
        raise UntypedError("ranks hold unequal numbers of its rows")
    if not held.summed:
        return held
    view = of_term(held.term).view
    term = terms.make("sum over batches", [view, sorted(held.summed)], held.term.shape, fixed=held.summed)
    return replace(held, term=term, summed=frozenset())


def _patterns(tensors: Sequence[Held], rule: Rule) -> dict[Any, Pattern]:
    found: dict[Any, Pattern] = {}
    loose: dict[Any, int] = {}
    for tensor, labels in zip(tensors, rule.operands, strict=True):
        for dim, label in zip(tensor.dims, labels, strict=True):
            pattern = patterns(dim)
            if label is None:
                if any(kind != "own" for kind, _, _ in pattern):
                    raise MixedError(f"a dimension that the operation needs whole is divided: {_written(pattern)}")
            elif repeats(dim):
                loose[label] = whole_size(pattern)
            elif found.setdefault(label, pattern) != pattern:
                raise UntypedError(f"operands are divided unlike: {_written(found[label])} and {_written(pattern)}")
    for label, size in loose.items():
        if label not in found:
            found[label] = (("own", size, None),) if size > 1 else ()
        elif size not in (1, _local(found[label])):
            raise UntypedError(f"operands have {size} and {_local(found[label])} elements along one dimension")
    return found


def _local(pattern: Pattern) -> int:
    return whole_size([each for each in pattern if each[0] == "own"])


def _size(pattern: Mapping[Any, Pattern], label: Label) -> int:
    return label if isinstance(label, int) else whole_size(pattern[label]) if label in pattern else 1


def _reduced(
    pattern: Mapping[Any, Pattern], over: Mapping[str, str]
) -> tuple[frozenset[str], frozenset[tuple[str, str]]]:
    """The batches summed over, and the axes along which a result is partial."""
    summed, partial = set(), set()
    for label, how in over.items():
        for kind, _, axis in pattern.get(label, ()):
            if kind == "batch":
                if how != "sum":
                    raise UntypedError(f"a {how} is taken over batches")
                summed.add(axis)
            elif kind == "mark":
                partial.add((axis, how))
    return frozenset(summed), frozenset(partial)


def _pulled(tensors: Sequence[Held], rule: Rule) -> tuple[float, list[Held]]:
    """Factors in which the operation is linear, and operands without them; 0 where all that it is linear in is."""
    factor, without = 1.0, list(tensors)
    for together in rule.linear:
        if not any(without[position].factor for position in together):
            factor = 0.0
        factors = {without[position].factor for position in together if without[position].factor}
        if len(factors) == 1:
            (own,) = factors
            factor *= own
            for position in together:
                each = without[position]
                without[position] = replace(each, factor=each.factor / own)
    return factor, without


def _partial(tensors: Sequence[Held], rule: Rule, reduced: set[str]) -> frozenset[tuple[str, str]]:
    partial: set[tuple[str, str]] = set()
    for axis, how in frozenset().union(*(tensor.partial for tensor in tensors)):
        those = {position for position, tensor in enumerate(tensors) if (axis, how) in tensor.partial}
        zeros = {position for position, tensor in enumerate(tensors) if not tensor.factor}
        if how != "sum" or axis in reduced or not any(those <= set(each) <= those | zeros for each in rule.linear):
            raise MixedError(f"it is not linear in a value that is partial along {axis!r}")
        partial.add((axis, how))
    return frozenset(partial)


def _check_axes(tensors: Sequence[Held], pattern: Mapping[Any, Pattern]) -> None:
    """A rank has one coordinate along an axis, so along two dimensions together it has only a diagonal of blocks."""
    places = [(kind, axis) for each in pattern.values() for kind, _, axis in each if axis is not None]
    summands = {axis for tensor in tensors for axis, _ in tensor.partial}
    for kind, axis in places:
        if places.count((kind, axis)) > 1:
            raise MixedError(f"a rank has its part of two dimensions, not the elements of others' parts along {axis!r}")
        if kind == "mark" and axis in summands:
            raise MixedError(f"ranks have parts of one operand and summands of another along {axis!r}")


def _check_batches(made: Held) -> None:
    """Of its own batch alone a rank has no part that others lack the rest of, and no summand."""
    for axis in made.batches & {*made.marks, *(axis for axis, _ in made.partial)}:
        raise MixedError(f"ranks along {axis!r} have parts or summands, each of its own batch")


def check_summands(made: Held, axes: Collection[str]) -> None:
    """Where a result does not differ along axes any more, summands of it still do."""
    if made.partial and not all(map(made.on, axes)):
        raise UntypedError("ranks have unequal summands of what they all have")


def _check_kept(pattern: Mapping[Any, Pattern], kept: Collection[Label]) -> None:
    for label, own in pattern.items():
        if label not in kept and any(kind != "own" for kind, _, _ in own):
            raise MixedError(f"a result lacks a dimension that is divided: {_written(own)}")


def _same_batches(tensors: Sequence[Held], pattern: Mapping[str, Pattern]) -> None:
    here = {axis for each in pattern.values() for kind, _, axis in each if kind == "batch"}
    for tensor in tensors:
        if here & tensor.batches:
            raise UntypedError("one operand has all ranks' batches and another its own")


def _kept(label: Label, rule: Rule) -> bool:
    """Whether a result is divided, or partial, as the label is."""
    return label in rule.reduced or any(label in labels for labels in rule.results)


def _written(pattern: Pattern) -> str:
    return " x ".join(f"{size}{f' along {axis}' if axis else ''}" for _, size, axis in pattern) or "1"
