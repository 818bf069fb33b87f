"""torch's optimizers step on plain tensors in place of DTensors: on shards, if they compute element by element.

An operation on a DTensor takes tens of microseconds more than one on its shard, and a step is ten of them for each
parameter: for small parameters that is most of a training step. torch's classes whose update of an element depends on
that element alone give the same numbers either way, and so do classes of users, and subclasses, for which that can be
shown (:mod:`shardgraph.module.by_element`). Those that compute with whole tensors step on these
(:mod:`shardgraph.module.whole_tensor_step`), L-BFGS on all of them (:mod:`shardgraph.module.all_parameters_step`); all
others step on DTensors as before.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn, optim
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode

from shardgraph import torch_api
from shardgraph.errors import NOT_PICKLED, ShardGraphError
from shardgraph.module.all_parameters_step import step_on_all
from shardgraph.module.by_element import STEPS
from shardgraph.module.flat_update import FlatUpdate, NotFlatError, Run, as_they_lie
from shardgraph.module.host_update import fused_on_host
from shardgraph.module.optimizer_state import load_placed
from shardgraph.module.whole_tensor_step import step_on_whole, whole_kinds
from shardgraph.runtime.executor import State
from shardgraph.runtime.host import is_on_host
from shardgraph.torch_api import local_tensor

_ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.NAdam,
    optim.RAdam,
    optim.Adamax,
    optim.Adagrad,
    optim.Adadelta,
    optim.RMSprop,
    optim.Rprop,
    optim.ASGD,
)

_MARK = "_shardgraph_steps_on_shard"
"""The attribute of sharded modules' parameters that are DTensors: True, later a reference to their module's state."""


class _OfModule(weakref.ref[State]):
    """The state of a parameter's module. A copy of the parameter is of no module, and no file can have it."""

    def __deepcopy__(self, memo: Any) -> bool:
        return True

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardGraphError(NOT_PICKLED)


def step_together(state: State) -> None:
    """Have such optimizers step on many of a module's shards at a time."""
    for parameter in state.layout.parameters:
        if _is_ours(parameter):
            setattr(parameter, _MARK, _OfModule(state))


def step_on_shard(parameter: nn.Parameter) -> None:
    """Have optimizers that compute element by element step on the shard of a parameter, if it is a DTensor, and by
    fused kernels if it is in host memory."""
    if isinstance(parameter, DTensor):
        setattr(parameter, _MARK, True)
        _wrap_steps()
    elif is_on_host(parameter):
        _wrap_steps()


def _wrap_steps() -> None:
    for kind in (*_ELEMENTWISE, *whole_kinds(), optim.LBFGS):
        _wrap_step(kind)
    _meet_users_own()


@functools.cache
def _wrap_step(kind: type[optim.Optimizer]) -> None:
    _replace_step(kind, functools.partial(_wrapped, kind))


@functools.cache
def _meet_users_own() -> None:
    torch_api.when_made(_meet)
    torch_api.before_every_step(_meet)  # for those that were made before
    torch_api.in_every_load(functools.partial(load_placed, _is_ours))


_DERIVED: weakref.WeakSet[type[optim.Optimizer]] = weakref.WeakSet()
"""Classes that have been met, with a step of their own, of those that step on whole tensors."""


def _meet(optimizer: optim.Optimizer, *_: Any) -> None:
    """Have the class of an optimizer step on shards as its kind does, from the next step on: on many at a time, if that
    can be shown, or on whole tensors."""
    kind: Any = type(optimizer)
    if kind in STEPS or kind in _DERIVED or kind.__module__.partition(".")[0] in ("torch", "shardgraph"):
        return
    if kind in whole_kinds():  # imported since the first module was compiled
        _wrap_step(kind)
    elif not issubclass(kind, (*whole_kinds(), optim.LBFGS)):
        STEPS[kind] = _replace_step(kind, functools.partial(_wrapped_own, weakref.ref(kind)))
    elif "step" in vars(kind):
        _DERIVED.add(kind)
        _replace_step(kind, functools.partial(_wrapped_derived, weakref.ref(kind)))


def _replace_step(kind: type[optim.Optimizer], wrap: Callable[[Callable[..., Any]], Any]) -> Callable[..., Any]:
    """Put what ``wrap`` makes of a class's step in its place; returns the step as it was, without hooks."""
    original: Any = kind.step
    hooked = getattr(original, "hooked", False)  # torch has wrapped it in what calls hooks, as the first was made
    if hooked:
        original = original.__wrapped__
    wrapped: Any = wrap(original)
    if hooked:
        wrapped = optim.Optimizer.profile_hook_step(wrapped)
        wrapped.hooked = True
    kind.step = wrapped  # type: ignore[method-assign]
    return original


def _wrapped(kind: type[optim.Optimizer], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: optim.Optimizer, closure: Callable[[], Any] | None = None) -> Any:
        if _has_step_of(type(self)) is not kind:
            return original(self, closure)
        if isinstance(self, optim.LBFGS):
            if closure is None or not _are_ours(self):
                return original(self, closure)
            return step_on_all(self, original, closure)
        if closure is not None:  # which these classes call once, before anything else
            with torch.enable_grad():
                loss = closure()
            step(self)
            return loss
        if not _are_ours(self):
            with fused_on_host(self):
                return original(self)
        if kind not in _ELEMENTWISE:
            return _step_on_whole(self, original, at_once=type(self) is not kind)  # which may combine parameters
        if (together := _together(self)) is None:
            with fused_on_host(self), _shards(self):
                return original(self)
        flat, gradients = together
        with flat.settled():
            for runs in flat.stretches(gradients):
                with _changing(flat, runs, gradients):
                    original(self)
        return None

    return step


def _has_step_of(kind: type) -> type:
    """The class whose step that of ``kind`` is."""
    return next(each for each in kind.__mro__ if "step" in vars(each))


def _step_on_whole(optimizer: optim.Optimizer, original: Callable[..., Any], at_once: bool = False) -> Any:
    if any(not placement.is_replicate() for p in _parameters_of(optimizer) for placement in p.placements):
        return step_on_whole(optimizer, original, at_once)
    with _shards(optimizer):  # which are whole
        return original(optimizer)


def _wrapped_derived(kind: Callable[[], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    """The step of a class that is derived of one that computes with whole tensors: on all of them at once, as it may
    combine them, and count its calls."""

    @functools.wraps(original)
    def step(self: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        given = [each for each in (*args, *kwargs.values()) if each is not None]
        if _has_step_of(type(self)) is not kind() or not _are_ours(self):
            return original(self, *args, **kwargs)
        if isinstance(self, optim.LBFGS) and len(given) == 1:
            return step_on_all(self, original, given[0])
        if given:
            raise ShardGraphError(
                f"{type(self).__name__} has a step of its own, which computes with whole tensors, and is given a "
                "closure, which computes with shards: call loss.backward() before, and step() without arguments"
            )
        return _step_on_whole(self, original, at_once=True)

    return step


class _WholeNumbers(TorchDispatchMode):
    """Within, a number that is read of shards, such as a norm, is that of the whole tensor: on all ranks alike."""

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func``."""
        if func is torch.ops.aten._local_scalar_dense.default and isinstance(args[0], DTensor):
            args = (args[0].full_tensor(),)
        return func(*args, **(kwargs or {}))


def _wrapped_own(kind: Callable[[], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling() or not any(map(_is_ours, _parameters_of(self))):
            return original(self, *args, **kwargs)
        given = any(each is not None for each in (*args, *kwargs.values()))  # a closure, which it may call at any time
        together = _together(self) if type(self) is kind() and not given and _are_ours(self) else None
        if together is None:
            with _WholeNumbers():
                return original(self, *args, **kwargs)
        flat, gradients = together
        with flat.settled(), _changing(flat, flat.runs, gradients):
            return original(self, *args, **kwargs)

    return step


def _together(optimizer: optim.Optimizer) -> tuple[FlatUpdate, dict[str, torch.Tensor]] | None:
    """What an optimizer needs to have its parameters many at a time, with their gradients; None if it cannot."""
    states = {state() if isinstance(state, weakref.ref) else None for state in map(_mark_of, _parameters_of(optimizer))}
    if len(states) != 1 or (state := states.pop()) is None or state.layout.on_host:
        return None
    parameters = [parameter for parameter in _parameters_of(optimizer) if parameter.grad is not None]
    if any(local_tensor(parameter).device != state.device for parameter in parameters):
        return None  # in host memory
    flat, names = FlatUpdate.of(optimizer, state), state.layout.names
    gradients = {names[id(parameter)]: local_tensor(parameter.grad) for parameter in parameters}
    try:
        flat.prepare(gradients, state, places=functools.partial(as_they_lie, gradients))
    except NotFlatError:
        return None
    return flat, gradients


@contextmanager
def _changing(flat: FlatUpdate, runs: Sequence[Run], gradients: dict[str, torch.Tensor]) -> Iterator[None]:
    """Within, the optimizer has the flat tensors of these runs, whose changes count as those of each shard."""
    try:
        with flat.only(runs, gradients, changed=False):
            yield
    finally:
        increment_version(shard for run in runs for shard in run.shards)


def _parameters_of(optimizer: optim.Optimizer) -> Iterator[Any]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


_mark_of = attrgetter(_MARK)


def _is_ours(parameter: Any) -> bool:
    """Whether it is a DTensor of a sharded module."""
    return isinstance(parameter, DTensor) and hasattr(parameter, _MARK)


def is_elementwise(optimizer: optim.Optimizer) -> bool:
    """Whether an optimizer computes element by element: one of torch's, or of a user's own for which
    :meth:`FlatUpdate.prepare` may show it."""
    if any(group.get("differentiable") for group in optimizer.param_groups):
        return False
    _meet(optimizer)
    if type(optimizer) in STEPS:
        return not torch_api.has_own_step(optimizer)
    return type(optimizer) in _ELEMENTWISE


def _are_ours(optimizer: optim.Optimizer) -> bool:
    """Whether all parameters are of sharded modules, and their gradients placed as they are."""
    for group in optimizer.param_groups:
        if group.get("differentiable"):
            return False
        for parameter in group["params"]:
            gradient = parameter.grad
            if not _is_ours(parameter):
                return False
            if gradient is None:
                continue
            if not isinstance(gradient, DTensor) or gradient.placements != parameter.placements:
                return False
    return True


@contextmanager
def _shards(optimizer: optim.Optimizer) -> Iterator[None]:
    """Within, the optimizer has the shards of its parameters, with their gradients and their state."""
    before = [(group, group["params"], group.get("foreach")) for group in optimizer.param_groups]
    states: dict[nn.Parameter, Mapping[str, Any]] = {}
    for group, parameters, foreach in before:
        group["params"] = [_twin(parameter) for parameter in parameters]
        if "foreach" in group and foreach is None and not group.get("fused"):
            group["foreach"] = False  # as torch chooses for DTensors: temporaries of one parameter, not of all
        for parameter, twin in zip(parameters, group["params"], strict=True):
            if parameter in optimizer.state:
                states[twin] = optimizer.state.pop(parameter)
                optimizer.state[twin] = {name: torch_api.local_tensor(value) for name, value in states[twin].items()}
    try:
        yield
    finally:
        for group, parameters, foreach in before:
            for parameter, twin in zip(parameters, group["params"], strict=True):
                twin.grad = None
                if twin in optimizer.state:
                    local = optimizer.state.pop(twin)
                    optimizer.state[parameter] = _placed(local, states.get(twin, {}), parameter)
            group["params"] = parameters
            if "foreach" in group:
                group["foreach"] = foreach


def _twin(parameter: Any) -> nn.Parameter:
    """The shard of a parameter as a parameter, with the shard of its gradient."""
    twin = nn.Parameter(torch_api.local_tensor(parameter), parameter.requires_grad)
    twin.grad = None if parameter.grad is None else torch_api.local_tensor(parameter.grad)
    return twin


def _placed(local: Mapping[str, Any], before: Mapping[str, Any], parameter: Any) -> dict[str, Any]:
    """The state of a shard as that of its parameter."""
    state = {}
    for name, value in local.items():
        known = before.get(name)
        if isinstance(known, torch.Tensor) and value is torch_api.local_tensor(known):
            state[name] = known
        elif isinstance(value, torch.Tensor) and value.dim():
            state[name] = torch_api.placed(value, parameter.device_mesh, parameter.placements, parameter.shape)
        else:
            state[name] = value
    return state
