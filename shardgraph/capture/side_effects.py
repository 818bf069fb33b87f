"""Writes of a forward that a graph does not have: repeated at each call, or refused by their line, never dropped.

The tracer reports the objects that forward writes to, without repeating the writes. Which of them change something is
seen by running forward on a private copy of the model: a value that is the same afterwards, such as a flag set and
restored, is no effect. A constant set on a module, or on its config, is set at every call. An attribute set to tensors
of the call, or to the next number of a count, becomes a result of the graph, and is set to it.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from shardgraph.errors import CaptureError
from shardgraph.ir import AttributeResult, AttributeSet
from shardgraph.torch_api import FUNCTION_MODES, entered_modes, pytree

_HARMLESS = ("transformers_dot_utils_dot_output_capturing",)
"""Parts of names of globals that libraries set and restore around a call."""
_MADE_BY_THE_CALL = "L['kwargs']"


@dataclass(frozen=True)
class Effects:
    """What a forward leaves behind on the model: ``constants``, and ``results`` of the call, written buffers last."""

    constants: tuple[AttributeSet, ...] = ()
    results: tuple[AttributeResult, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.constants or self.results)


def harmful(written: Sequence[str]) -> list[str]:
    """Those of the tracer's names of what a call writes to that may be an effect."""
    return [name for name in written if name != _MADE_BY_THE_CALL and not any(h in name for h in _HARMLESS)]


def side_effects(written: Sequence[str], model: nn.Module, call: Callable[[], Any]) -> Effects:
    """What a forward leaves behind beside its outputs and buffers that it writes in place.

    ``written`` are the tracer's names of what a call writes to, which ``call`` repeats. ``model`` is the private copy
    that is called, twice.

    Raises:
        CaptureError: it leaves behind what cannot be repeated; the message names the attribute and its line.
    """
    for name in written:
        if name != FUNCTION_MODES and (not name.startswith("L['self']") or "__closure__" in name):
            raise CaptureError(
                f"forward writes to {_readable(name, model)}, which is not the model's: a compiled module returns its "
                "outputs and writes buffers in place, and this would be lost. Return the value as an output instead"
            )
    states, modes = [_state(model)], entered_modes()
    for _ in range(2):
        try:
            call()
        except Exception as error:  # of the model's own
            raise CaptureError(
                "forward writes to attributes of the model, and its next call fails then: "
                f"{type(error).__name__}: {error}"
            ) from error
        states.append(_state(model))
        if entered_modes() != modes:
            raise CaptureError(
                "forward enters a mode of functions (torch.overrides.TorchFunctionMode, or a default device) and does "
                "not leave it: enter it in a `with` statement, or before the call"
            )
    constants: list[AttributeSet] = []
    results: list[AttributeResult] = []
    for path, keys in dict.fromkeys(place for state in states for place in state):
        before, after, later = (state.get((path, keys)) or _default(model, path, keys) for state in states)
        if before.same(after) and after.same(later):
            continue
        if (number := _is_number(before, after, later)) or _is_result(before, after, later):
            buffer = _has_buffer(model, path, keys) and _is_written(before.value, after.value)
            results.append(AttributeResult(path, keys, number, buffer, _line(model, path, keys[0])))
        elif _is_constant(after, later):
            constants.append(AttributeSet(path, keys, after.value))
        else:
            where = ".".join(filter(None, (path, *keys)))
            raise CaptureError(
                f"forward writes to the attribute {where!r} of the model{_line(model, path, keys[0])}: a compiled "
                "module sets attributes to constants and to tensors of the call, and this would be lost. Return the "
                "value as an output, write a buffer in place (self.buffer.add_(1), self.buffer.copy_(value)), or leave "
                "the write out of forward"
            )
    return Effects(tuple(constants), tuple(sorted(results, key=lambda each: each.buffer)))


class LeftBehind:
    """What a call changes on a model, from when this is made: :meth:`now` tells it."""

    def __init__(self, model: nn.Module) -> None:
        self._model, self._before = model, _state(model)

    def now(self) -> dict[tuple[str, tuple[str, ...]], Any]:
        """The values that have changed, by the path of a module and the keys of an attribute."""
        after, changed = _state(self._model), {}
        for place in {**self._before, **after}:
            was, now = (state.get(place) or _default(self._model, *place) for state in (self._before, after))
            if not was.same(now):
                changed[place] = now.value
        return changed


def same_constants(attributes: Sequence[AttributeSet], left: Mapping[tuple[str, tuple[str, ...]], Any]) -> bool:
    """Whether what a call left behind is that these attributes are set, to the same constants."""
    constants = {(each.path, each.keys): each.value for each in attributes}
    return left.keys() == constants.keys() and all(
        is_constant(value) and type(value) is type(constants[place]) and value == constants[place]
        for place, value in left.items()
    )


def is_constant(value: Any) -> bool:
    """Whether a value is of a kind that can be set again at each call."""
    return type(value) in (*_SIMPLE, torch.dtype)


def merged(one: Effects, other: Effects, model: nn.Module) -> Effects:
    """What the two ways of branches on random numbers leave behind on ``model``, a copy that was not called.

    A constant that only one of them sets, where there was nothing, is set in any case.

    Raises:
        CaptureError: they leave behind something else.
    """
    first, second = ({each.fqn: each for each in effects.constants} for effects in (one, other))
    results = [{each.fqn for each in effects.results} for effects in (one, other)]
    unlike = results[0] ^ results[1]
    for name, each in {**first, **second}.items():
        mine, its = first.get(name, each), second.get(name, each)
        alone = name not in first or name not in second
        if mine.value != its.value or (alone and each.get(model) is not None):
            unlike.add(name)
    for name in sorted(unlike):
        raise CaptureError(
            f"forward writes to the attribute {name!r} of the model, and a branch on random numbers decides what: "
            "leave the write out of forward, or set the probability to 0"
        )
    return Effects(tuple({**first, **second}.values()), one.results)


@dataclass(frozen=True, eq=False)
class _Held:
    """What an attribute holds: the object, and its contents as they are now."""

    value: Any
    contents: Any

    def same(self, other: _Held) -> bool:
        return _same(self.contents, other.contents)


def _is_number(before: _Held, after: _Held, later: _Held) -> bool:
    """Whether a count: another number after every call."""
    kinds = {type(held.value) for held in (before, after, later)}
    return len(kinds) == 1 and kinds <= {int, float} and not after.same(later)


def _is_constant(after: _Held, later: _Held) -> bool:
    """Whether a constant, of this call: the next may find a model on which it is another one."""
    return is_constant(after.value) and (type(after.value) is not float or after.same(later))


def _is_result(before: _Held, after: _Held, later: _Held) -> bool:
    """Whether tensors of the call, alone or in containers that it made."""
    if not isinstance(after.value, torch.Tensor) and (before.value is after.value or after.value is later.value):
        return False  # a container that was there, which others may have
    (leaves, spec), (_, later_spec) = map(pytree.tree_flatten, (after.value, later.value))
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and not isinstance(leaf, nn.Parameter)]
    others = [leaf for leaf in leaves if leaf is not None and not isinstance(leaf, (torch.Tensor, bool, int, str))]
    parameters = any(isinstance(leaf, nn.Parameter) for leaf in leaves)
    return bool(tensors) and not others and not parameters and spec == later_spec


def _is_written(before: Any, after: Any) -> bool:
    """Whether a buffer has a new value of the same kind: what writing it in place would do."""
    tensors = isinstance(before, torch.Tensor) and isinstance(after, torch.Tensor)
    return tensors and (before.shape, before.dtype) == (after.shape, after.dtype) and not after.requires_grad


_NOTHING = _Held(object(), object())
_SIMPLE = (type(None), bool, int, float, str)


def _readable(name: str, model: nn.Module) -> str:
    """The tracer's name of an object outside the model, as a user would say it."""
    if "__closure__" in name:
        return "a variable of the function around a hook or method"
    if argument := re.match(r"L\['kwargs'\]\['(\w+)'\]", name):
        return f"its argument {argument[1]!r}"
    if position := re.match(r"L\['args'\]\[(\d+)\]", name):
        return f"its argument {list(inspect.signature(model.forward).parameters)[int(position[1])]!r}"
    return "the global " + re.sub(r"G\['(?:__import_)?(\w+)'\]", lambda found: found[1].replace("_dot_", "."), name)


def _state(model: nn.Module) -> dict[tuple[str, tuple[str, ...]], _Held]:
    """What every attribute of every module holds, and every attribute of the plain objects among these, once for an
    object that several have, such as a config."""
    state: dict[tuple[str, tuple[str, ...]], _Held] = {}
    known = set[int]()

    def add(path: str, keys: tuple[str, ...], value: Any) -> None:
        if type(value) in _SIMPLE:  # as most are, of which there are many
            state[path, keys] = _Held(value, value)
        elif _is_plain(value) and len(keys) == 1:
            state[path, keys] = _Held(value, id(value))
            if id(value) not in known:
                known.add(id(value))
                for name, each in vars(value).items():
                    add(path, (*keys, name), each)
        else:
            state[path, keys] = _Held(value, _contents(value))

    for path, module in model.named_modules():
        for key, value in (*vars(module).items(), *module._parameters.items(), *module._buffers.items()):
            if key not in ("_modules", "_parameters", "_buffers"):
                add(path, (key,), value)
    return state


def _default(model: nn.Module, path: str, keys: tuple[str, ...]) -> _Held:
    """What an attribute is that a module has not set: its class's."""
    kind = type(model.get_submodule(path))
    if len(keys) > 1 or not hasattr(kind, keys[0]):
        return _NOTHING
    return _Held(value := getattr(kind, keys[0]), _contents(value))


def _is_plain(value: Any) -> bool:
    """Whether an object with attributes, such as a config."""
    containers = (nn.Module, torch.Tensor, type, dict, list, tuple, set)
    return not isinstance(value, containers) and not callable(value) and hasattr(value, "__dict__")


def _has_buffer(model: nn.Module, path: str, keys: tuple[str, ...]) -> bool:
    """Whether an attribute is a registered buffer."""
    return len(keys) == 1 and keys[0] in model.get_submodule(path)._buffers


def _contents(value: Any, known: dict[int, Any] | None = None) -> Any:
    """What containers and plain objects hold, however deep; one that holds itself is itself there."""
    known = {} if known is None else known
    if isinstance(value, (nn.Module, torch.Tensor, type)) or id(value) in known:
        return known.get(id(value), value)
    known[id(value)] = value
    if isinstance(value, dict):
        known[id(value)] = {key: _contents(each, known) for key, each in value.items()}
    elif isinstance(value, (list, tuple, set)):
        known[id(value)] = [_contents(each, known) for each in value]
    elif _is_plain(value):
        known[id(value)] = _Fields({key: _contents(each, known) for key, each in vars(value).items()})
    return known[id(value)]


class _Fields(dict[str, Any]):
    """The attributes of a plain object."""


def _same(one: Any, other: Any) -> bool:
    if one is other:
        return True
    if type(one) is not type(other) or isinstance(one, torch.Tensor):
        return False
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(_same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(_same, one, other))
    return bool(one == other)


def _line(model: nn.Module, path: str, key: str) -> str:
    """Where the class of a module writes the attribute, as text; empty if it is not found."""
    kind = type(model.get_submodule(path))
    try:
        lines, first = inspect.getsourcelines(kind.forward)
        file = inspect.getsourcefile(kind.forward)
    except (OSError, TypeError):
        return ""
    writes = re.compile(rf"self\.{re.escape(key)}\b(?!\s*==)")
    number = next((first + i for i, line in enumerate(lines) if writes.search(line)), None)
    return f" at {file}:{number}" if number else ""
