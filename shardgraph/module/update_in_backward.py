"""A step's update within its backward: of each run of parameters as soon as all its gradients are there.

The ``update`` variant of the backward graph (:mod:`shardgraph.passes.parameters.update_parameters`) hands gradients
over where nothing reads the parameters any more, and they are freed once the optimizer has stepped. So a step never
holds the gradients of the whole model. What is computed is the same, in another order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch

from shardgraph import ir, torch_api
from shardgraph.module.accumulated import clear_of
from shardgraph.module.flat_update import FlatUpdate, NotFlatError, Run
from shardgraph.runtime.autograd import Differentiable
from shardgraph.runtime.direct import loss_and_gradients
from shardgraph.runtime.executor import Bound, State
from shardgraph.torch_api import local_tensor


def updates_of(flat: FlatUpdate, executor: Differentiable, leaves: Sequence[Any]) -> UpdatesInBackward | None:
    """Those of a step, or None if parameters must not change before the end of backward."""
    state = executor.state
    if Bound.observer is not None:
        return None  # what is called in the middle of a graph would be watched
    if executor.optional or len(executor.returned) != 1 or torch_api.has_own_step(flat.optimizer):
        return None
    names = executor.updated
    try:
        flat.prepare(names, state, places=lambda: names)
    except NotFlatError:
        return None
    if not flat.in_parts:
        return None  # what it counts are calls of its step
    others = (
        value
        for role, value in zip(executor.inputs, executor.values(leaves), strict=True)
        if isinstance(value, torch.Tensor) and not isinstance(role, ir.Parameter)
    )
    memory = _memory_of(flat, state)
    if memory is None or any(value.untyped_storage().data_ptr() in memory for value in others):
        return None  # a change of a parameter is one of another value too
    return UpdatesInBackward(flat, state)


def _memory_of(flat: FlatUpdate, state: State) -> frozenset[int] | None:
    """The storages of all parameters, by address; None if two parameters have memory in common."""
    if flat.memory is None:
        shards = [shard for shard in map(local_tensor, state.layout.parameters) if shard.numel()]
        extents = sorted((shard.data_ptr(), shard.data_ptr() + _extent(shard)) for shard in shards)
        apart = all(end <= start for (_, end), (start, _) in pairwise(extents))
        flat.memory = apart, frozenset(shard.untyped_storage().data_ptr() for shard in shards)
    apart, storages = flat.memory
    return storages if apart else None


def _extent(tensor: torch.Tensor) -> int:
    """Bytes from the first element to behind the last."""
    steps = (stride * (size - 1) for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (sum(steps) + 1) * tensor.itemsize


class UpdatesInBackward:
    """One step of an optimizer, which begins as soon as backward hands over gradients."""

    def __init__(self, flat: FlatUpdate, state: State) -> None:
        self._flat, self._state = flat, state
        self._missing = {run: len(run.names) for run in flat.runs}  # gradients of each that are not there yet
        self._gradients: dict[str, torch.Tensor] = {}
        self._begun = False

    def step(
        self, executor: Differentiable, leaves: Sequence[Any], tangent: Callable[[torch.Tensor], torch.Tensor]
    ) -> torch.Tensor:
        """Forward, backward and the update; returns the loss. Gradients of parameters that another optimizer trains
        are added to their ``grad``."""
        try:
            loss, late = loss_and_gradients(executor, leaves, tangent, self)
            self._gradients |= late
            if self._missing or not self._begun:
                self._update(list(self._missing))
        finally:
            self._flat.settle()
            self._state.steps += self._begun
        clear_of(self._flat.optimizer)
        self._state.add_gradients(self._gradients)
        return loss

    def __call__(self, names: Sequence[str], gradients: Sequence[torch.Tensor]) -> None:
        """Take the gradients of parameters that may change from now on."""
        self._gradients.update(zip(names, gradients, strict=True))
        missing, complete = self._missing, []
        for name in names:
            if (run := self._flat.run_of.get(name)) is not None:
                missing[run] -= 1
                if not missing[run]:
                    complete.append(run)
        if complete:
            self._update(complete)

    def _update(self, runs: Sequence[Run]) -> None:
        for run in runs:
            del self._missing[run]
        self._begun = True
        optimizer = self._flat.optimizer
        with self._flat.only(runs, self._gradients, changed=False):
            if self._missing:
                type(optimizer).step(optimizer)
            else:
                optimizer.step()  # once a step: a schedule counts
