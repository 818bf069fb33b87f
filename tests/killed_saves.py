"""A process that saves and kills itself at a point of its choice, for :mod:`tests.test_saves`."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from shardgraph.saves import writing
from shardgraph.saves.loading import load_checkpoint
from shardgraph.saves.saving import save_checkpoint

_EVENTS = ("open", "os.", "shutil.")


class Points:
    """Counts what a process does to files, and kills it at point number ``last``, after ``others``."""

    def __init__(self, last: int, others: Sequence[int] = ()) -> None:
        self.passed, self._last, self._others, self._on = 0, last, others, False
        sys.addaudithook(self._hear)
        write = writing._Checksummed.write

        def halved(stream: Any, data: Any) -> int:
            half = len(data) // 2
            if self._on and self.passed + 1 == self._last:  # half of it is on its way
                stream._file.write(data[:half])
                stream._file.flush()
            self._pass()
            return write(stream, data)

        writing._Checksummed.write = halved  # type: ignore[method-assign]

    def __enter__(self) -> Points:
        self._on = True
        return self

    def __exit__(self, *_: object) -> None:
        self._on = False

    def _hear(self, event: str, args: Any) -> None:
        if event.startswith(_EVENTS):
            self._pass()

    def _pass(self) -> None:
        if self._on:
            self.passed += 1
            if self.passed == self._last:
                for process in (*self._others, os.getpid()):
                    os.kill(process, signal.SIGKILL)


def trained_to(step: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model and an optimizer whose values say of which step they are."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for parameter in model.parameters():
        parameter.data.fill_(step)
        optimizer.state[parameter]["momentum_buffer"] = torch.full_like(parameter, step)
    return model, optimizer


def step_of_values(path: str) -> tuple[int, list[float]]:
    """The step that a fresh job loads, and the different values that it has then."""
    model, optimizer = trained_to(-1)
    step = load_checkpoint(path, model, optimizer).step
    buffers = [state["momentum_buffer"] for state in optimizer.state.values()]
    values = torch.cat([tensor.detach().flatten() for tensor in (*model.parameters(), *buffers)])
    return step, values.unique().tolist()


def save_and_be_killed(path: str, step: int, value: int, last: int, passed: Any, background: bool = False) -> None:
    """Save ``step``, of a model that has ``value``; ``passed`` is the number of points if it came to the end."""
    model, optimizer = trained_to(value)
    with Points(last) as points:
        save_checkpoint(path, step, model, optimizer, keep=2, background=background).result()
    passed.value = points.passed
