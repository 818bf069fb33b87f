"""What the threads of a process run is read while they run."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from shardgraph.runtime.watch.stacks import Stack, threads


class Waiting(threading.Thread):
    """A thread that waits in a function with a variable."""

    def __init__(self) -> None:
        super().__init__()
        self.arrived, self.go_on = threading.Event(), threading.Event()

    def run(self) -> None:
        self.outer("a value")

    def outer(self, variable: str) -> None:
        self.arrived.set()
        self.go_on.wait()


@pytest.fixture
def waiting() -> Iterator[Waiting]:
    thread = Waiting()
    thread.start()
    thread.arrived.wait()
    time.sleep(0.05)  # it is in the wait then
    yield thread
    thread.go_on.set()
    thread.join()


def test_a_stack_has_the_calls_of_a_thread_from_the_innermost_on(waiting):
    frames = Stack.of_thread(waiting.ident).frames
    names = [frame.name for frame in frames]
    outer = names.index("outer")
    assert names[outer + 1] == "run" and names[-1] == "_bootstrap"
    assert frames[outer].file == __file__
    assert frames[outer].line == Waiting.outer.__code__.co_firstlineno + 2


def test_the_stack_of_a_frame_of_ones_own_begins_there():
    def caller() -> Stack:
        return Stack.of(sys._getframe())

    assert [frame.name for frame in caller().frames[:2]] == [
        "caller",
        "test_the_stack_of_a_frame_of_ones_own_begins_there",
    ]


def test_variables_are_those_of_the_calls_that_are_asked_for(waiting):
    stack = Stack.of_thread(waiting.ident)
    outer = [frame.name for frame in stack.frames].index("outer")
    ((frame, variables),) = stack.variables(outer, outer + 1)
    assert frame == stack.frames[outer] and variables["variable"] == "a value"


def test_variables_of_a_thread_that_has_gone_on_are_not_told(waiting):
    stack = Stack.of_thread(waiting.ident)
    waiting.go_on.set()
    waiting.join()
    assert stack.variables(0, len(stack.frames)) == []


def test_a_thread_that_has_ended_has_no_calls(waiting):
    waiting.go_on.set()
    waiting.join()
    assert Stack.of_thread(waiting.ident).frames == () and waiting.ident not in threads()


@contextmanager
def managed(number: int) -> Iterator[int]:
    yield number


def _numbers(count: int) -> Iterator[int]:
    for number in range(count):
        with managed(number) as given:
            yield given


def _busy(depth: int) -> int:
    return sum(_numbers(3)) if not depth else _busy(depth - 1) + sum(map(_busy, [0, 0]))


def test_a_thread_that_runs_on_is_read_whole_at_every_look():
    """Read a line of Python at a time, calls end before their callers are told, and stacks are cut short."""
    started, stop = threading.Event(), threading.Event()

    def work() -> None:
        started.set()
        while not stop.is_set():
            _busy(6)

    thread = threading.Thread(target=work)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        thread.start()
        started.wait()
        for _ in range(100_000):
            names = [frame.name for frame in Stack.of_thread(thread.ident).frames]
            assert names[-4:] == ["work", "run", "_bootstrap_inner", "_bootstrap"]
    finally:
        stop.set()
        thread.join()
        sys.setswitchinterval(interval)
