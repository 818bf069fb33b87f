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
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from itertools import chain
from operator import attrgetter
from typing import Any

import torch
from torch import nn, optim
from torch.autograd.graph import increment_version
from torch.distributed.tensor import DTensor

from shardgraph import torch_api
from shardgraph.module.all_parameters_step import step_on_all
from shardgraph.module.by_element import STEPS
from shardgraph.module.flat_update import FlatUpdate, NotFlatError
from shardgraph.module.whole_tensor_step import step_on_whole, whole_kinds
from shardgraph.runtime.executor import State
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


def step_together(state: State) -> None:
    """Have such optimizers step on many of a module's shards at a time."""
    for parameter in state.layout.parameters:
        if hasattr(parameter, _MARK):
            setattr(parameter, _MARK, weakref.ref(state))


def step_on_shard(parameter: nn.Parameter) -> None:
    """Have optimizers that compute element by element step on the shard of a parameter, if it is a DTensor."""
    if isinstance(parameter, DTensor):
        setattr(parameter, _MARK, True)
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


def _meet(optimizer: optim.Optimizer, *_: Any) -> None:
    """Have the class of an optimizer step on many shards at a time, from the next step on, if that can be shown."""
    kind = type(optimizer)
    if kind in STEPS or kind.__module__.partition(".")[0] in ("torch", "shardgraph"):
        return
    if not issubclass(kind, (*whole_kinds(), optim.LBFGS)):
        STEPS[kind] = _replace_step(kind, functools.partial(_wrapped_own, weakref.ref(kind)))


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
        if type(self) is not kind:
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
            return original(self)
        if kind not in _ELEMENTWISE:
            if any(not placement.is_replicate() for p in _parameters_of(self) for placement in p.placements):
                return step_on_whole(self, original)
            with _shards(self):  # which are whole
                return original(self)
        with _together(self) or _shards(self):
            return original(self)

    return step


def _wrapped_own(kind: Callable[[], Any], original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def step(self: optim.Optimizer, *args: Any, **kwargs: Any) -> Any:
        given = any(each is not None for each in (*args, *kwargs.values()))  # a closure, which it may call at any time
        together = None
        if type(self) is kind() and not given and _are_ours(self) and not torch.compiler.is_compiling():
            together = _together(self)
        with together or nullcontext():
            return original(self, *args, **kwargs)

    return step


def _together(optimizer: optim.Optimizer) -> AbstractContextManager[Any] | None:
    """Within, the optimizer has its parameters many at a time; None if it cannot."""
    states = {state() if isinstance(state, weakref.ref) else None for state in map(_mark_of, _parameters_of(optimizer))}
    if len(states) != 1 or (state := states.pop()) is None or state.layout.on_host:
        return None
    parameters = [parameter for parameter in _parameters_of(optimizer) if parameter.grad is not None]
    if any(local_tensor(parameter).device != state.device for parameter in parameters):
        return None  # in host memory
    flat, names = FlatUpdate.of(optimizer, state), state.layout.names
    gradients = {names[id(parameter)]: local_tensor(parameter.grad) for parameter in parameters}
    try:
        flat.prepare(gradients, state, address=lambda fqn: gradients[fqn].data_ptr())
    except NotFlatError:
        return None
    return _changing(flat, gradients)


@contextmanager
def _changing(flat: FlatUpdate, gradients: dict[str, torch.Tensor]) -> Iterator[None]:
    """Within, the optimizer has the flat tensors, whose changes count as those of each shard."""
    try:
        with flat.applied(gradients, changed=False):
            yield
    finally:
        increment_version(shard for run in flat.runs for shard in run.shards)


def _parameters_of(optimizer: optim.Optimizer) -> Iterator[Any]:
    return chain.from_iterable(group["params"] for group in optimizer.param_groups)


_mark_of = attrgetter(_MARK)


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
            if not hasattr(parameter, _MARK):
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
