"""An optimizer's step on parameters that lie side by side: one flat tensor for all of them, as if it were a parameter.

Classes that compute element by element, torch's (:mod:`shardgraph.module.local_step`) and those of users for which that
can be shown (:mod:`shardgraph.module.by_element`), give the same numbers for many parameters in one tensor as for each
alone. So a step takes as many kernels for a bucket as for one parameter, and no Python for each. The arithmetic is the
optimizer's own, in the implementation that it has chosen (``foreach``, ``fused``); where it has chosen none, a backend
that compiles kernels has torch's fused ones, of which each reads and writes everything once.

The optimizer stays the owner of its state: ``optimizer.state`` has every parameter with tensors of its own, which are
views of the flat ones, and ``step`` and the like a number for each.
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain, groupby
from operator import is_, methodcaller
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgraph import torch_api
from shardgraph.cost_models.optimizers import SMALL_SHARD, STORED_TOGETHER, UPDATED_TOGETHER, in_stretches
from shardgraph.module.by_element import PLAIN, STEPS, Kind, NotByElementError, Watched
from shardgraph.runtime.backends import eager
from shardgraph.runtime.executor import State
from shardgraph.runtime.side_by_side import packed, view_of
from shardgraph.torch_api import local_tensor

_NUMBERS = frozenset({"step", "mu_product", "eta", "mu"})
"""The state that torch's element-wise optimizers have once for a parameter, whatever its shape."""


_values = methodcaller("values")
log = logging.getLogger(__name__)


_ALIGNED = 16
"""Bytes to which a GPU's kernels like parameters to be aligned: those of other sizes are stored behind all others."""


class NotFlatError(Exception):
    """The optimizer has state that does not go with the elements of parameters."""


@dataclass(eq=False)
class Run:
    """Parameters of one group that have the same state, and mostly lie side by side: one ``twin`` for all."""

    group: int
    names: list[str]
    parameters: list[nn.Parameter]
    elements: list[int]  # those of each with its padding; the last one has none
    twin: nn.Parameter
    scattered: bool = False  # not side by side: the twin is a copy during a step
    state: dict[str, Any] = field(default_factory=dict)
    numbers: dict[str, torch.Tensor] = field(default_factory=dict)  # what of the state is a number, of each parameter
    versions: dict[str, int] = field(default_factory=dict)

    @property
    def shards(self) -> list[torch.Tensor]:
        """Of each parameter."""
        return list(map(local_tensor, self.parameters))

    @property
    def can_be_fused(self) -> bool:
        """Whether torch's fused kernels take it: they count steps in a float32 number beside the parameters."""
        numbers = [value for name, value in self.state.items() if name in _NUMBERS and isinstance(value, torch.Tensor)]
        beside = all(each.device == self.twin.device and each.dtype == torch.float32 for each in numbers)
        return beside and self.twin.is_floating_point()

    def gather(self) -> None:
        """Give the twin the values of its parameters, if it does not share their memory."""
        if self.scattered:
            self.twin.data = packed(self.shards, self.elements)

    def scatter(self) -> None:
        """Give parameters the values of the twin."""
        if self.scattered:
            shards, pieces = self.shards, self.twin.detach().split(self.elements)
            views = [piece.view(shard.shape) for piece, shard in zip(pieces, shards, strict=True)]
            torch._foreach_copy_(shards, views)
            self.twin.data = self.twin.new_empty(0)

    def gradient(self, gradients: Sequence[torch.Tensor], changed: bool) -> torch.Tensor:
        """The gradients as that of the twin: without a copy, if they lie side by side and may be ``changed``."""
        if len(gradients) == 1:
            (only,) = gradients
            flat = only.clone(memory_format=torch.contiguous_format) if changed and torch_api.is_viewed(only) else only
            flat = flat.reshape(-1)
        else:
            view = self._view(gradients)
            flat = packed(gradients, self.elements) if view is None else view
        return flat if flat.dtype == self.twin.dtype else flat.to(self.twin.dtype)

    def lie_together(self, gradients: Sequence[torch.Tensor]) -> bool:
        """Whether the gradients, if they do not change, are those of the twin without a copy."""
        return len(gradients) == 1 or self._view(gradients) is not None

    def _view(self, gradients: Sequence[torch.Tensor]) -> torch.Tensor | None:
        padded = any(g.numel() < count for g, count in zip(gradients, self.elements, strict=True))
        return None if padded else view_of(gradients, self.elements)


class FlatUpdate:
    """An optimizer whose parameters are in runs."""

    def __init__(self, optimizer: torch.optim.Optimizer, fuses: bool) -> None:
        self._optimizer = weakref.ref(optimizer)
        self._fuses = fuses  # whether what may be one kernel shall be one, which rounds otherwise
        self.in_parts = True  # whether the step may be called for some runs after others
        self.runs: list[Run] = []
        self.run_of: dict[str, Run] = {}  # by parameter
        self.memory: tuple[bool, frozenset[int]] | None = None  # what others know of that of parameters in these runs
        self._given: tuple[Any, ...] = ()
        self._parameters: list[nn.Parameter] = []
        self._known: tuple[list[Any], ...] = ()
        self._stateful = 0  # parameters with state when the runs were found

    @classmethod
    def of(cls, optimizer: torch.optim.Optimizer, state: State) -> FlatUpdate:
        """That of an optimizer of a module's parameters, the same for every step."""
        flat: FlatUpdate | None = state.updates.get(optimizer)
        if flat is None:
            flat = state.updates[optimizer] = cls(optimizer, fuses=state.backend is not eager.backend)
        return flat

    @property
    def optimizer(self) -> torch.optim.Optimizer:
        """Whose step it is."""
        optimizer = self._optimizer()
        assert optimizer is not None
        return optimizer

    @cached_property
    def watched(self) -> Watched | None:
        """What is known of its step, if it is of a class of a user's own."""
        own = STEPS.get(type(self.optimizer))
        return None if own is None else Watched(self.optimizer, own)

    def prepare(
        self,
        names: Iterable[str],
        state: State,
        places: Callable[[], Mapping[str, Any]],
        least: int = UPDATED_TOGETHER,
    ) -> None:
        """Find the runs of the parameters with these names, which have gradients, unless they are as before.

        A run has as many bytes as the largest parameter at most, or ``least`` if that is more. Parameters whose shards
        are not beside others yet are stored in the order of the ``places`` of their gradients.

        Raises:
            NotFlatError: the optimizer has state that does not go with the elements of parameters, or is one of a
                user's own for which that cannot be shown.
        """
        if self.watched is not None and self.watched.reason:
            raise NotFlatError
        names, parameters = tuple(names), state.layout.parameters
        given = names, least
        _store(names, places, self.optimizer, state)
        as_before = given == self._given and parameters is self._parameters and self._same(self._found())
        self._stateful = len(self.optimizer.state)
        if not as_before or not all(map(_follow_numbers, self.runs)):
            self._find_runs(names, given, state)
        if self.watched is not None:
            self._watch(self.watched)

    def _watch(self, watched: Watched) -> None:
        """Have the next step of a user's own optimizer checked.

        Raises:
            NotFlatError: it cannot be shown to compute element by element.
        """
        kinds: Counter[Kind] = Counter()
        for run in self.runs:
            kinds[Kind.of(run.group, run.twin, run.state)] += len(run.names)
        try:
            self.in_parts = watched.check(self.optimizer, kinds)
        except NotByElementError as error:
            log.info("%s steps on each parameter as it is: %s", type(self.optimizer).__name__, error)
            raise NotFlatError from error

    def _find_runs(self, names: Sequence[str], given: tuple[Any, ...], state: State) -> None:
        parameters, least = state.layout.parameters, given[-1]
        self.runs, self.run_of, self.memory = [], {}, None
        self._given, self._parameters = given, parameters
        fqns = {id(state.layout.parameter(fqn)): fqn for fqn in names}
        groups = self.optimizer.param_groups
        places = {fqns[id(p)]: (p, i) for i, group in enumerate(groups) for p in group["params"] if id(p) in fqns}
        buckets = [*state.stored.buckets, *({fqn: 0} for fqn in places if not state.stored.has(fqn))]
        most = max([least, *(local_tensor(parameter).nbytes for parameter, _ in places.values())])
        runs = [run for bucket in buckets for run in self._runs_of(bucket, places, most)]
        for run in runs:
            self._join_state(run)
        self.runs, self.run_of = runs, {name: run for run in runs for name in run.names}

    @contextmanager
    def applied(self, gradients: dict[str, torch.Tensor], changed: bool) -> Iterator[list[Run]]:
        """Within, the optimizer has the twins of all runs, as :meth:`only`."""
        with self.settled(), self.only(self.runs, gradients, changed):
            yield self.runs

    @contextmanager
    def settled(self) -> Iterator[None]:
        """Have a step end with :meth:`settle`, whatever happens within."""
        try:
            yield
        finally:
            self.settle()

    def stretches(self, gradients: Mapping[str, torch.Tensor]) -> list[list[Run]]:
        """The runs in the steps that they may be taken in one after the other: each whose gradients have to be copied
        is a step of its own, so that there is one copy at a time, and all others are one."""
        if len(self.runs) < 2:
            return [self.runs]
        copied: list[Run] = []
        others: list[Run] = []
        for run in self.runs:
            together = run.lie_together([gradients[name] for name in run.names])
            (others if together else copied).append(run)
        return [*([others] if others else []), *([run] for run in copied)]

    @contextmanager
    def only(self, runs: Sequence[Run], gradients: dict[str, torch.Tensor], changed: bool) -> Iterator[None]:
        """Within, the optimizer has the twins of some runs in place of parameters, with their gradients, which are
        taken from ``gradients`` and may be ``changed``; its ``step`` changes parameters and their state.

        After the last of a step's runs there must be a call of :meth:`settle`.
        """
        optimizer = self.optimizer
        before: list[tuple[dict[str, Any], dict[str, Any]]] = []
        whole = optimizer.state
        optimizer.state = defaultdict(dict, {run.twin: dict(run.state) for run in runs if run.state})
        for i, group in enumerate(optimizer.param_groups):
            own = [run for run in runs if run.group == i]
            given = {"params": [run.twin for run in own], **self._implementation(group, own)}
            before.append((group, {name: group[name] for name in given}))
            group |= given
        for run in runs:
            run.gather()
            run.twin.grad = run.gradient([gradients.pop(name) for name in run.names], changed)
        try:
            yield
        finally:
            flat, optimizer.state = optimizer.state, whole
            for group, replaced in before:
                group |= replaced
            for run in runs:
                run.twin.grad = None
                run.scatter()
                self._keep(run, flat.get(run.twin, {}))

    def _implementation(self, group: Mapping[str, Any], runs: Sequence[Run]) -> dict[str, bool]:
        """What a group of torch's without an implementation of the user's choice computes these runs by: one kernel for
        each if torch has it and this update fuses, or else those of a parameter."""
        if self.watched is not None or group.get("foreach") is not None or group.get("fused"):
            return {}
        if self._fuses and group.get("fused", False) is None and all(run.can_be_fused for run in runs):
            return {"fused": True}
        return {"foreach": False} if "foreach" in group else {}

    def settle(self) -> None:
        """Have the optimizer's state in the order of its parameters, as a step of each would, and remember it."""
        whole = self.optimizer.state
        if len(whole) > self._stateful:
            for parameter in chain.from_iterable(group["params"] for group in self.optimizer.param_groups):
                if parameter in whole:
                    whole[parameter] = whole.pop(parameter)
        self._known = self._found()

    def _found(self) -> tuple[list[Any], ...]:
        """All that the runs depend on: objects, and where shards are."""
        state, groups = self.optimizer.state, self.optimizer.param_groups
        values = chain.from_iterable(map(_values, state.values()))
        shards = chain.from_iterable(run.shards for run in self.runs)
        objects = [state, *chain.from_iterable(group["params"] for group in groups)]
        return objects, list(values), list(map(torch.Tensor.data_ptr, shards))

    def _same(self, found: tuple[list[Any], ...]) -> bool:
        if not self._known or found[-1] != self._known[-1]:
            return False
        pairs = zip(found[:-1], self._known[:-1], strict=True)
        return all(len(now) == len(before) and all(map(is_, now, before)) for now, before in pairs)

    def _runs_of(
        self, bucket: Mapping[str, int], places: Mapping[str, tuple[nn.Parameter, int]], most: int
    ) -> Iterator[Run]:
        """The runs, of up to ``most`` bytes, of parameters that follow on each other in a bucket, and are alike."""

        def kind(fqn: str) -> Any:
            return self._kind(*places[fqn]) if fqn in places else None

        stretches: dict[Any, list[list[str]]] = {}
        for of, alike in groupby(bucket, kind):
            if of is not None:
                stretches.setdefault(of, []).append(list(alike))
        for of, several in stretches.items():
            for names in _pieces(list(chain.from_iterable(several)), lambda fqn: places[fqn][0], bucket, most):
                yield _as_run(names, [places[fqn][0] for fqn in names], [bucket[fqn] for fqn in names], of[0])

    def _kind(self, parameter: nn.Parameter, group: int) -> tuple[Any, ...]:
        """What parameters of a run have in common."""
        state, shard = self.optimizer.state.get(parameter) or {}, local_tensor(parameter)
        if self.watched is not None and (not shard.dim() or shard.is_complex()):
            raise NotFlatError  # its dtype gives way to that of numbers; its magnitude is rounded by place
        numbers: list[tuple[Any, ...]] = []
        for name, value in state.items():
            if self.watched is not None and not isinstance(value, (torch.Tensor, *PLAIN)):
                raise NotFlatError
            if self._is_number(name, value) or not isinstance(value, torch.Tensor):
                numbers.append((name, value.item() if isinstance(value, torch.Tensor) else value))
            elif local_tensor(value).shape != shard.shape:
                raise NotFlatError
            else:
                numbers.append((name, value.dtype, str(value.device)))
        placements = parameter.placements if isinstance(parameter, DTensor) else ()
        return group, placements, shard.dtype, shard.device, tuple(numbers)

    def _is_number(self, name: str, value: Any) -> bool:
        """Whether a tensor of the state is a number of its parameter, whatever shape that has."""
        return name in _NUMBERS if self.watched is None else isinstance(value, torch.Tensor) and not value.dim()

    def _join_state(self, run: Run) -> None:
        """Make the state of a run of those of its parameters, which become views of it."""
        states = [self.optimizer.state.get(parameter) or {} for parameter in run.parameters]
        for name, value in states[0].items():
            values = [state[name] for state in states]
            if not isinstance(value, torch.Tensor):
                run.state[name] = value
            elif self._is_number(name, value):
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
            same = run.state.get(name) is value
            if same and name in run.numbers:
                run.numbers[name].copy_(value)
                run.versions[name] = run.numbers[name]._version
            elif not same or name not in self.optimizer.state[run.parameters[0]]:
                run.state[name] = value
                self._distribute(run, name)
        run.state = state

    def _distribute(self, run: Run, name: str) -> None:
        """Give each parameter its part of the run's state of this name."""
        value, state = run.state[name], self.optimizer.state
        if not isinstance(value, torch.Tensor):
            for parameter in run.parameters:
                state[parameter][name] = value
        elif self._is_number(name, value):
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


def _pieces(
    names: list[str], parameter: Callable[[str], nn.Parameter], bucket: Mapping[str, int], most: int
) -> Iterator[list[str]]:
    """Stretches of parameters of up to so many bytes, without padding between them, which state would have too."""
    piece: list[str] = []
    filled = 0
    for fqn in names:
        shard = local_tensor(parameter(fqn))
        if piece and filled + shard.nbytes > most:
            yield piece
            piece, filled = [], 0
        piece.append(fqn)
        filled += shard.nbytes
        if bucket[fqn] > shard.numel():
            yield piece
            piece, filled = [], 0
    if piece:
        yield piece


def _as_run(names: list[str], parameters: list[nn.Parameter], elements: list[int], group: int) -> Run:
    """One run of parameters, which lie side by side if possible with so many elements each."""
    shards = list(map(local_tensor, parameters))
    flat = view_of(shards, [*elements[:-1], shards[-1].numel()])
    if flat is not None:
        return Run(group, names, parameters, [*elements[:-1], shards[-1].numel()], nn.Parameter(flat))
    if len(shards) > 1:  # others are between them: copies for a step take less time than kernels for each
        exact = [shard.numel() for shard in shards]
        return Run(group, names, parameters, exact, nn.Parameter(packed(shards, exact)), scattered=True)
    return Run(group, names, parameters, [shards[0].numel()], nn.Parameter(shards[0].view(-1)))


def _follow_numbers(run: Run) -> bool:
    """Follow numbers that a step of each parameter has changed; False if they differ now."""
    for name, numbers in run.numbers.items():
        if numbers._version != run.versions[name]:
            if not (numbers == numbers[0]).all():
                return False
            run.state[name].copy_(numbers[0])
            run.versions[name] = numbers._version
    return True


def as_they_lie(gradients: Mapping[str, torch.Tensor]) -> dict[str, Any]:
    """The order of gradients by name, the same on all ranks: of storages as given, and in each that of addresses."""
    first: dict[int, int] = {}
    storages = [gradient.untyped_storage().data_ptr() for gradient in gradients.values()]
    for i, storage in enumerate(storages):
        first.setdefault(storage, i)
    return {
        fqn: (first[storage], gradient.data_ptr())
        for (fqn, gradient), storage in zip(gradients.items(), storages, strict=True)
    }


def _store(
    names: Sequence[str], places: Callable[[], Mapping[str, Any]], optimizer: torch.optim.Optimizer, state: State
) -> None:
    """Store small shards side by side that are not yet: those of each group, in the order of gradients' places."""
    tried, parameter = state.stored.tried, state.layout.parameter
    if tried.issuperset(names):
        return
    groups = {id(each): i for i, group in enumerate(optimizer.param_groups) for each in group["params"]}
    new = (fqn for fqn in names if fqn not in tried and not state.stored.has(fqn) and id(parameter(fqn)) in groups)
    rest = {fqn: local_tensor(parameter(fqn)) for fqn in new}
    tried.update(names)

    def kind(fqn: str) -> tuple[int, str, str, str]:
        placements = getattr(parameter(fqn), "placements", None)
        return groups[id(parameter(fqn))], str(rest[fqn].dtype), str(rest[fqn].device), str(placements)

    at = places()
    small = [fqn for fqn, shard in rest.items() if 0 < shard.nbytes <= SMALL_SHARD]

    def unaligned(fqn: str) -> bool:
        return rest[fqn].device.type != "cpu" and rest[fqn].nbytes % _ALIGNED > 0

    small.sort(key=lambda fqn: (kind(fqn), unaligned(fqn), at[fqn]))
    for _, alike in groupby(small, kind):
        for bucket in in_stretches(((fqn, rest[fqn].nbytes) for fqn in alike), STORED_TOGETHER):
            if len(bucket) > 1:
                state.stored.store({fqn: rest[fqn].numel() for fqn in bucket}, parameter)
