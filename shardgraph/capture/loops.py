"""Which instructions of Python run around each layer of a stack.

A branch on a layer's number may do what neither an operation nor the model shows afterwards, such as printing. A trace
that leaves the layer out would not meet it, and could neither refuse nor repeat it.
"""

from __future__ import annotations

import sys
from collections import defaultdict
from collections.abc import Mapping
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
    """The instructions that run from one layer's start to the next one's, but for those inside of layers.

    A context manager, which takes the place of another tracer of the thread, such as a debugger's, while it is entered.
    """

    def __init__(self) -> None:
        self._run: defaultdict[tuple[int, int], set[_Instruction]] = defaultdict(set)
        self._layer: tuple[int, int] | None = None
        self._inside = False
        self._followed: list[tuple[FrameType, Any]] = []

    @property
    def by_layer(self) -> Mapping[tuple[int, int], set[_Instruction]]:
        """The instructions by a stack's position and a layer's number in it."""
        return self._run

    def __enter__(self) -> RunAround:
        self._before, self._outermost = sys.gettrace(), sys._getframe(1)
        sys.settrace(self._called)
        return self

    def __exit__(self, *_: object) -> None:
        sys.settrace(self._before)
        for frame, earlier in self._followed:
            frame.f_trace, frame.f_trace_opcodes = earlier, False
        self._followed.clear()
        del self._outermost

    def enter(self, layer: tuple[int, int]) -> None:
        """A layer starts; what has called it is followed from here on."""
        self._layer, self._inside = layer, True
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame is not self._outermost and frame.f_trace != self._ran:
            if not frame.f_code.co_filename.startswith(_NOT_USERS):
                self._followed.append((frame, frame.f_trace))
                frame.f_trace, frame.f_trace_opcodes = self._ran, True
            frame = frame.f_back

    def leave(self, last: bool) -> None:
        """A layer ends, the ``last`` of its stack or not."""
        self._inside, self._layer = False, None if last else self._layer

    def _called(self, frame: FrameType, event: str, argument: Any) -> Any:
        if self._layer is None or self._inside or frame.f_code.co_filename.startswith(_NOT_USERS):
            return None
        caller = frame.f_back
        while caller is not None and caller.f_code.co_filename == _MODULE:
            caller = caller.f_back
        if caller is None or caller.f_trace != self._ran:
            return None
        frame.f_trace_opcodes = True
        return self._ran

    def _ran(self, frame: FrameType, event: str, argument: Any) -> Any:
        if event == "opcode" and self._layer is not None:
            self._run[self._layer].add((frame.f_code, frame.f_lasti))
        return self._ran
