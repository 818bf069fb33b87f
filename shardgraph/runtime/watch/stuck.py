"""Whether ranks that wait can still go on, from what each of them says that it waits for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from shardgraph.runtime.watch.wording import named

STILL = 6.0  # seconds after which what does not move is stalled


@dataclass(frozen=True)
class Status:
    """What a rank waits for, which has been at one place for some seconds.

    ``members`` are the ranks of the ``group`` whose collective it waits for and ``counts`` how many collectives of each
    group it has started; or ``absent`` are the ranks that it waits for at an agreement. ``run`` is the number of the
    graph that it is in: ranks in the same one may wait for different collectives of it, which are in flight together.
    A ``message`` is between two of the ``members``; where there are any, counts say nothing, and ``group`` is empty.
    Those of a pipeline are in its steps alone: ``beside`` is its group for a collective outside of them, and ``counts``
    has those collectives while the rank is in no step. For ``still`` seconds nothing of it has moved. With ``computes``
    its main thread does not wait, but one that writes a checkpoint.
    """

    text: str
    operation: str = ""
    group: str = ""
    members: tuple[int, ...] = ()
    absent: tuple[int, ...] = ()
    run: int | None = None
    message: bool = False
    counts: Mapping[str, int] = field(default_factory=dict)
    beside: str = ""
    still: float = 0.0
    computes: bool = False


def verdict(waiting: Mapping[int, Status]) -> str | None:
    """Why these ranks will never go on, or None if they may."""
    return _mismatch(waiting) or _circle(waiting) or _stalled(waiting)


def _mismatch(waiting: Mapping[int, Status]) -> str | None:
    """Two ranks that wait for different collectives of one group, the same by number."""
    for rank, one in waiting.items():
        for other_rank, other in waiting.items():
            if rank < other_rank and other_rank in one.members and rank in other.members and one.group == other.group:
                same = one.counts.get(one.group) == other.counts.get(one.group)
                together = one.run is not None and one.run == other.run
                both = one.message and other.message  # the one may send what the other receives
                if same and one.operation != other.operation and not together and not both:
                    return (
                        f"the ranks communicate different things: rank {rank} is in {one.text}; "
                        f"rank {other_rank} is in {other.text}"
                    )
    return None


def _circle(waiting: Mapping[int, Status]) -> str | None:
    """Ranks of which each waits for the next, and the last for the first."""
    waiting = {rank: one for rank, one in waiting.items() if not one.computes}
    for start in waiting:
        path = [start]
        while (after := _waited_for(path[-1], waiting)) is not None:
            if after in path:
                circle = sorted(path[path.index(after) :])
                places = "; ".join(f"rank {rank} is in {waiting[rank].text}" for rank in circle)
                return f"the ranks wait for each other, and none can go on: {places}"
            path.append(after)
    return None


def _stalled(waiting: Mapping[int, Status]) -> str | None:
    """Ranks that wait for nobody but each other, and on none of which anything moves."""
    others = {rank: set(one.absent or one.members) for rank, one in waiting.items() if one.still >= STILL}
    closed = {rank for rank, awaited in others.items() if awaited}
    while outside := {rank for rank in closed if not others[rank] <= closed | {rank}}:
        closed -= outside
    if not closed:
        return None
    by_place: dict[str, list[int]] = {}
    for rank in sorted(closed):
        by_place.setdefault(waiting[rank].text, []).append(rank)
    places = "; ".join(f"{named(ranks)} {'are' if ranks[1:] else 'is'} in {text}" for text, ranks in by_place.items())
    return f"nothing moves any more between {named(sorted(closed))}: their connections are stalled: {places}"


def _waited_for(rank: int, waiting: Mapping[int, Status]) -> int | None:
    """Another waiting rank without which this one cannot go on."""
    one = waiting[rank]
    for other in one.absent or one.members:
        if other != rank and other in waiting:
            theirs = waiting[other]
            if one.absent or _is_behind(theirs, one, one.group) or _is_behind(theirs, one, one.beside):
                return other
    return None


def _is_behind(theirs: Status, one: Status, group: str) -> bool:
    """Whether they have not started the collective of ``group`` that this rank waits for."""
    return group in theirs.counts and theirs.counts[group] < one.counts.get(group, 0)
