"""Which leaf of the output of a model with all layers is which one of the output of that with few."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from shardgraph.capture.record import Leaf, Record, Value
from shardgraph.capture.stacks import Stack, UnequalLayersError

Order = Sequence[tuple[int, int]]
"""For each leaf with more layers, the position of what it is, or is like, with fewer, and the number of its unit: 0 for
the first unit and outside, ``repeats`` + 1 for the second."""


class _Place(NamedTuple):
    """A leaf by its position in the output with few layers, the stack that it is of, and the number of its unit.

    It is ``copied`` if the output with few layers does not have it: of units that are left out, from number 1 on, or a
    None in place of what layers might return, of which each has a negative number.
    """

    few: int
    path: str
    number: int
    copied: bool


def orders(whole: Record, few: Record, repeated: Sequence[Stack]) -> list[Order]:
    """The leaves of the output as layers of one stack after the other are repeated.

    Raises:
        UnequalLayersError: the layers do not return what fewer of them do.
    """
    places = _places(whole, few, {stack.path: stack for stack in repeated})
    present = [place for place in places if not place.copied]
    if [place.few for place in present] != list(range(len(few.returned))):
        raise UnequalLayersError("what layers return is in another order with fewer of them")
    found: list[Order] = []
    for stack in repeated:
        before = {place: position for position, place in enumerate(present)}
        done = {each.path for each in repeated[: len(found) + 1]}
        present = [place for place in places if not place.copied or place.path in done]
        found.append([_from(place, stack, before) for place in present])
    return found


def _from(place: _Place, stack: Stack, before: Mapping[_Place, int]) -> tuple[int, int]:
    if place.path != stack.path:
        return before[place], 0
    if place.number < 0:
        return before[_Place(place.few, "", 0, copied=False)], 0
    return before[place._replace(number=0, copied=False) if place.copied else place], place.number


def _places(whole: Record, few: Record, stacks: dict[str, Stack]) -> list[_Place]:
    times: Counter[tuple[type, Leaf]] = Counter()
    known: dict[tuple[type, Leaf, int], int] = {}
    for position, leaf in enumerate(few.returned):
        times[type(leaf), leaf] += 1
        known[type(leaf), leaf, times[type(leaf), leaf]] = position
    times.clear()
    places, following = list[_Place](), 0
    for leaf in whole.returned:
        if leaf is None and None in few.returned:
            if following < len(few.returned) and few.returned[following] is None:
                places.append(_Place(following, "", 0, copied=False))
                following += 1
            else:
                places.append(_Place(few.returned.index(None), next(iter(stacks)), -len(places) - 1, copied=True))
            continue
        times[type(leaf), leaf] += 1
        like, path, number, copied = _like(leaf, whole, stacks)
        if (key := (type(leaf), like, times[type(leaf), leaf])) not in known:
            raise UnequalLayersError("the layers do not return what fewer of them do")
        places.append(_Place(known[key], path, number, copied))
        following = following if copied else known[key] + 1
    return places


def _like(leaf: Leaf, whole: Record, stacks: dict[str, Stack]) -> tuple[Leaf, str, int, bool]:
    """The leaf with few layers that one is, or is like, its stack, the number of its unit, and whether that is left
    out of the model with few."""
    path = whole.stacks[leaf.stack].path if isinstance(leaf, Value) and leaf.stack >= 0 else ""
    if not isinstance(leaf, Value) or (stack := stacks.get(path)) is None:
        return leaf, "", 0, False
    traced = next(layer for layer in range(stack.few) if leaf.number in stack.stands_for(layer))
    unit = stack.unit_of(traced)
    number = (leaf.number - traced) // stack.period if unit == 0 else stack.repeats + 1 if unit == 1 else 0
    return leaf._replace(number=traced), path, number, 0 < number <= stack.repeats
