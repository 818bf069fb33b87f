"""Which instructions of Python run around each layer of a stack.

A branch on a layer's number may do what neither an operation nor the model shows afterwards, such as printing. A trace
that leaves the layer out would not meet it, and could neither refuse nor repeat it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import torch
from torch import nn

_Instruction = tuple[CodeType, int]
_NOT_USERS = (f"{Path(torch.__file__).parent}/", f"{Path(__file__).parents[1]}/")
"""Where code is that calls layers alike, and whose caches make it do something else the second time."""
_MODULE = nn.modules.module.__file__
"""Where modules are called, in users' code between layers too."""


class RunAround:
    """The instructions that run from one layer's start to the next one's, but for those inside of layers: while this is
    entered, of the functions that call layers, and of those that these call."""

    def __init__(self) -> None:
        self._run: defaultdict[tuple[int, int], set[_Instruction]] = defaultdict(set)
        self._layer: tuple[int, int] | None = None
        self._inside = False
        self._codes = set[CodeType]()
        self._follower = _Follower(self._ran, self._begins)

    @property
    def by_layer(self) -> Mapping[tuple[int, int], set[_Instruction]]:
        """The instructions by a stack's position and a layer's number in it."""
        return self._run

    def __enter__(self) -> RunAround:
        self._outermost = sys._getframe(1)
        self._follower.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._follower.stop()
        del self._outermost

    def enter(self, layer: tuple[int, int]) -> None:
        """A layer starts; what has called it is followed from here on."""
        self._layer, self._inside = layer, True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._outermost:
            if not frame.f_code.co_filename.startswith(_NOT_USERS):
                self._codes.add(frame.f_code)
                self._follower.follow(frame)
            frame = frame.f_back

    def leave(self, last: bool) -> None:
        """A layer ends, the ``last`` of its stack or not."""
        self._inside, self._layer = False, None if last else self._layer

    def _begins(self, frame: FrameType) -> bool:
        """Whether a function begins that is called between layers by one that is followed, as it is from here on."""
        if self._layer is None or self._inside or frame.f_code.co_filename.startswith(_NOT_USERS):
            return False
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename == _MODULE:
            caller = caller.f_back
        if caller is None or caller.f_code not in self._codes:
            return False
        self._codes.add(frame.f_code)
        return True

    def _ran(self, code: CodeType, offset: int) -> None:
        if self._layer is not None and not self._inside:
            self._run[self._layer].add((code, offset))


if sys.version_info >= (3, 12):
    _EVENTS = sys.monitoring.events

    class _Follower:
        """Calls ``ran`` for every instruction of what is followed, and of functions for which ``begins`` is true."""

        def __init__(self, ran: Callable[[CodeType, int], Any], begins: Callable[[FrameType], bool]) -> None:
            self._ran, self._begins, self._codes = ran, begins, set[CodeType]()

        def start(self) -> None:
            self._tool = next(tool for tool in reversed(range(6)) if sys.monitoring.get_tool(tool) is None)
            sys.monitoring.use_tool_id(self._tool, "shardgraph")
            sys.monitoring.register_callback(self._tool, _EVENTS.INSTRUCTION, self._ran)
            sys.monitoring.register_callback(self._tool, _EVENTS.PY_START, self._started)
            sys.monitoring.set_events(self._tool, _EVENTS.PY_START)

        def follow(self, frame: FrameType) -> None:
            if frame.f_code not in self._codes:
                self._codes.add(frame.f_code)
                sys.monitoring.set_local_events(self._tool, frame.f_code, _EVENTS.INSTRUCTION)

        def stop(self) -> None:
            sys.monitoring.set_events(self._tool, _EVENTS.NO_EVENTS)
            for code in self._codes:
                sys.monitoring.set_local_events(self._tool, code, _EVENTS.NO_EVENTS)
            for event in (_EVENTS.INSTRUCTION, _EVENTS.PY_START):
                sys.monitoring.register_callback(self._tool, event, None)
            sys.monitoring.free_tool_id(self._tool)

        def _started(self, code: CodeType, offset: int) -> None:
            if self._begins(frame := sys._getframe(1)):
                self.follow(frame)

else:

    class _Follower:
        """Calls ``ran`` for every instruction of what is followed, and of functions for which ``begins`` is true.

        Meanwhile it takes the place of another tracer of the thread, such as a debugger's.
        """

        def __init__(self, ran: Callable[[CodeType, int], Any], begins: Callable[[FrameType], bool]) -> None:
            self._ran, self._begins = ran, begins
            self._followed: list[tuple[FrameType, Any, bool]] = []

        def start(self) -> None:
            self._before = sys.gettrace()
            sys.settrace(self._called)

        def follow(self, frame: FrameType) -> None:
            if frame.f_trace != self._traced:
                self._followed.append((frame, frame.f_trace, frame.f_trace_opcodes))
                frame.f_trace, frame.f_trace_opcodes = self._traced, True

        def stop(self) -> None:
            sys.settrace(self._before)
            for frame, trace, opcodes in self._followed:
                frame.f_trace, frame.f_trace_opcodes = trace, opcodes
            self._followed.clear()

        def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
            if not self._begins(frame):
                return None
            frame.f_trace_opcodes = True
            return self._traced

        def _traced(self, frame: FrameType, event: str, argument: Any) -> Any:
            if event == "opcode":
                self._ran(frame.f_code, frame.f_lasti)
            return self._traced
