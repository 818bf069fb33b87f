"""What messages have in common: how they name ranks, and a store that is not reached."""

from __future__ import annotations

from collections.abc import Sequence

from shardgraph.errors import one_line

_SHOWN = 12  # ranks of many


def named(ranks: Sequence[int]) -> str:
    """Ranks for a sentence: "rank 3", "ranks 0, 1"."""
    more = f" and {len(ranks) - _SHOWN} more" if len(ranks) > _SHOWN else ""
    return f"rank{'s' if len(ranks) > 1 else ''} {', '.join(map(str, ranks[:_SHOWN]))}{more}"


def unreachable(rank: int, at: str, how: str) -> str:
    """That ``rank``, which is ``at`` something, cannot reach the store of the process group, and ``how`` it shows."""
    return (
        f"rank {rank} cannot reach the store of the process group, at {at}: {one_line(how, 200)}. The process "
        "that serves it has ended, usually rank 0 or the launcher, or its machine is not reached: look at its output"
    )
