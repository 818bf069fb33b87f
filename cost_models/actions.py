"""What the ranks of a pipeline do, action by action, and what each action and message waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shardgraph.errors import PlanError

Kind = Literal["F", "B", "I", "W"]
"""Forward; the whole backward; or its two parts, the gradient of a stage's input and those of its weights."""

Message = Literal["send output", "send gradient"]
"""To the next stage; to the one before."""


@dataclass(frozen=True)
class Action:
    """One stage's work of a ``kind`` on one microbatch.

    ``with_next``: this action and the next of its rank may overlap, so what both compute is sent when both are done.
    """

    stage: int
    kind: Kind
    microbatch: int
    with_next: bool = False

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Order = tuple[tuple[Action, ...], ...]
"""What each rank does, in its order. All actions of a stage are on one rank."""


@dataclass(frozen=True)
class Step:
    """An action or a message: ``work`` of a ``stage``, once the steps it is ``after`` (by index) have ended.

    Steps of a ``stream``, a rank or the link from one to another, run one at a time and in order.
    """

    label: str
    stream: str
    stage: int
    work: Kind | Message
    after: tuple[int, ...]


def lay_out(order: Order, stages: int, prefetch: bool) -> list[Step]:
    """The actions of ``order`` with the messages between ranks, each after what it waits for.

    An action waits for the one before on its rank and for the messages with its operands. A message starts when its
    sender has it; without ``prefetch`` not before its receiver has come to the action that needs it.

    Raises:
        PlanError: no step ends in this order, because actions wait for each other.
    """
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    steps: list[Step] = []
    latest: dict[int, int] = {}  # the last step of a rank so far
    leaves: dict[_Value, int] = {}  # the step after which a value may be sent
    arrives: dict[_Value, int] = {}  # the step that sends it

    def send(value: _Value, receiver: int, *after: int) -> None:
        arrives[value] = len(steps)
        stream = f"rank {rank_of[value.stage]} to {receiver}"
        work: Message = "send gradient" if value.backward else "send output"
        steps.append(Step(f"{work} {value.microbatch} of stage {value.stage}", stream, value.stage, work, after))

    for rank, together in _causally(order, stages):
        for action in together:
            received = [value for value in _takes(action, stages) if rank_of[value.stage] != rank]
            for value in received:
                if value not in arrives:
                    send(value, rank, leaves[value], *([latest[rank]] if rank in latest else []))
            latest[rank] = len(steps)
            after = tuple(arrives[value] for value in received)
            steps.append(Step(str(action), f"rank {rank}", action.stage, action.kind, after))
        for action in together:
            result = _makes(action)
            if result is not None:
                leaves[result] = latest[rank]
                receiver = rank_of.get(action.stage + (-1 if result.backward else 1), rank)
                if prefetch and receiver != rank:
                    send(result, receiver, leaves[result])
    return steps


@dataclass(frozen=True)
class _Value:
    """The output of a stage for a microbatch, or the gradient of its input."""

    stage: int
    backward: bool
    microbatch: int


def _makes(action: Action) -> _Value | None:
    return None if action.kind == "W" else _Value(action.stage, action.kind != "F", action.microbatch)


def _takes(action: Action, stages: int) -> list[_Value]:
    """What an action needs: forward the output before, backward its own and the gradient behind it, weights theirs."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return [_Value(stage - 1, False, microbatch)] if stage > 0 else []
    if action.kind == "W":
        return [_Value(stage, True, microbatch)]
    behind = [_Value(stage + 1, True, microbatch)] if stage + 1 < stages else []
    return [_Value(stage, False, microbatch), *behind]


def _causally(order: Order, stages: int) -> Iterator[tuple[int, list[Action]]]:
    """Every action with its rank, after those that it waits for; actions that overlap come together."""
    made: set[_Value | None] = set()
    waiting = [_together(actions) for actions in order]
    while any(waiting):
        stuck = True
        for rank, places in enumerate(waiting):
            while places and all(made.issuperset(_takes(action, stages)) for action in places[-1]):
                stuck = False
                made.update(map(_makes, places[-1]))
                yield rank, places.pop()
        if stuck:
            where = ", ".join(f"rank {rank} at {places[-1][0]}" for rank, places in enumerate(waiting) if places)
            raise PlanError(
                f"no step ends in this order: {where} wait for what no rank has done by then (2F0 is the forward of "
                "microbatch 0 on stage 2); a forward may follow that of the stage before, a backward its own forward "
                "and the backward of the next stage"
            )


def _together(actions: Sequence[Action]) -> list[list[Action]]:
    """The actions of a rank, the last first, each in one list with those that overlap with it."""
    places: list[list[Action]] = []
    joins = False
    for action in actions:
        if joins:
            places[-1].append(action)
        else:
            places.append([action])
        joins = action.with_next
    return places[::-1]
