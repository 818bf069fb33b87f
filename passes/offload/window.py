"""When copies start and are awaited, so that at most a window of bytes is on the device because of them.

In forward an offloaded value stays on the device until its copy to the host is done; in backward it is there from the
start of its copy back. A larger window gives a copy more time to overlap with computation. In both directions one copy
is in flight ahead of the awaited one, however large it is.
"""

from __future__ import annotations

from collections.abc import Sequence


def staying(sizes: Sequence[int], window: int) -> int:
    """How many values, in the order of first use in backward, need not leave the device: a window's worth."""
    total, count = 0, 0
    for size in sizes:
        total += size
        if total > window and count:
            break
        count += 1
    return count


def awaited(sizes: Sequence[int], moves: Sequence[bool], window: int) -> list[int]:
    """For each value, in the order of last use in forward, the index of the value after whose last use it is awaited.

    This matters for values that ``moves``; the others stay on the device and take their part of the window, in bytes.
    """
    found = list(range(len(sizes)))
    under_way: list[int] = []
    behind = 0
    for i, (size, goes) in enumerate(zip(sizes, moves, strict=True)):
        behind += size
        under_way += [i] if goes else []
        while behind > window and under_way and under_way[0] < i:
            oldest = under_way.pop(0)
            found[oldest] = i
            behind -= sizes[oldest]
    for left in under_way:
        found[left] = len(sizes) - 1
    return found


def started(sizes: Sequence[int], window: int) -> list[int]:
    """For each value, in the order of first use in backward, the index of the value at whose first use its copy starts.

    -1 is the beginning of backward.
    """
    found: list[int] = []
    ahead = 0
    for arrived in range(-1, len(sizes)):
        if arrived >= 0:
            ahead -= sizes[arrived]
        while len(found) < len(sizes) and (len(found) == arrived + 1 or ahead + sizes[len(found)] <= window):
            ahead += sizes[len(found)]
            found.append(arrived)
    return found
