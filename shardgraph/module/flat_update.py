"""An optimizer's step on parameters that lie side by side: one flat tensor for all of them, as if it were a parameter.

torch's classes that compute element by element (:mod:`shardgraph.module.local_step`) give the same numbers for many
parameters in one tensor as for each alone. So a step takes as many kernels for a bucket as for one parameter, and no
Python for each. The arithmetic is torch's own, of the optimizer's own implementation (``foreach``, ``fused``).

The optimizer stays the owner of its state: ``optimizer.state`` has every parameter with tensors of its own, which are
views of the flat ones, and ``step`` and the like a number for each.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import chain
from operator import is_, methodcaller
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgraph import torch_api
from shardgraph.runtime.side_by_side import packed, view_of
from shardgraph.torch_api import local_tensor

_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""The state that torch's element-wise optimizers have once for a parameter, whatever its shape."""


_values = methodcaller("values")


class NotFlatError(Exception):
    """The optimizer has state that does not go with the elements of parameters."""


@dataclass(eq=False)
class Run:
    """Parameters of one group that lie side by side, and have the same state: one ``twin`` for all."""

    group: int
    parameters: list[nn.Parameter]
    elements: list[int]  # those of each with its padding; the last one has none
    twin: nn.Parameter
    state: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)  # what of the state is a number, of each parameter
    versions: dict[str, int] = field(default_factory=dict)

    @property
    def shards(self) -> list[torch.Tensor]:
        """Of each parameter."""
        return list(map(local_tensor, self.parameters))

    def gradient(self, gradients: Sequence[torch.Tensor], changed: bool) -> torch.Tensor:
        """The gradients as that of the twin: without a copy, if they lie side by side and may be ``changed``."""
        if len(gradients) == 1:
            (only,) = gradients
            flat = only.clone(memory_format=torch.contiguous_format) if changed and torch_api.is_viewed(only) else only
            flat = flat.reshape(-1)
        else:
            padded = any(g.numel() < count for g, count in zip(gradients, self.elements, strict=True))
            flat_view = None if padded else view_of(gradients, self.elements)
            flat = packed(gradients, self.elements) if flat_view is None else flat_view
        return flat if flat.dtype == self.twin.dtype else flat.to(self.twin.dtype)


class FlatUpdate:
    """An optimizer whose parameters are in runs."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = weakref.ref(optimizer)
        self.runs: list[Run] = []
        self._known: tuple[list[Any], ...] = ()

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Whose step it is."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    @contextmanager
    def applied(
        self, gradients: dict[nn.Parameter, torch.Tensor], buckets: Sequence[Mapping[nn.Parameter, int]], changed: bool
    ) -> Iterator[list[Run]]:
        """Within, the optimizer has the twins in place of parameters, with their ``gradients``, which may be
        ``changed``; its ``step`` changes parameters and their state.

        ``buckets`` have the parameters that lie side by side in order, each with the elements of its padded shard.

        Raises:
            NotFlatError: it cannot; nothing has happened.
        """
        optimizer = self.optimizer
        self._prepare(gradients, buckets)
        before = [(group, group["params"], group.get("foreach")) for group in optimizer.param_groups]
        whole = optimizer.state
        optimizer.state = defaultdict(dict, {run.twin: dict(run.state) for run in self.runs if run.state})
        for i, (group, _, foreach) in enumerate(before):
            group["params"] = [run.twin for run in self.runs if run.group == i]
            if "foreach" in group and foreach is None and not group.get("fused"):
                group["foreach"] = False  # as on shards
        for run in self.runs:
            run.twin.grad = run.gradient([gradients.pop(parameter) for parameter in run.parameters], changed)
        try:
            yield self.runs
        finally:
            flat, optimizer.state = optimizer.state, whole
            for group, parameters, foreach in before:
                group["params"] = parameters
                if "foreach" in group:
                    group["foreach"] = foreach
            for run in self.runs:
                run.twin.grad = None
                self._keep(run, flat.get(run.twin, {}))
            self._known = self._found([parameter for run in self.runs for parameter in run.parameters])

    def _prepare(
        self, gradients: Mapping[nn.Parameter, torch.Tensor], buckets: Sequence[Mapping[nn.Parameter, int]]
    ) -> None:
        """Find the runs, unless they are as before."""
        parameters = [parameter for run in self.runs for parameter in run.parameters]
        as_before = gradients.keys() == {*parameters} and self._same(self._found(parameters))
        if as_before and all(map(_follow_numbers, self.runs)):
            return
        self.runs = []
        places = {
            p: i for i, group in enumerate(self.optimizer.param_groups) for p in group["params"] if p in gradients
        }
        alone = {parameter: 1 for bucket in buckets for parameter in bucket}
        candidates = [*buckets, *({p: local_tensor(p).numel()} for p in places if p not in alone)]
        runs = [run for bucket in candidates for run in self._runs_of(bucket, places)]
        for run in runs:
            self._join_state(run)
        self.runs = runs

    def _found(self, parameters: list[nn.Parameter]) -> tuple[list[Any], ...]:
        """All that the runs depend on: objects, and where shards are."""
        state = self.optimizer.state
        groups = chain.from_iterable(group["params"] for group in self.optimizer.param_groups)
        values = chain.from_iterable(map(_values, state.values()))
        places = list(map(torch.Tensor.data_ptr, map(local_tensor, parameters)))
        return [state, *groups], list(values), places

    def _same(self, found: tuple[list[Any], ...]) -> bool:
        if not self._known or found[-1] != self._known[-1]:
            return False
        pairs = zip(found[:-1], self._known[:-1], strict=True)
        return all(len(now) == len(before) and all(map(is_, now, before)) for now, before in pairs)

    def _runs_of(self, bucket: Mapping[nn.Parameter, int], places: Mapping[nn.Parameter, int]) -> Iterator[Run]:
        """The runs of parameters that follow on each other in a bucket, and are alike."""
        following: list[nn.Parameter] = []
        kind: Any = None
        for parameter in [*bucket, None]:
            of = None if parameter is None or parameter not in places else self._kind(parameter, places[parameter])
            if following and of != kind:
                yield from _as_runs(following, bucket, kind[0])
                following = []
            if of is not None and parameter is not None:
                following.append(parameter)
            kind = of

    def _kind(self, parameter: nn.Parameter, group: int) -> tuple[Any, ...]:
        """What parameters of a run have in common."""
        state, shard = self.optimizer.state.get(parameter) or {}, local_tensor(parameter)
        numbers: list[tuple[Any, ...]] = []
        for name, value in state.items():
            if name in _NUMBERS or not isinstance(value, torch.Tensor):
                numbers.append((name, value.item() if isinstance(value, torch.Tensor) else value))
            elif local_tensor(value).shape != shard.shape:
                raise NotFlatError
            else:
                numbers.append((name, value.dtype, str(value.device)))
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        return group, placements, shard.dtype, shard.device, tuple(numbers)

    def _join_state(self, run: Run) -> None:
        """Make the state of a run of those of its parameters, which become views of it."""
        states = [self.optimizer.state.get(parameter) or {} for parameter in run.parameters]
        for name, value in states[0].items():
            values = [state[name] for state in states]
            if not isinstance(value, torch.Tensor):
                run.state[name] = value
            elif name in _NUMBERS:
                run.state[name] = value.clone()
            else:
                locals_ = list(map(local_tensor, values))
                flat = view_of(locals_, run.elements)
                run.state[name] = packed(locals_, run.elements) if flat is None else flat
                if flat is not None:
                    continue
            self._distribute(run, name)

    def _keep(self, run: Run, state: dict[str, Any]) -> None:
        """Have parameters' state follow that of their run after a step."""
        for name, value in state.items():
            if name in run.numbers and isinstance(value, torch.Tensor) and value is run.state.get(name):
                run.numbers[name].copy_(value)
                run.versions[name] = run.numbers[name]._version
            elif run.state.get(name) is not value or name not in self.optimizer.state[run.parameters[0]]:
                run.state[name] = value
                self._distribute(run, name)
        run.state = state

    def _distribute(self, run: Run, name: str) -> None:
        """Give each parameter its part of the run's state of this name."""
        value, state = run.state[name], self.optimizer.state
        if not isinstance(value, torch.Tensor):
            for parameter in run.parameters:
                state[parameter][name] = value
        elif name in _NUMBERS:
            run.numbers[name] = value.detach().reshape(1).repeat(len(run.parameters))
            run.versions[name] = run.numbers[name]._version
            for parameter, number in zip(run.parameters, run.numbers[name].unbind(), strict=True):
                state[parameter][name] = number
        else:
            for parameter, shard, piece in zip(run.parameters, run.shards, value.split(run.elements), strict=True):
                own = piece[: shard.numel()].view(shard.shape)
                state[parameter][name] = (
                    torch_api.placed(own, parameter.device_mesh, parameter.placements, parameter.shape)
                    if isinstance(parameter, DTensor)
                    else own
                )


def _as_runs(parameters: list[nn.Parameter], bucket: Mapping[nn.Parameter, int], group: int) -> Iterable[Run]:
    """One run of parameters, if they lie side by side as the bucket says, else one of each."""
    shards = list(map(local_tensor, parameters))
    elements = [*(bucket[parameter] for parameter in parameters[:-1]), shards[-1].numel()]
    flat = view_of(shards, elements)
    if flat is not None:
        return [Run(group, parameters, elements, nn.Parameter(flat))]
    return [
        Run(group, [parameter], [shard.numel()], nn.Parameter(shard.view(-1)))
        for parameter, shard in zip(parameters, shards, strict=True)
    ]


def _follow_numbers(run: Run) -> bool:
    """Follow numbers that a step of each parameter has changed; False if they differ now."""
    for name, numbers in run.numbers.items():
        if numbers._version != run.versions[name]:
            if not (numbers == numbers[0]).all():
                return False
            run.state[name].copy_(numbers[0])
            run.versions[name] = numbers._version
    return True
