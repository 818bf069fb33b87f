"""Captures that tests share: tracing a model is most of what a small test costs, and many trace the same one.

For tests of what is done with a captured graph. The key is everything that tracing reads: the model's structure, what
its modules hold but the values of tensors, the call, the mode and the options. A model with something else in it (a
function, say) is captured every time.
"""

from __future__ import annotations

import sys
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from enum import Enum
from types import ModuleType
from typing import Any

import torch
from torch import nn

from shardgraph.capture import capture as room

_KEPT = 40  # graphs at a time; one is a few megabytes
_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype, torch.device, torch.Size, Enum, type)

_shared: OrderedDict[Any, Any] = OrderedDict()


class _Unknown(Exception):
    """Something that might change what is traced and cannot be compared."""


@contextmanager
def sharing_captures() -> Iterator[None]:
    """Within it ``capture`` of an equal model, call and options gives the same graph, wherever it is called from."""
    original = room.capture

    def shared(model: nn.Module, args: Any, kwargs: Any, **options: Any) -> Any:
        try:
            key = (_model(model), _value((args, kwargs)), _value(options), _surroundings())
        except _Unknown:
            return original(model, args, kwargs, **options)
        if key not in _shared:
            joint = original(model, args, kwargs, **options)
            if joint.conditions:  # another call may take another way
                return joint
            _shared[key] = joint
            if len(_shared) > _KEPT:
                _shared.popitem(last=False)
        _shared.move_to_end(key)
        return replace(_shared[key], placed={})  # what is placed follows rules that a test may change

    _replace(original, shared)
    try:
        yield
    finally:
        _replace(shared, original)


def _replace(before: Any, after: Any) -> None:
    for name, module in list(sys.modules.items()):
        if name.startswith("shardgraph.") and vars(module).get("capture") is before:
            module.capture = after


def _surroundings() -> Any:
    return (
        torch.is_grad_enabled(),
        torch.get_default_dtype(),
        torch.is_autocast_enabled("cpu"),
        torch.get_autocast_dtype("cpu"),
    )


def _model(model: nn.Module) -> Any:
    first: dict[int, int] = {}  # which names are of one module or tensor
    modules = [
        (name, first.setdefault(id(module), len(first)), type(module), _state(module, first))
        for name, module in model.named_modules(remove_duplicate=False)
    ]
    return tuple(modules)


def _state(module: nn.Module, first: dict[int, int]) -> Any:
    held = []
    for key, value in vars(module).items():
        if key in ("_parameters", "_buffers"):
            for name, tensor in value.items():
                of = _value(tensor) if key == "_buffers" else _parameter(tensor)
                held.append((key, name, first.setdefault(id(tensor), len(first)), of))
        elif key.endswith("_hooks") and not value:
            continue
        elif key != "_modules":
            held.append((key, _value(value)))
    return tuple(held)


def _parameter(parameter: torch.Tensor | None) -> Any:
    """What tracing reads of a parameter: neither its strides nor whether it is whole, sharded or on meta."""
    return None if parameter is None else (tuple(parameter.shape), parameter.dtype, parameter.requires_grad)


def _value(value: Any) -> Any:
    """``value`` as something to compare by. Raises _Unknown."""
    if isinstance(value, torch.Tensor):
        return ("tensor", *_parameter(value), value.stride())
    if isinstance(value, _PLAIN):
        return (type(value), value)
    if isinstance(value, Mapping):
        return (type(value), tuple((_value(key), _value(each)) for key, each in value.items()))
    if isinstance(value, (list, tuple)):
        return (type(value), tuple(map(_value, value)))
    if isinstance(value, (set, frozenset)):
        return (type(value), frozenset(map(_value, value)))
    if isinstance(value, nn.Module):
        return _model(value)
    if callable(value):
        return _function(value)
    if hasattr(value, "__dict__"):
        return (type(value), _value(vars(value)))
    raise _Unknown


def _function(function: Any) -> Any:
    """A function is what it is called, unless it holds on to something."""
    owner = getattr(function, "__self__", None)
    if getattr(function, "__closure__", None) or not isinstance(owner, (ModuleType, type(None))):
        raise _Unknown
    try:
        hash(function)
    except TypeError:
        raise _Unknown from None
    return function
