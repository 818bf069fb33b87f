"""Ranks with unequally many batches, as with ``DistributedDataParallel.join``.

Inside of the block every rank says what it does next, in one small collective, before each part of a step that
communicates. A rank that has no more batches leaves the block, and there does what the others say, with gradients of
zero: it gathers parameters for them, takes its part of the gradients, and steps its optimizer, with the options that
theirs have by now (a schedule is not stepped on it).
"""

from __future__ import annotations

import functools
import gc
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from shardgraph import torch_api
from shardgraph.errors import RankMismatchError, ShardGraphError
from shardgraph.module.programs import Programs
from shardgraph.plans.plan import Plan
from shardgraph.runtime.autograd import Differentiable
from shardgraph.runtime.executor import State
from shardgraph.runtime.loss_weight import weight_by_elements

Event = tuple[Any, ...]
"""What ranks do next: its name, and what it is done with."""


class Module(Protocol):
    """What is needed of a compiled module."""

    plan: Plan
    _state: State
    _programs: Programs

    def parameters(self) -> Iterator[torch.nn.Parameter]: ...
    def zero_grad(self) -> None: ...
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor: ...


@contextmanager
def joined(module: Module, over_all: bool, throw: bool) -> Iterator[None]:
    """See :meth:`shardgraph.module.as_wrapped.AsWrapped.join`."""
    plan, state = module.plan, module._state
    if not plan.is_of_data or plan.copies > 1 or plan.gradient_statistics or plan.offload.parameters:
        raise ShardGraphError(
            f"join() cannot be under plan {plan.name!r}: a rank without data takes part in gathers of parameters and "
            "in reductions of gradients alone, under ddp, zero1, zero2, fsdp and hsdp. Give all ranks equally many "
            "batches"
        )
    if state.mesh is None or plan.data_size == 1:
        yield
        return
    if state.hook is not None:
        raise ShardGraphError(
            "join() cannot be with a communication hook, which ranks without data would have to call with the others: "
            "give all ranks equally many batches, or reduce without a hook"
        )
    if state.joining is not None:
        raise ShardGraphError("join() is inside of another join() of the same module")
    joining = Joining(module, over_all, throw)
    _ACTIVE.add(joining)
    _watch_steps()
    state.joining = joining
    try:
        yield
        joining.follow()
    finally:
        state.joining = None
        _ACTIVE.discard(joining)


def refuse_inside(what: str) -> None:
    """Raise ShardGraphError inside of ``join()``: ``what`` communicates, and ranks without data cannot follow."""
    if _ACTIVE:
        raise ShardGraphError(
            f"{what} communicates, and ranks that have run out of data do not take part in it: inside of join() call "
            "the module itself, its clip_grad_norm_ and steps of optimizers, and anything else before or after"
        )


class Joining:
    """One block of :func:`joined` on this rank.

    ``missing`` is how many ranks had no more batches when this one last asked, and ``factor`` by what it multiplies its
    loss for them.
    """

    def __init__(self, module: Module, over_all: bool, throw: bool) -> None:
        self._module, self._over_all, self._throw = module, over_all, throw
        assert module._state.mesh is not None
        axes = tuple(axis for axis, _ in module.plan.data_mesh)
        self._group = torch_api.group_along(module._state.mesh, axes)
        self._ranks = dist.get_process_group_ranks(self._group)
        self._optimizers: list[torch.optim.Optimizer] = []  # in the order of their first step
        self._following = False
        self.missing, self.factor = 0, 1.0

    def announce(self, event: Callable[[], Event]) -> bool:
        """Say what this rank does next, which all do that have batches; returns whether there are others."""
        if self._following:
            return False
        active = self._gather(1)
        self.missing = active.count(0)
        if not self.missing:
            return False
        if self._throw:
            raise RuntimeError("a rank has run out of data, and join() was asked to stop all ranks then")
        self.factor = 1.0 if self._over_all else len(active) / active.count(1)
        mine = event()
        first = self._from(active.index(1), mine)
        self._agree("" if first[:2] == mine[:2] else f"it is at {_named(mine)}, and another rank at {_named(first)}")
        return True

    def follow(self) -> None:
        """Take part in what ranks do that still have batches, until none has any."""
        self._following = True
        for gradients in self._module._state.accumulated:
            gradients.clear()  # as the gradients of DistributedDataParallel are that were not reduced
        while 1 in (active := self._gather(0)):
            if self._throw:
                raise RuntimeError("this rank has run out of data, and join() was asked to stop all ranks then")
            event = self._from(active.index(1), None)
            why = self._why_not(event)
            self._agree(why)
            self._perform(event)

    def watched(self, optimizer: torch.optim.Optimizer) -> None:
        """Say that an optimizer steps, if it trains this module."""
        own = {*map(id, self._module.parameters())}
        if self._following or not any(id(each) in own for group in optimizer.param_groups for each in group["params"]):
            return
        if optimizer not in self._optimizers:
            self._optimizers.append(optimizer)
        number = self._optimizers.index(optimizer)
        self.announce(lambda: ("step", number, [_options(group) for group in optimizer.param_groups]))

    def _why_not(self, event: Event) -> str:
        """Why this rank cannot take part in an event, if it cannot."""
        kind, *given = event
        if kind in ("forward", "backward", "local", "switch"):
            unknown = [text for text in (given[0] if kind == "switch" else given[:1]) if self._program(text) is None]
            if unknown:
                return (
                    "it has no program for a call that other ranks make, since it never made such a call: call the "
                    "module once on every rank like that, or give shardgraph.compile example inputs"
                )
            try:
                if kind != "switch" and (program := self._program(given[0])) is not None:
                    program.shadow_inputs(kind)
            except ShardGraphError as error:
                return str(error)
        if kind == "step" and not self._finds(given[0]):
            return "it has never stepped the optimizer that other ranks step now"
        return ""

    def _finds(self, number: int) -> bool:
        """Whether this rank has the optimizer of a number: it has stepped it, or has one alone that it has not."""
        if number == len(self._optimizers):
            new = [each for each in optimizers_of(self._module.parameters()) if each not in self._optimizers]
            self._optimizers += new if len(new) == 1 else []
        return number < len(self._optimizers)

    def _perform(self, event: Event) -> None:
        module, (kind, *given) = self._module, event
        if kind == "switch":
            module._programs.switches.agreed = given[0]
        elif kind == "forward":
            self._known(given[0]).shadow_forward()
        elif kind in ("backward", "local"):
            if given[1]:
                module.zero_grad()
            self._known(given[0]).shadow_backward(local=kind == "local")
        elif kind == "weigh":
            weight_by_elements(0.0, module.plan, module._state)
        elif kind == "clip":
            module.clip_grad_norm_(*given)
        elif kind == "step":
            optimizer = self._optimizers[given[0]]
            for group, options in zip(optimizer.param_groups, given[1], strict=True):
                group.update(options)
            optimizer.step()

    def _program(self, communication: str) -> Differentiable | None:
        """A program of this rank that communicates so."""
        compiled = (each.executor for variants in self._module._programs.kept.values() for each in variants)
        known = (each for each in compiled if each.program.communication == communication)
        return next((each for each in known if isinstance(each, Differentiable)), None)

    def _known(self, communication: str) -> Differentiable:
        program = self._program(communication)
        assert program is not None
        return program

    def _gather(self, value: int) -> list[int]:
        """The numbers of all ranks."""
        mine = torch.tensor([value], device=self._module._state.device)
        gathered = [torch.empty_like(mine) for _ in self._ranks]
        dist.all_gather(gathered, mine, group=self._group)
        return torch.cat(gathered).tolist()

    def _from(self, place: int, event: Event | None) -> Event:
        sent = [event]
        dist.broadcast_object_list(sent, self._ranks[place], self._group, self._module._state.device)
        assert sent[0] is not None
        return sent[0]

    def _agree(self, why_not: str) -> None:
        able = self._gather(int(not why_not))
        if all(able):
            return
        refused = [rank for rank, each in zip(self._ranks, able, strict=True) if not each]
        reason = self._from(able.index(0), (why_not,))[0]
        raise RankMismatchError(f"inside of join() rank {refused[0]} cannot go on with the others: {reason}")


def optimizers_of(parameters: Iterable[torch.nn.Parameter]) -> list[torch.optim.Optimizer]:
    """The optimizers that live and have some of these parameters: a rank without any batch has stepped none."""
    own = {*map(id, parameters)}
    living = [each for each in gc.get_objects() if issubclass(type(each), torch.optim.Optimizer)]
    return [each for each in living if any(id(p) in own for group in each.param_groups for p in group["params"])]


def _options(group: dict[str, Any]) -> dict[str, Any]:
    """The options of a group of parameters, such as the learning rate that a schedule has set."""
    return {name: value for name, value in group.items() if name != "params"}


def _named(event: Event) -> str:
    names = {"switch": "another program's forward", "clip": "clip_grad_norm_", "step": "the step of an optimizer"}
    return names.get(event[0], str(event[0]))


_ACTIVE: weakref.WeakSet[Joining] = weakref.WeakSet()


@functools.cache
def _watch_steps() -> None:
    def before(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        for joining in list(_ACTIVE):
            joining.watched(optimizer)

    torch_api.before_every_step(before)
