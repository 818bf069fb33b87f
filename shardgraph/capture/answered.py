"""Calls of a model on fake tensors, with the answers that its Python got while it was traced."""

from __future__ import annotations

import os
import sys
from collections import defaultdict
from types import FrameType
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardgraph import torch_api

_VALUE = torch.ops.aten._local_scalar_dense.default
_TORCH = os.path.dirname(torch.__file__)
_BETWEEN = (
    os.path.dirname(__file__),
    *(os.path.join(_TORCH, *path.split("/")) for path in ("utils/_", "overrides.py", "_ops.py", "_subclasses", "_c")),
    os.path.join(_TORCH, "_dynamo", "eval_frame.py"),
)
"""Where the paths of code start that is called between Python that asks and an operation."""


class Answers:
    """The values that Python was told at each line, and the lines of which both ways were taken."""

    def __init__(self) -> None:
        self._told: defaultdict[tuple[str, int], set[Any]] = defaultdict(set)
        self._both: set[tuple[str, int]] = set()

    def told(self, line: str, value: Any) -> None:
        """Python was told ``value`` at a ``line``, as the tracer names it."""
        if not isinstance(value, list):
            self._told[_place(line)].add(value)

    def took_both(self, line: str) -> None:
        """Both ways of a branch at a ``line`` were traced."""
        self._both.add(_place(line))

    @property
    def either(self) -> bool:
        """Whether there is a branch of which both ways were taken."""
        return bool(self._both)

    def of(self, file: str, line: int, either: bool) -> Any:
        """What Python is told at this line; ``either`` where both ways were taken; None: it is not known."""
        place = file, line
        if place in self._both:
            return either
        told = self._told.get(place, ())
        return next(iter(told)) if len(told) == 1 else None


class Answered(TorchDispatchMode):
    """Inside, values of fake tensors are those that were told when a model was traced, by line; of others what is
    checked is true."""

    def __init__(self, answers: Answers, either: bool = False) -> None:
        super().__init__()
        self._answers, self._either = answers, either

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _VALUE and (value := self._answer(sys._getframe(1))) is not None:
            return value
        return func(*args, **(kwargs or {}))

    def _answer(self, frame: FrameType | None) -> Any:
        """What a value is that Python asks for in a frame, or in those that called it."""
        asks, at = None, frame
        while at is not None:
            value = self._answers.of(at.f_code.co_filename, at.f_lineno, self._either)
            if value is not None:
                return value
            if asks is None and not at.f_code.co_filename.startswith(_BETWEEN):
                asks = at
            at = at.f_back
        return None if asks is None else torch_api.passes(asks)


def _place(line: str) -> tuple[str, int]:
    file, _, number = line.partition(", in ")[0].rpartition(":")
    return file, int(number)
