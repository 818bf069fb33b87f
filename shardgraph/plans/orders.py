"""The pipeline schedules by name: where their stages are, the numbers that they allow, and the order of actions.

The orders are those that ``torch.distributed.pipelining`` executes, as plain data.
"""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from functools import lru_cache
from typing import cast

from shardgraph.cost_models.actions import Action, Kind, Order
from shardgraph.errors import PlanError, nearest
from shardgraph.torch_api import pipeline_actions

_ANY = "any number of microbatches"
_STAGES = "no fewer microbatches than stages"
_ROUNDS = "microbatches in equal rounds, of as many as there are ranks or a few more"


@dataclass(frozen=True)
class Schedule:
    """The requirements of a schedule.

    A rank has ``least`` to ``most`` stages. Stages are placed in a loop over the ranks, or in a ``v``, which turns back
    at the last rank, so that the first rank has the first and the last stage. ``rule`` describes the allowed numbers of
    microbatches. With ``prefetch`` a rank posts receives before it reaches the actions that need them.
    """

    torch_name: str
    least: int
    most: float
    v: bool
    rule: str
    prefetch: bool

    def allows(self, microbatches: int, ranks: int, stages: int) -> bool:
        return {
            _ANY: True,
            _STAGES: microbatches >= stages,
            _ROUNDS: microbatches % max(1, microbatches // ranks) == 0,
        }[self.rule]


SCHEDULES = {
    "gpipe": Schedule("GPipe", 1, 1, False, _ANY, False),
    "1f1b": Schedule("1F1B", 1, 1, False, _STAGES, False),
    "interleaved-1f1b": Schedule("Interleaved1F1B", 2, math.inf, False, _ROUNDS, True),
    "looped-bfs": Schedule("LoopedBFS", 2, math.inf, False, _ANY, True),
    "interleaved-zero-bubble": Schedule("InterleavedZeroBubble", 1, math.inf, False, _ROUNDS, True),
    "zbv": Schedule("ZBVZeroBubble", 2, 2, True, _ANY, True),
    "dualpipev": Schedule("DualPipeV", 2, 2, True, _STAGES, True),
}


def find_schedule(name: str) -> Schedule:
    """The schedule of a name.

    Raises:
        PlanError: there is no schedule of that name.
    """
    if name not in SCHEDULES:
        hint = nearest(name, SCHEDULES) or f"; there are {', '.join(SCHEDULES)}"
        raise PlanError(f"there is no pipeline schedule {name!r}{hint}")
    return SCHEDULES[name]


def rank_of_stage(schedule: str, ranks: int, stages: int) -> tuple[int, ...]:
    """The rank that runs each stage."""
    turns = find_schedule(schedule).v
    rounds = (divmod(stage, ranks) for stage in range(stages))
    return tuple(ranks - 1 - rank if turns and turn % 2 else rank for turn, rank in rounds)


def check(schedule: str, ranks: int, stages: int, microbatches: int) -> None:
    """Check that ``schedule`` can run these numbers of ranks, stages and microbatches.

    Raises:
        PlanError: it cannot; the message says which numbers it can run.
    """
    kind = find_schedule(schedule)
    if min(ranks, stages, microbatches) < 1:
        raise PlanError(
            f"a pipeline of {ranks} ranks, {stages} stages and {microbatches} microbatches cannot be: each is 1 or more"
        )
    if stages % ranks or not kind.least <= stages // ranks <= kind.most:
        allowed = f"{kind.least}" if kind.most == kind.least else f"{kind.least} or more"
        works = [f"{ranks * count}" for count in range(kind.least, int(min(kind.most, kind.least + 2)) + 1)]
        each, rest = divmod(stages, ranks)
        others = [name for name, other in SCHEDULES.items() if not rest and other.least <= each <= other.most]
        run_by = f"; {stages} stages are run by {', '.join(others)}" if others else ""
        raise PlanError(
            f"schedule {schedule!r} cannot run {stages} stages on {ranks} ranks: each rank has {allowed} of its "
            f"stages, so {' or '.join(works)} would do{run_by}"
        )
    if not kind.allows(microbatches, ranks, stages):
        runnable = [count for count in range(1, microbatches + stages + 1) if kind.allows(count, ranks, stages)]
        position = bisect.bisect(runnable, microbatches)
        nearby = " or ".join(map(str, runnable[max(position - 1, 0) : position + 1]))
        raise PlanError(
            f"schedule {schedule!r} on {ranks} ranks with {stages} stages cannot run {microbatches} microbatches: it "
            f"takes {kind.rule}, so {nearby} would do, or schedule 'gpipe' with one stage per rank"
        )


@lru_cache(maxsize=64)
def pipeline_order(schedule: str, ranks: int, stages: int, microbatches: int) -> Order:
    """The actions of each rank in one step, in the order of torch's executor.

    Raises:
        PlanError: as :func:`check`.
    """
    check(schedule, ranks, stages, microbatches)
    actions_per_rank = pipeline_actions(find_schedule(schedule).torch_name, ranks, stages, microbatches)
    return tuple(
        tuple(
            Action(stage, cast(Kind, kind), microbatch, with_next=position < len(overlapped))
            for overlapped in actions
            for position, (stage, kind, microbatch) in enumerate(overlapped, start=1)
        )
        for actions in actions_per_rank
    )
