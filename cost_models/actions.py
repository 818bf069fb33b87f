"""The actions of a pipeline schedule on each rank, and the actions and messages that each of them waits for."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from shardgraph.errors import PlanError

Kind = Literal["F", "B", "I", "W"]
"""Forward; the whole backward; or its two parts: the gradient of a stage's input, and those of its weights."""

Message = Literal["send output", "send gradient"]
"""To the next stage; to the previous one."""


@dataclass(frozen=True)
class Action:
    """A forward, or a (part of a) backward, of one stage for one microbatch.

    ``with_next``: this action and the next one of its rank may overlap, so the results of both are sent when both are
    done.
    """

    stage: int
    kind: Kind
    microbatch: int
    with_next: bool = False

    def __str__(self) -> str:
        return f"{self.stage}{self.kind}{self.microbatch}"


Order = tuple[tuple[Action, ...], ...]
"""The actions of each rank, in order. All actions of a stage are on one rank."""


@dataclass(frozen=True)
class Step:
    """An action or a message: ``work`` of a ``stage``, which starts once the steps in ``after`` (indices) have ended.

    The steps of a ``stream`` (a rank, or the link from one rank to another) run one at a time and in order.
    """

    label: str
    stream: str
    stage: int
    work: Kind | Message
    after: tuple[int, ...]


def lay_out(order: Order, stages: int, prefetch: bool) -> list[Step]:
    """The actions of ``order`` and the messages between ranks, each after the steps that it waits for.

    An action waits for the previous one on its rank and for the messages with its operands. A message starts when its
    sender has computed the value; without ``prefetch``, not before its receiver reaches the action that needs it.

    Raises:
        PlanError: the order deadlocks, because actions wait for each other.
    """
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    steps: list[Step] = []
    latest: dict[int, int] = {}  # the last step of each rank so far
    leaves: dict[_Value, int] = {}  # the step after which a value may be sent
    arrives: dict[_Value, int] = {}  # the step that sends the value

    def send(value: _Value, receiver: int, *after: int) -> None:
        arrives[value] = len(steps)
        stream = f"rank {rank_of[value.stage]} to {receiver}"
        work: Message = "send gradient" if value.backward else "send output"
        steps.append(Step(f"{work} {value.microbatch} of stage {value.stage}", stream, value.stage, work, after))

    for rank, together in _causally(order, stages):
        for action in together:
            received = [value for value in _operands(action, stages) if rank_of[value.stage] != rank]
            for value in received:
                if value not in arrives:
                    send(value, rank, leaves[value], *([latest[rank]] if rank in latest else []))
            latest[rank] = len(steps)
            after = tuple(arrives[value] for value in received)
            steps.append(Step(str(action), f"rank {rank}", action.stage, action.kind, after))
        for action in together:
            if (result := _result(action)) is not None:
                leaves[result] = latest[rank]
                receiver = rank_of.get(action.stage + (-1 if result.backward else 1), rank)
                if prefetch and receiver != rank:
                    send(result, receiver, leaves[result])
    return steps


class _Value(NamedTuple):
    """The output of a stage for a microbatch, or the gradient of its input."""

    stage: int
    backward: bool
    microbatch: int


def _result(action: Action) -> _Value | None:
    return None if action.kind == "W" else _Value(action.stage, action.kind != "F", action.microbatch)


def _operands(action: Action, stages: int) -> list[_Value]:
    """What an action needs: a forward, the previous stage's output; a backward, its own stage's output and the next
    stage's gradient; the gradients of weights, the gradient of their stage."""
    stage, microbatch = action.stage, action.microbatch
    if action.kind == "F":
        return [_Value(stage - 1, False, microbatch)] if stage > 0 else []
    if action.kind == "W":
        return [_Value(stage, True, microbatch)]
    behind = [_Value(stage + 1, True, microbatch)] if stage + 1 < stages else []
    return [_Value(stage, False, microbatch), *behind]


def _causally(order: Order, stages: int) -> Iterator[tuple[int, list[Action]]]:
    """Every action with its rank, in an order that respects dependencies; overlapping actions come together."""
    computed: set[_Value | None] = set()
    waiting = [_together(actions) for actions in order]
    while any(waiting):
        stuck = True
        for rank, places in enumerate(waiting):
            while places and all(computed.issuperset(_operands(action, stages)) for action in places[-1]):
                stuck = False
                computed.update(map(_result, places[-1]))
                yield rank, places.pop()
        if stuck:
            where = ", ".join(f"rank {rank} at {places[-1][0]}" for rank, places in enumerate(waiting) if places)
            raise PlanError(
                f"no step ends in this order: {where} wait for what no rank has done by then (2F0 is the forward of "
                "microbatch 0 on stage 2); a forward may follow that of the stage before, a backward its own forward "
                "and the backward of the next stage"
            )


def _together(actions: Sequence[Action]) -> list[list[Action]]:
    """The actions of a rank in reverse order, each in one list with those that overlap with it."""
    places: list[list[Action]] = []
    for action in reversed(actions):
        if action.with_next and places:
            places[-1].insert(0, action)
        else:
            places.append([action])
    return places
