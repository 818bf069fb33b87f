"""A simulated pipeline schedule, uniform or not: each rank's timeline, its bubbles and the activations it holds."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from shardgraph.cost_models.actions import Action, Kind, Message, Order, lay_out
from shardgraph.cost_models.timeline import Task, Timeline, simulate


@dataclass(frozen=True)
class StageCost:
    """The cost of one microbatch on one stage, in seconds and bytes.

    ``backward`` is the whole backward; a schedule that splits it runs ``backward_input`` and ``backward_weight``
    instead, each by default half of it. ``send_output`` is the time of a message to the next stage, ``send_gradient``
    of one to the previous stage; between stages of one rank they do not count.

    ``saved`` are the bytes saved for backward, live from the start of forward to the end of backward. If backward is
    split, ``kept`` of these bytes (by default all) stay from the end of its first part to the end of its second.
    ``fixed`` are the bytes that the stage always needs: parameters, gradients, optimizer state, workspace.
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
        """Seconds of an action or a message of the stage."""
        half = self.backward / 2
        seconds: dict[Kind | Message, float] = {
            "F": self.forward,
            "B": self.backward,
            "I": half if self.backward_input is None else self.backward_input,
            "W": half if self.backward_weight is None else self.backward_weight,
            "send output": self.send_output,
            "send gradient": self.send_gradient,
        }
        return seconds[work]

    def held(self, kind: Kind) -> int:
        """By how many bytes an action changes what the stage holds: a forward at its start, a backward at its end."""
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
    """A simulated step of a pipeline: when each action ran, and the bytes that each rank held.

    ``memory`` has, for each rank, the times in seconds at which its bytes change, with the bytes from then on.
    ``timeline`` includes the messages, on one stream per ordered pair of ranks.
    """

    ranks: tuple[tuple[Ran, ...], ...]
    memory: tuple[tuple[tuple[float, int], ...], ...]
    timeline: Timeline

    @property
    def seconds(self) -> float:
        """When the last action ended."""
        return max(spans[-1].end for spans in self.ranks)

    def bubble(self, rank: int) -> float:
        """The fraction of the step in which a rank is idle, from 0 to 1."""
        return 1 - sum(ran.end - ran.start for ran in self.ranks[rank]) / self.seconds

    @property
    def bubble_fraction(self) -> float:
        """The mean of :meth:`bubble` over all ranks."""
        return sum(map(self.bubble, range(len(self.ranks)))) / len(self.ranks)

    def peak(self, rank: int) -> tuple[int, float]:
        """The peak bytes of a rank, and the time in seconds at which it reaches them."""
        seconds, nbytes = max(self.memory[rank], key=lambda change: change[1])
        return nbytes, seconds


def simulate_schedule(order: Order, stages: Sequence[StageCost], *, prefetch: bool = True) -> SimulatedSchedule:
    """Simulate ``order`` with the costs of its ``stages``.

    An action starts when its rank has finished the previous one and its operands have arrived. Messages from one rank
    to another are sent one at a time, each as soon as its sender has the value, while both ranks compute. Without
    ``prefetch`` a rank posts a receive only when it reaches the action that needs it, so it always waits for it.

    Raises:
        PlanError: the order deadlocks, because actions wait for each other.
    """
    tasks = [
        Task(step.label, step.stream, stages[step.stage].seconds(step.work), step.after)
        for step in lay_out(order, len(stages), prefetch)
    ]
    timeline = simulate(tasks)
    spans = [timeline.on(f"rank {rank}") for rank in range(len(order))]
    ranks = tuple(
        tuple(Ran(action, span.start, span.end) for action, span in zip(*of_rank, strict=True))
        for of_rank in zip(order, spans, strict=True)
    )
    return SimulatedSchedule(ranks, tuple(_memory(spans, stages) for spans in ranks), timeline)


def most_in_flight(order: Order) -> tuple[int, ...]:
    """The maximum number of microbatches in flight on each rank, counted once for each stage that it runs."""
    stages = [StageCost(saved=1)] * (1 + max(action.stage for actions in order for action in actions))
    return tuple(max(nbytes for _, nbytes in _memory([Ran(a, 0, 0) for a in each], stages)) for each in order)


def _memory(spans: Sequence[Ran], stages: Sequence[StageCost]) -> tuple[tuple[float, int], ...]:
    """The bytes that a rank holds: at the start of the step, and after every action that changes them."""
    held = sum(stages[stage].fixed for stage in {ran.action.stage for ran in spans})
    changes = [(0.0, held)]
    for ran in spans:
        change = stages[ran.action.stage].held(ran.action.kind)
        held += change
        if change:
            changes.append((ran.start if ran.action.kind == "F" else ran.end, held))
    return tuple(changes)
