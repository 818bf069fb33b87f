"""What this rank is doing, read off the frames of its threads: nothing is noted while it works."""

from __future__ import annotations

import linecache
import os
import re
import sysconfig
import threading
import traceback
import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from itertools import count, dropwhile, takewhile
from typing import Any

import torch
import torch.distributed as dist
from torch import fx
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardgraph import ir, torch_api
from shardgraph.runtime.watch.stacks import Frame, Stack, threads

_TORCH = os.path.dirname(torch.__file__) + os.sep
_OURS = os.path.dirname(os.path.dirname(os.path.dirname(__file__))) + os.sep
_PYTHON = sysconfig.get_paths()["stdlib"] + os.sep

_PIPELINING = os.path.join("torch", "distributed", "pipelining")
_LINES = 3  # of the user, in a traceback that is shown

_COLLECTIVES = {
    *("all_reduce", "all_gather", "all_gather_into_tensor", "all_gather_single", "all_gather_object", "all_to_all"),
    *("all_to_all_single", "barrier", "broadcast", "broadcast_object_list", "gather", "gather_object", "reduce"),
    *("reduce_scatter", "reduce_scatter_tensor", "reduce_scatter_single", "scatter", "scatter_object_list"),
    *("monitored_barrier", "all_reduce_coalesced", "all_gather_coalesced"),
}
_GROUPS = ("group", "pg", "mesh", "device_mesh", "self", "input")  # variables of torch's functions
_MESSAGES = {"send", "recv", "isend", "irecv", "batch_isend_irecv", "send_object_list", "recv_object_list"}

_graphs: weakref.WeakValueDictionary[str, fx.GraphModule] = weakref.WeakValueDictionary()


@dataclass(frozen=True)
class Place:
    """Where a thread is: ``text`` for messages; ``operation`` and ``group`` if it communicates.

    ``mark`` changes whenever it has gone on. ``absent`` are ranks that an agreement waits for,
    ``run`` is the number of the graph, or of the step of a pipeline, that it is in. A ``message`` is between two ranks;
    an ``answer`` is the store's. ``beside`` says whose thread this is, if the main thread does not wait for it: "save",
    which writes a checkpoint, or "user".
    """

    text: str
    mark: tuple[Any, ...]
    operation: str = ""
    group: str = ""
    absent: tuple[int, ...] = ()
    run: int | None = None
    message: bool = False
    answer: bool = False
    beside: str = ""


@dataclass
class Waiting:
    """An agreement that a thread waits for: its topic, and who has not come.

    With ``answer`` it waits for an answer of the store alone, which the first of ``absent`` may serve. ``number`` is of
    this wait: the next one at the same topic is another.
    """

    topic: str
    absent: Sequence[int] = ()
    answer: bool = False
    number: int = field(default_factory=count().__next__)


waiting: dict[int, Waiting] = {}
"""By thread."""

with_messages = set[str]()
"""Groups in which ranks also send to one another, so that their counts of operations differ."""

in_steps = dict[str, int]()
"""How many operations of the groups of pipelines were in steps; ranks have as many outside of them as each other."""

calls = 0
"""Graphs with collectives, and steps of pipelines, that this rank has begun to run."""

step: int | None = None
"""The number of the step of a pipeline that this rank is in."""


def counts() -> dict[str, int]:
    """How many operations of each group this rank has started, where they are as many on all ranks."""
    found = torch_api.operation_counts(with_messages - (in_steps.keys() if step is None else set()))
    return {name: count - in_steps.get(name, 0) for name, count in found.items()}


@contextmanager
def counted_step() -> Iterator[None]:
    """Run a step of a pipeline, whose operations are as many as its stages send and receive."""
    global calls, step
    calls += 1
    before, step = counts(), calls
    try:
        yield
    finally:
        after = torch_api.operation_counts(set())
        for name in in_steps:
            in_steps[name] = after.get(name, 0) - before.get(name, 0)
        step = None


def of_error(error: BaseException) -> Place:
    """The place where an error was raised."""
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    return _of_thread(0, Stack.of(frames[-1])) if frames else Place("", ())


def know(code: Any, module: fx.GraphModule) -> None:
    """Note which graph a generated function is of."""
    file = getattr(getattr(code, "__code__", None), "co_filename", None)
    if file is not None:
        _graphs[file] = module


@contextmanager
def agreeing(topic: str) -> Iterator[Waiting]:
    """Say that this thread waits at an agreement."""
    thread, before = threading.get_ident(), waiting.get(threading.get_ident())
    waiting[thread] = here = Waiting(topic)
    try:
        yield here
    finally:
        if before is None:
            waiting.pop(thread, None)
        else:
            waiting[thread] = before


def here() -> Place:
    """The place of the thread that communicates, or else of the main thread."""
    own, main = threading.get_ident(), threading.main_thread().ident
    stacks = {thread: Stack.of_thread(thread) for thread in threads() if thread != own}
    found: Place | None = None
    for thread in sorted(stacks, key=lambda each: each != main):
        place = _of_thread(thread, stacks[thread])
        if place.operation or place.absent:
            return place if thread == main else replace(place, beside=_beside(thread, stacks.get(main or 0)))
        found = found or (place if thread == main else None)
    return found or Place("nothing that is known", ())


def _beside(thread: int, main: Stack | None) -> str:
    """What a thread is to a main thread with the stack ``main``: as :attr:`Place.beside` has it."""
    if not any(each.ident == thread and each.name.startswith("shardgraph save") for each in threading.enumerate()):
        return "user"
    files = [] if main is None else [frame.file for frame in main.frames]
    callers = list(dropwhile(lambda file: file == threading.__file__, files))
    return "" if callers != files and callers and callers[0].startswith(_OURS) else "save"


def described(error: BaseException) -> str:
    """The last line of an error's traceback, on one line, and the user's line where it was raised."""
    if isinstance(error, SystemExit):
        return f"sys.exit({error.code!r}){_raised_at(error)}"
    text = " ".join(str(error).split())
    text = f": {text[:300]}{'...' if len(text) > 300 else ''}" if text else ""
    return f"{type(error).__name__}{text}{_raised_at(error)}"


def shown(error: BaseException, raised: bool = True) -> str:
    """A traceback of the user's lines, the latest ones, and of the line that raised; its last line is the cause.

    Without that line if not ``raised``: the error says by itself what has happened.
    """
    found = traceback.TracebackException.from_exception(error)
    users = [frame for frame in found.stack if is_users(frame.filename)]
    frames = users[-_LINES:]
    if raised and found.stack[-1:] != users[-1:]:
        frames += found.stack[-1:]
    lines = traceback.StackSummary.from_list(frames).format() if frames else []
    return "".join([*lines, *found.format_exception_only()]).rstrip()


def _raised_at(error: BaseException) -> str:
    at, trace = "", error.__traceback__
    while trace is not None:
        code = trace.tb_frame.f_code
        if not at or is_users(code.co_filename):
            at = f" ({os.path.basename(code.co_filename)}:{trace.tb_lineno} in {code.co_name})"
        trace = trace.tb_next
    return at


def _of_thread(thread: int, stack: Stack) -> Place:
    line = _users_line(stack)
    if (agreement := waiting.get(thread)) is not None:
        absent = tuple(agreement.absent)
        text = f"waiting for all ranks at {agreement.topic}{line}"
        passed = thread, agreement.number, absent
        return Place(text, passed, "agreement", absent=absent, answer=agreement.answer)
    if not stack.frames:
        return Place("nothing that is known", (thread,))
    innermost = stack.frames[0]
    mark: tuple[Any, ...] = thread, innermost.code, innermost.instruction, calls
    in_torch = list(takewhile(lambda frame: frame.file.startswith(_TORCH), stack.frames))
    called = functional = ""
    outermost = 0
    for depth, frame in enumerate(in_torch):
        if frame.file.endswith("distributed_c10d.py") and not frame.name.startswith("_"):
            called, outermost = frame.name, depth
        elif frame.file.endswith("_functional_collectives.py") or frame.name == "full_tensor":
            functional = frame.name
    if called not in _COLLECTIVES | _MESSAGES:
        called, outermost = functional, 0
    if called:
        group = _group_of(stack.variables(outermost, len(in_torch)))
        mark = *mark, torch_api.operation_counts(set()).get(group)  # in a loop, the same call is another operation
        return Place(f"{called}{line}", mark, called, group, run=step, message=called in _MESSAGES)
    if _PIPELINING in innermost.file:
        everyone = str(dist.group.WORLD.group_name) if dist.is_initialized() and dist.group.WORLD is not None else ""
        return Place(
            f"a message between stages of the pipeline{line}", mark, "message", everyone, run=step, message=True
        )
    callers = stack.frames[len(in_torch) :]
    if callers and (found := _in_graph(callers[0])) is not None:
        operation, text, group = found
        return Place(f"{text}{line}", mark, operation, group, run=calls if step is None else step)
    return Place(f"computing{line}", mark)


def _in_graph(frame: Frame) -> tuple[str, str, str] | None:
    """The collective that generated code starts or awaits at this frame: its kind, a description and its group."""
    if (module := _graphs.get(frame.file)) is None or frame.line is None:
        return None
    if not (line := re.match(r"\s*(\w+)", linecache.getline(frame.file, frame.line))):
        return None
    node = next((node for node in module.graph.nodes if node.name == line.group(1)), None)
    if node is not None and node.target is ir.WAIT:
        node = node.args[0]
    if not isinstance(node, fx.Node) or not ir.is_collective(node):
        return None
    text = ir.describe_collective(node)
    return text.partition(" (")[0], text, ir.group_of(node)


def _group_of(functions: Sequence[tuple[Frame, dict[str, Any]]]) -> str:
    """The group that torch's functions communicate in, as the first of them that has one in its variables says."""
    for frame, variables in functions:
        for value in map(variables.get, _GROUPS):
            mesh = value.device_mesh if isinstance(value, DTensor) else value
            if isinstance(mesh, DeviceMesh) and mesh.ndim == 1:
                with suppress(RuntimeError):  # a mesh for asking which layouts there are has no groups
                    return str(mesh.get_group().group_name)
            if isinstance(value, dist.ProcessGroup):
                return str(value.group_name)
        if frame.file.endswith("distributed_c10d.py") and frame.name in _COLLECTIVES:
            return str(dist.group.WORLD.group_name) if dist.group.WORLD is not None else ""
    return ""


def is_users(file: str) -> bool:
    """Whether a file of code is neither Python's nor torch's nor this package's, nor generated."""
    python = file.startswith(_PYTHON) and "site-packages" not in file
    return not python and "torchinductor" not in file and not file.startswith((_TORCH, _OURS, "<"))


def _users_line(stack: Stack) -> str:
    """The innermost line that is of neither torch nor this package."""
    for frame in stack.frames:
        if is_users(frame.file):
            return f", called at {os.path.basename(frame.file)}:{frame.line} in {frame.name}"
    return ""
