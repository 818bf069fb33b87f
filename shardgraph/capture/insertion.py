"""Where what further layers have goes, in a list of what two units of layers and others have."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from shardgraph.capture.stacks import UnequalLayersError


def with_copies(units: Sequence[int | None], repeats: int) -> list[tuple[int, int]]:
    """The order of a list with ``repeats`` more units than two: the position here of what each item is, or is like,
    and the number of its unit, 0 outside.

    ``units`` are 0 and 1 for items of the two units, anything else for others. Copies follow on those of the first unit
    that are in a row.
    """
    found: list[tuple[int, int]] = []
    run: list[int] = []
    for i, unit in enumerate([*units, None]):
        if unit == 0:
            run.append(i)
        elif run:
            found += [(one, number) for number in range(1, repeats + 1) for one in run]
            run = []
        found.append((i, repeats + 1 if unit == 1 else 0))
    return found[:-1]


def pairs(first: Sequence[Any], second: Sequence[Any]) -> Iterator[tuple[Any, Any]]:
    """What two units have, side by side.

    Raises:
        UnequalLayersError: one of them has more.
    """
    if len(first) != len(second):
        raise UnequalLayersError("two layers are not of one length")
    return zip(first, second, strict=True)


def in_a_row(among: Sequence[Any], paired: Iterable[tuple[Any, Any]]) -> list[list[tuple[Any, Any]]]:
    """Pairs in runs, whose first ones follow on each other and are followed by their second ones.

    Raises:
        UnequalLayersError: they are not.
    """
    position = {each: i for i, each in enumerate(among)}
    runs: list[list[tuple[Any, Any]]] = []
    for one, other in paired:
        if runs and position[runs[-1][-1][0]] + 1 == position[one]:
            runs[-1].append((one, other))
        else:
            runs.append([(one, other)])
    if any(position[other] != position[one] + len(run) for run in runs for one, other in run):
        raise UnequalLayersError("what two layers take or give is not in a row")
    return runs
