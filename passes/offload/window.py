"""When copies are awaited and started, so that no more than a window of bytes lies on the device for their sake.

In forward a value that backward needs stays on the device until it is copied away, in backward it lies there from when
its copy begins. The more bytes may lie so, the more time there is for a copy while the computation goes on. Both ways
one copy is under way ahead of what is waited for, however large it is.
"""

from __future__ import annotations

from collections.abc import Sequence


def staying(sizes: Sequence[int], window: int) -> int:
    """How many of the values, in the order in which backward gets to them, need not leave the device: a window's."""
    total, count = 0, 0
    for size in sizes:
        total += size
        if total > window and count:
            break
        count += 1
    return count


def awaited(sizes: Sequence[int], moves: Sequence[bool], window: int) -> list[int]:
    """For each value, in the order in which forward is done with them, once it is done with which its copy is awaited.

    That of one that ``moves``: others stay, and take their part of the window.
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
    """For each value, in the order in which backward gets to them, when it gets to which its copy is started.

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
