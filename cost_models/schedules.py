"""A pipeline schedule on the clock: each rank's timeline, its bubbles and the activations that it holds.

An order says what every rank does, one action after the other; a stage's cost says how long its actions take and what
they hold. So one simulator serves every schedule, of uniform stages and of any others, with the time of messages.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardgraph.cost_models.actions import Action, Kind, Message, Order, lay_out
from shardgraph.cost_models.timeline import Task, Timeline, simulate


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

    def seconds(self, work: Kind | Message) -> float:
        """How long an action or a message of the stage takes."""
        half = self.backward / 2
        parts: dict[Kind | Message, float] = {
            "F": self.forward,
            "B": self.backward,
            "I": half if self.backward_input is None else self.backward_input,
            "W": half if self.backward_weight is None else self.backward_weight,
            "send output": self.send_output,
            "send gradient": self.send_gradient,
        }
        return parts[work]

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
    tasks = [
        Task(step.label, step.stream, stages[step.stage].seconds(step.work), step.after)
        for step in lay_out(order, len(stages), prefetch)
    ]
    timeline = simulate(tasks)
    ranks = tuple(
        tuple(
            Ran(action, span.start, span.end) for action, span in zip(actions, timeline.on(f"rank {rank}"), strict=True)
        )
        for rank, actions in enumerate(order)
    )
    return SimulatedSchedule(ranks, tuple(_memory(spans, stages) for spans in ranks), timeline)


def most_in_flight(order: Order) -> tuple[int, ...]:
    """The most microbatches of which each rank holds activations, counted for each stage that it runs."""
    stages = [StageCost(saved=1)] * (1 + max(action.stage for actions in order for action in actions))
    return tuple(max(nbytes for _, nbytes in _memory([Ran(a, 0, 0) for a in each], stages)) for each in order)


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
