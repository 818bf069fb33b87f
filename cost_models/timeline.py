"""A simulated timeline: tasks on streams that each run one at a time and in order, as kernels on CUDA streams do."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

COMPUTE = "compute"
COPIES = ("to host", "to device")
"""The streams of copies between host and device, which run on copy engines."""


@dataclass(frozen=True)
class StepTime:
    """The seconds of one step on one rank.

    ``communication`` is the time of all collectives; ``exposed`` is the part that does not overlap with computation,
    ``hidden`` the rest. ``bubble`` is the idle time of a pipeline rank; 0 without a pipeline.
    """

    compute: float
    optimizer: float
    communication: float
    exposed: float
    bubble: float = 0.0

    @property
    def hidden(self) -> float:
        """Seconds of communication that overlap with computation."""
        return max(0.0, self.communication - self.exposed)

    @property
    def total(self) -> float:
        """Seconds of the step."""
        return self.compute + self.optimizer + self.exposed + self.bubble


@dataclass(frozen=True)
class Task:
    """``seconds`` of work on a ``stream``, which starts once the tasks in ``after`` (indices) have ended.

    Streams may share a ``link``, on which one task runs at a time. A collective ``slows`` the computation by so many
    seconds, in which the cores that move its bytes do not compute. ``label`` is for people; ``node`` is the name of
    the task's graph node.
    """

    label: str
    stream: str
    seconds: float
    after: tuple[int, ...] = ()
    node: str = ""
    link: str = ""
    slows: float = 0.0


@dataclass(frozen=True)
class Span:
    """When a task ran: ``start`` and ``end`` in seconds from the start of the timeline.

    ``waited`` is how long its stream was idle before it, for the tasks that it comes after.
    """

    task: Task
    start: float
    end: float
    waited: float = 0.0


@dataclass(frozen=True)
class Timeline:
    """Every task with its start and end, in the order in which the tasks were issued."""

    spans: tuple[Span, ...]

    @property
    def seconds(self) -> float:
        """When the last task ended."""
        return max((span.end for span in self.spans), default=0.0)

    def on(self, stream: str) -> list[Span]:
        """The tasks of a stream, in order."""
        return [span for span in self.spans if span.task.stream == stream]

    def busy(self, stream: str) -> float:
        """Seconds in which a stream is busy."""
        return sum(span.end - span.start for span in self.on(stream))

    @property
    def exposed(self) -> float:
        """Seconds in which the compute stream is idle: communication and copies that do not overlap with it."""
        return self.seconds - self.busy(COMPUTE)

    def to_chrome_trace(self) -> dict[str, object]:
        """The timeline in the trace-event format of chrome://tracing and ui.perfetto.dev, whose times are microseconds.

        Format: https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU
        """
        threads = {stream: tid for tid, stream in enumerate(dict.fromkeys(span.task.stream for span in self.spans))}
        names = [
            {"ph": "M", "pid": 0, "tid": tid, "name": "thread_name", "args": {"name": stream}}
            for stream, tid in threads.items()
        ]
        events = [
            {
                **{"ph": "X", "pid": 0, "tid": threads[span.task.stream], "name": span.task.label},
                **{"ts": span.start * 1e6, "dur": (span.end - span.start) * 1e6, "args": {"node": span.task.node}},
            }
            for span in self.spans
            if span.end > span.start
        ]
        return {"traceEvents": [*names, *events], "displayTimeUnit": "ms"}


def simulate(tasks: Sequence[Task], call: float = 0.0, sync: float = 0.0) -> Timeline:
    """Run ``tasks``, issued in this order, each ``call`` seconds after the one before.

    Each stream runs its own tasks one after the other. What a collective slows the computation is added to the compute
    stream. Computation that waits for a collective goes on ``sync`` seconds after it.
    """
    free: dict[str, float] = {}
    spans: list[Span] = []
    for position, task in enumerate(tasks, 1):
        taken = (task.stream, f"link {task.link}") if task.link else (task.stream,)
        ready = max(free.get(each, 0.0) for each in taken)
        issued = max(ready, position * call)
        start = max([issued, *(spans[i].end for i in task.after)])
        if sync and task.stream == COMPUTE and any(_is_awaited(spans[i], issued) for i in task.after):
            start += sync
        if task.slows:
            free[COMPUTE] = free.get(COMPUTE, 0.0) + task.slows
        free.update(dict.fromkeys(taken, start + task.seconds))
        spans.append(Span(task, start, start + task.seconds, start - ready))
    return Timeline(tuple(spans))


def _is_awaited(span: Span, reached: float) -> bool:
    """Whether it is a collective that has not ended when the computation has ``reached`` the wait for it.

    That is told without what the collective itself slows the computation: where nothing is hidden it would seem to
    have always ended, and as much is waited in the end.
    """
    return span.task.stream not in (COMPUTE, *COPIES) and reached - span.task.slows < span.end
