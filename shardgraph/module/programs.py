"""The programs of a compiled module: one for each kind of call, compiled at its first, and found again."""

from __future__ import annotations

import operator
import time
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
from torch import nn

from shardgraph import torch_api
from shardgraph.capture.captures import Call
from shardgraph.capture.numbers import input_key
from shardgraph.errors import CaptureError, RankMismatchError, ShardGraphError
from shardgraph.garbage import collected_later
from shardgraph.module.decided import Decided
from shardgraph.module.numbers import Numbers
from shardgraph.module.program_key import ProgramKey
from shardgraph.module.recompiled import Recompiled
from shardgraph.module.switches import Switches
from shardgraph.passes.lowering import STAGES
from shardgraph.passes.program import Program
from shardgraph.plans.plan import Plan
from shardgraph.progress import Progress
from shardgraph.runtime.agreement import Agreement
from shardgraph.runtime.executor import Executor, State
from shardgraph.runtime.joined import announce

_P = ParamSpec("_P")
_T = TypeVar("_T")
_MAX_PROGRAMS = 64  # keys in the cache, which evicts the least recently used
_MAX_VARIANTS = 8  # programs of one key, for different attributes of the model
_TRAINS_OTHERS = (
    "Parameters require a gradient that did not when the model was compiled, and other ranks do not see it, since "
    "named_parameters() of a pipeline has those of a rank's own stages: call requires_grad_() of modules, on all "
    "ranks, or compile before anything is frozen"
)


class Compiled(NamedTuple):
    """A program that can run, and the conditions on the model under which it is the model's."""

    executor: Executor
    guards: Any


class Programs:
    """Programs by all that they depend on: the inputs of a call, the state of the model, and torch's own.

    Ranks compile by themselves, and switch together to programs that communicate anything else; see
    :class:`~shardgraph.module.switches.Switches`. A rank of a pipeline may not see which parameters of other stages are
    frozen, so there a program goes on to compute the gradients of all that were trained before.
    """

    def __init__(
        self,
        model: nn.Module,
        plan: Plan,
        state: State,
        agreement: Agreement,
        make: Callable[[Call, Callable[[str], None]], Program],
        bind: Callable[[Program], Executor],
        padded: bool,
        progress: bool | None,
    ) -> None:
        self._model, self._state, self._agreement = model, state, agreement
        self._make, self._bind = _weakly(make), _weakly(bind)  # of what owns this
        self._name, self._progress = plan.name, progress
        self.trained = state.layout.trained if plan.pipeline is not None else ()
        self._numbers, self._decided = Numbers(), Decided()
        self._recompiled = Recompiled(model, self._decided, padded)
        self.switches = Switches(plan, agreement)
        self.kept = OrderedDict[ProgramKey, list[Compiled]]()
        self._latest: tuple[list[ProgramKey], list[Compiled]] | None = None

    def forget(self) -> None:
        """Drop all programs."""
        self.kept.clear()
        self._latest = self.switches.agreed = None
        if self.trained:
            self.trained = self._state.layout.trained

    def moved(self) -> None:
        """The model's buffers have been sharded: programs from before are for these."""
        buffers = self._state.layout.buffers
        self.kept = OrderedDict((key._replace(buffers=buffers), made) for key, made in self.kept.items())
        if self._latest is not None:
            keys, made = self._latest
            self._latest = [key._replace(buffers=buffers) for key in keys], made

    @property
    def latest(self) -> tuple[ProgramKey, Executor]:
        """What ran latest, or was compiled for it, and its key.

        Raises:
            ShardGraphError: nothing has been compiled.
        """
        if self._latest is None:
            raise ShardGraphError(
                "nothing has been compiled yet: call the module once, or give example_inputs to shardgraph.compile"
            )
        (key, *_), (compiled, *_) = self._latest
        return key, compiled.executor

    def lift(self, leaves: list[Any], spec: Any) -> list[Any]:
        """The flattened inputs as programs take them, some numbers as tensors."""
        return self._numbers.lift(leaves, spec)

    def set_attributes(self) -> None:
        """Set the attributes that the latest programs' forward sets to constants, as the original would have by now.

        The next call expects these, and those that were set to results.
        """
        for compiled in {*self._latest[1]} if self._latest is not None else ():
            joint = compiled.executor.program.joint
            for attribute in joint.attributes:
                attribute.repeat(self._model)
            compiled.guards.follow()
            if joint.results or joint.replaced:
                self._state.layout.follow()

    def of(self, calls: Sequence[list[Any]], spec: Any, loss_fn: Callable[..., Any] | None) -> list[Any]:
        """The executables for calls with these flattened inputs, all of one structure, compiled if they are not yet."""
        for leaves in calls:
            self._numbers.see(leaves, spec)
        keys = self._keys(calls, spec, loss_fn)
        latest, compiled = self._latest or (None, [])
        if latest == keys and all(each.guards.hold for each in {*compiled}):
            return [each.executor for each in compiled]
        shown = [key.described(self._changed(key)) for key in dict.fromkeys(keys)]
        try:
            keys, compiled = self._programs_of(keys, calls, spec, loss_fn)
        except Exception as error:  # of any kind: the other ranks must not wait for this one
            self._agreement.agree("the compiled program", "\n".join(shown), error)
            raise
        told = (line for key in dict.fromkeys(keys) for line in self._decided.told(key))
        text = "\n".join([*shown, *told])
        compiled = self._switched(keys, compiled, text)
        self._agreement.show(text)
        self._latest = keys, compiled
        return [each.executor for each in compiled]

    def _switched(self, keys: list[ProgramKey], compiled: list[Compiled], text: str) -> list[Compiled]:
        """These programs, in the order of collectives that ranks have, once all may run them."""
        switches, programs = self.switches, [each.executor.program for each in compiled]
        communication = switches.communication(keys, programs)
        if communication and communication != switches.agreed:
            if not announce(self._state, lambda: ("switch", communication)):
                try:
                    compiled = self._replaced(compiled, switches.agree(keys, programs, text))
                except RankMismatchError as error:
                    if self._trains_others(keys[0]):
                        raise RankMismatchError(f"{error}\n{_TRAINS_OTHERS}") from error
                    raise
            switches.agreed = switches.communication(keys, [each.executor.program for each in compiled])
        return compiled

    def _trains_others(self, key: ProgramKey) -> bool:
        """Whether this stage of a pipeline trains other parameters than at its last call."""
        return bool(self.trained and self._latest and self._latest[0][0].trained != key.trained)

    def _replaced(self, compiled: list[Compiled], programs: list[Program]) -> list[Compiled]:
        """The same with these programs in the places of theirs, also where they are kept."""
        changed = {
            each: Compiled(self._bind(program), each.guards)
            for each, program in {*zip(compiled, programs, strict=True)}
            if each.executor.program is not program
        }
        for variants in self.kept.values():
            variants[:] = [changed.get(each, each) for each in variants]
        return [changed.get(each, each) for each in compiled]

    def _programs_of(
        self, keys: list[ProgramKey], calls: Sequence[list[Any]], spec: Any, loss_fn: Callable[..., Any] | None
    ) -> tuple[list[ProgramKey], list[Compiled]]:
        """A program for each call, compiled if it is not yet, on this rank alone; and their keys, which may have
        changed by that."""
        made = dict[ProgramKey, Compiled]()
        for key, leaves in zip(keys, calls, strict=True):
            if key not in made and (valid := self._valid(key)) is not None:
                made[key] = valid
            elif key not in made:
                start = time.perf_counter()
                made[key] = self._compile(leaves, spec, loss_fn)
                self._decided.learn(key, made[key].executor.program.joint.conditions)
                (after,) = self._keys([leaves], spec, loss_fn)
                self._recompiled.tell(after, time.perf_counter() - start, self.kept, self._changed(after))
                self._recompiled.look(made[key].executor.program)
                self._keep(after, made[key])
                if after != key:  # it has more conditions, or its numbers cannot be lifted, and all keys have changed
                    return self._programs_of(self._keys(calls, spec, loss_fn), calls, spec, loss_fn)
            self.kept.move_to_end(key)
        return keys, [made[key] for key in keys]

    def _valid(self, key: ProgramKey) -> Compiled | None:
        """The program of this key for the model as it is now, if it has been compiled."""
        return next((each for each in self.kept.get(key, ()) if each.guards.hold), None)

    def _changed(self, key: ProgramKey) -> str:
        """What has changed on the model since the latest program of this key was compiled."""
        return self.kept[key][-1].guards.failing if key in self.kept else ""

    def _keep(self, key: ProgramKey, compiled: Compiled) -> None:
        variants = self.kept.setdefault(key, [])
        if len(variants) == _MAX_VARIANTS:
            warnings.warn(
                f"{_MAX_VARIANTS} programs have been compiled for the same inputs, since the model changes between "
                f"calls (lately {variants.pop(0).guards.failing}). Give what changes to forward as an input",
                stacklevel=2,
            )
        variants.append(compiled)
        if len(self.kept) > _MAX_PROGRAMS:
            dropped, _ = self.kept.popitem(last=False)
            self._recompiled.evicted(dropped, _MAX_PROGRAMS)

    @collected_later()
    def _compile(self, leaves: list[Any], spec: Any, loss_fn: Callable[..., Any] | None) -> Compiled:
        self._state.layout.look_up()
        with Progress(self._name, STAGES + 1, self._progress) as show, self._state.layout.training(self._gradients()):
            program = self._build(leaves, spec, loss_fn, show)
        guards = program.joint.take_guards(self._model)
        self._state.layout.note(program.joint)
        return Compiled(self._bind(self.switches.following(program)), guards)

    def _build(self, leaves: list[Any], spec: Any, loss_fn: Any, show: Callable[[str], None]) -> Program:
        """The program of a call, in which as many numbers are inputs as can be."""
        while True:
            args, kwargs = torch_api.pytree.tree_unflatten(self._numbers.lift(leaves, spec), spec)
            try:
                return self._make(Call(self._model, args, kwargs, loss_fn, torch.is_grad_enabled()), show)
            except CaptureError:
                if not self._numbers.give_up(spec):
                    raise

    def _keys(self, calls: Sequence[list[Any]], spec: Any, loss_fn: Any) -> list[ProgramKey]:
        """For each call, all that its program depends on."""
        layout, autocast = self._state.layout, torch_api.autocast_state(self._state.device.type)
        defaults = torch.get_default_dtype(), torch_api.default_device()
        ambient = torch.is_grad_enabled(), autocast, *defaults, torch_api.function_modes(), torch_api.global_hooks()
        state = layout.modes, self._gradients(), *ambient, loss_fn is not None
        inputs = (tuple(map(input_key, self._numbers.lift(leaves, spec))) for leaves in calls)
        keys = (ProgramKey(layout.buffers, spec, each, *state) for each in inputs)
        return [self._decided.completed(key, leaves) for key, leaves in zip(keys, calls, strict=True)]

    def _gradients(self) -> tuple[bool, ...]:
        """Whether programs compute a gradient of each parameter, in the order of ``parameters()``."""
        trained = self._state.layout.trained
        if self.trained:
            trained = self.trained = tuple(map(operator.or_, self.trained, trained))
        return trained


def _weakly(method: Callable[_P, _T]) -> Callable[_P, _T]:
    """The bound method, which does not keep its object."""
    weak = weakref.WeakMethod(method)

    def call(*args: _P.args, **kwargs: _P.kwargs) -> _T:
        alive = weak()
        assert alive is not None
        return alive(*args, **kwargs)

    return call
