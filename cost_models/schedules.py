"""A pipeline schedule on the clock: each rank's timeline, its bubbles and the activations that it holds.

An order says what every rank does, one action after the other; a stage's cost says how long its actions take and what
they hold. So one simulator serves every schedule, of uniform stages and of any others, with the time of messages.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

from shardgraph.cost_models.timeline import Task, Timeline, simulate
from shardgraph.errors import PlanError

Kind = Literal["F", "B", "I", "W"]
"""Forward; the whole backward; or its two parts, the gradient of a stage's input and those of its weights."""


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
class StageCost:
    """What one microbatch takes on one stage, in seconds and bytes.

    ``backward`` is the whole of it; a schedule that splits it runs ``backward_input`` and ``backward_weight`` instead,
    each half of it unless given. ``send_output`` is the time of a message to the next stage, ``send_gradient`` of one
    to the stage before; between stages of one rank they do not count.

    ``saved`` are the bytes that forward leaves for backward, from the beginning of forward to the end of backward. In a
    split backward ``kept`` bytes stay from the end of its first part to the end of its second, all of them unless
    given. ``fixed`` are the bytes that the stage takes at any time: parameters, gradients, optimizer state, workspace.
    """

    forward: float = 0.0
    backward: float = 0.0
    backward_input: float | None = None
    backward_weight: float | None = None
    send_output: float = 0.0
    send_gradient: float = 0.0
    saved: int = 0
    kept: int | None = None
    fixed: int = 0

    def seconds(self, kind: Kind) -> float:
        """How long an action takes."""
        half = self.backward / 2
        parts = {
            "F": self.forward,
            "B": self.backward,
            "I": half if self.backward_input is None else self.backward_input,
            "W": half if self.backward_weight is None else self.backward_weight,
        }
        return parts[kind]

    def held(self, kind: Kind) -> int:
        """By how many bytes an action changes what is held: a forward as it begins, a backward as it ends."""
        kept = self.saved if self.kept is None else self.kept
        return {"F": self.saved, "B": -self.saved, "I": kept - self.saved, "W": -kept}[kind]


@dataclass(frozen=True)
class Ran:
    """When an action ran: ``start`` and ``end`` in seconds from the beginning of the step."""

    action: Action
    start: float
    end: float


@dataclass(frozen=True)
class SimulatedSchedule:
    """A step of a pipeline: what ran when on each rank, and the bytes that each rank held.

    ``memory`` has for each rank the seconds at which its bytes change, with the bytes from then on. ``timeline`` has
    the messages too, on a stream for each pair of ranks.
    """

    ranks: tuple[tuple[Ran, ...], ...]
    memory: tuple[tuple[tuple[float, int], ...], ...]
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """When the last action ended."""
        return max(spans[-1].end for spans in self.ranks)

    def bubble(self, rank: int) -> float:
        """The part of the step in which a rank waits, from 0 to 1."""
        return 1 - sum(ran.end - ran.start for ran in self.ranks[rank]) / self.seconds

    @property
    def bubble_fraction(self) -> float:
        """The part of the step in which ranks wait, over all of them."""
        return sum(map(self.bubble, range(len(self.ranks)))) / len(self.ranks)

    def peak(self, rank: int) -> tuple[int, float]:
        """The most bytes that a rank holds, and the second of the step from which it does."""
        seconds, nbytes = max(self.memory[rank], key=lambda change: change[1])
        return nbytes, seconds


def simulate_schedule(order: Order, stages: Sequence[StageCost], *, prefetch: bool = True) -> SimulatedSchedule:
    """Run ``order`` with what each of its ``stages`` costs.

    An action starts when its rank has done the one before and its operands are there. Messages from one rank to another
    go one after the other, each as soon as its sender has it, while both compute. Without ``prefetch`` a rank asks for
    a message only when it comes to the action that needs it, so that the message is always waited for.

    Raises:
        PlanError: no step ends in this order, because actions wait for each other.
    """
    rank_of = {action.stage: rank for rank, actions in enumerate(order) for action in actions}
    tasks: list[Task] = []
    ran: list[list[int]] = [[] for _ in order]  # the tasks of each rank
    leaves: dict[_Value, int] = {}  # the task after which a value may be sent
    arrives: dict[_Value, int] = {}  # the task that sends it

    def send(value: _Value, receiver: int, after: tuple[int, ...]) -> None:
        stage = stages[value.stage]
        seconds = stage.send_gradient if value.backward else stage.send_output
        arrives[value] = len(tasks)
        tasks.append(Task(f"send {value}", f"rank {rank_of[value.stage]} to {receiver}", seconds, after))

    for rank, together in _causally(order, len(stages)):
        for action in together:
            received = [value for value in _takes(action, len(stages)) if rank_of[value.stage] != rank]
            for value in received:
                if value not in arrives:
                    send(value, rank, (leaves[value], *ran[rank][-1:]))
            after = tuple(arrives[value] for value in received)
            ran[rank].append(len(tasks))
            tasks.append(Task(str(action), f"rank {rank}", stages[action.stage].seconds(action.kind), after))
        for action in together:
            result = _makes(action)
            if result is not None:
                leaves[result] = ran[rank][-1]
                receiver = rank_of.get(action.stage + (-1 if result.backward else 1), rank)
                if prefetch and receiver != rank:
                    send(result, receiver, (leaves[result],))

    timeline = simulate(tasks)
    ranks = tuple(
        tuple(Ran(action, timeline.spans[i].start, timeline.spans[i].end) for action, i in zip(*each, strict=True))
        for each in zip(order, ran, strict=True)
    )
    return SimulatedSchedule(ranks, tuple(_memory(spans, stages) for spans in ranks), timeline)


def most_in_flight(order: Order) -> tuple[int, ...]:
    """The most microbatches of which each rank holds activations, counted for each stage that it runs."""
    one = StageCost(saved=1)
    stages = [one] * (1 + max(action.stage for actions in order for action in actions))
    return tuple(max(nbytes for _, nbytes in _memory([Ran(a, 0, 0) for a in each], stages)) for each in order)


# -- what actions wait for -------------------------------------------------------------------------


@dataclass(frozen=True)
class _Value:
    """The output of a stage for a microbatch, or the gradient of its input."""

    stage: int
    backward: bool
    microbatch: int

    def __str__(self) -> str:
        return f"{'gradient' if self.backward else 'output'} {self.microbatch} of stage {self.stage}"


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


def _memory(spans: Sequence[Ran], stages: Sequence[StageCost]) -> tuple[tuple[float, int], ...]:
    """The bytes of a rank from the beginning of the step and after every action that changes them."""
    held = sum(stages[stage].fixed for stage in {ran.action.stage for ran in spans})
    changes = [(0.0, held)]
    for ran in spans:
        change = stages[ran.action.stage].held(ran.action.kind)
        held += change
        if change:
            changes.append((ran.start if ran.action.kind == "F" else ran.end, held))
    return tuple(changes)
