"""When copies start and are awaited, so that at most a window of bytes is on the device because of them.

In forward an offloaded value stays on the device until its copy to the host is done; in backward it is there from the
start of its copy back. A larger window gives a copy more time to overlap with computation. In both directions one copy
is in flight ahead of the awaited one, however large it is.
"""

from __future__ import annotations

from bisect import bisect_right
from collections import deque
from collections.abc import Sequence
from itertools import accumulate


def staying(sizes: Sequence[int], window: int) -> int:
    """How many values, in the order of first use in backward, need not leave the device: a window's worth."""
    within = bisect_right(list(accumulate(sizes)), window)
    return max(within, min(len(sizes), 1))


def awaited(sizes: Sequence[int], moves: Sequence[bool], window: int) -> list[int]:
    """For each value, in the order of last use in forward, the index of the value after whose last use it is awaited.

    This matters for values that ``moves``; the others stay on the device and take their part of the window, in bytes.
    """
    until = list(range(len(sizes)))
    in_flight: deque[int] = deque()
    behind = 0
    for i, (size, moved) in enumerate(zip(sizes, moves, strict=True)):
        behind += size
        if moved:
            in_flight.append(i)
        while behind > window and in_flight and in_flight[0] < i:
            oldest = in_flight.popleft()
            until[oldest] = i
            behind -= sizes[oldest]
    for left in in_flight:
        until[left] = len(sizes) - 1
    return until


def started(sizes: Sequence[int], window: int) -> list[int]:
    """For each value, in the order of first use in backward, the index of the value at whose first use its copy starts.

    -1 is the beginning of backward.
    """
    starts: list[int] = []
    ahead = 0
    for arrived in range(-1, len(sizes)):
        if arrived >= 0:
            ahead -= sizes[arrived]
        while len(starts) < len(sizes) and (len(starts) == arrived + 1 or ahead + sizes[len(starts)] <= window):
            ahead += sizes[len(starts)]
            starts.append(arrived)
    return starts
