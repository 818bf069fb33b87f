"""Which rank owns which parameter."""

from __future__ import annotations

from collections.abc import Sequence


def balanced_owners(sizes: Sequence[int], loads: list[int]) -> list[int]:
    """The owner of each item, so that ranks own about as many elements; ``loads`` are what they own so far, updated.

    The largest item goes to the rank that owns least, then the next one (Graham, 1969: the most that a rank owns is at
    most 4/3 of the best possible). The same on every rank.
    """
    owners = [0] * len(sizes)
    for item in sorted(range(len(sizes)), key=lambda i: -sizes[i]):
        owners[item] = loads.index(min(loads))
        loads[owners[item]] += sizes[item]
    return owners
