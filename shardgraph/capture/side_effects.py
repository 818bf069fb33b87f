"""Writes of a forward that a graph does not have: repeated at each call, or refused by their line, never dropped.

The tracer reports the objects that forward writes to, without repeating the writes. Which of them change something is
seen by running forward once on the private copy of the model: a value that is the same afterwards, such as a flag set
and restored, is no effect. A constant set on a module, or on its config, is set at every call.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from shardgraph.errors import CaptureError
from shardgraph.ir import AttributeSet

_HARMLESS = ("transformers_dot_utils_dot_output_capturing",)
"""Parts of names of globals that libraries set and restore around a call."""
_MADE_BY_THE_CALL = "L['kwargs']"


def constants_set(written: Sequence[str], model: nn.Module, call: Callable[[], Any]) -> tuple[AttributeSet, ...]:
    """The attributes that a forward sets to constants, beside its outputs and buffers that it writes in place.

    ``written`` are the tracer's names of what a call writes to, which ``call`` repeats. ``model`` is the private copy
    that is called.

    Raises:
        CaptureError: it leaves anything else behind; the message names the attribute and its line.
    """
    written = [name for name in written if name != _MADE_BY_THE_CALL and not any(h in name for h in _HARMLESS)]
    for name in written:
        if not name.startswith("L['self']") or "__closure__" in name:
            raise CaptureError(
                f"forward writes to {_readable(name, model)}, which is not the model's: a compiled module returns its "
                "outputs and writes buffers in place, and this would be lost. Return the value as an output instead"
            )
    if not written:
        return ()
    before = dict(_state(model))
    call()
    after = dict(_state(model))
    call()
    found: list[AttributeSet] = []
    for place, value in _state(model):
        if _same(before.get(place, _ABSENT), value):
            continue
        constants = _constants(*place, before.get(place, _ABSENT), value)
        if constants is None or not _same(after[place], value):
            where = ".".join(filter(None, place))
            raise CaptureError(
                f"forward writes to the attribute {where!r} of the model{_line(model, *place)}: a compiled module "
                "returns its outputs and writes buffers in place, and this would be lost. Return the value as an "
                "output, write a buffer in place (self.buffer.add_(1), self.buffer.copy_(value)), or leave the write "
                "out of forward"
            )
        found += constants
    return tuple(found)


def _constants(path: str, key: str, earlier: Any, value: Any) -> list[AttributeSet] | None:
    """The constants that were set on a module, or on an object that it has; None if anything else was."""
    items: dict[tuple[str, ...], Any]
    if isinstance(value, _Fields) and isinstance(earlier, _Fields) and earlier.keys() <= value.keys():
        items = {(key, name): each for name, each in value.items() if not _same(earlier.get(name, _ABSENT), each)}
    else:
        items = {(key,): value}
    if not all(each is None or isinstance(each, (bool, int, float, str)) for each in items.values()):
        return None
    return [AttributeSet(path, keys, each) for keys, each in items.items()]


_ABSENT = object()


def _readable(name: str, model: nn.Module) -> str:
    """The tracer's name of an object outside the model, as a user would say it."""
    if "__closure__" in name:
        return "a variable of the function around a hook or method"
    if argument := re.match(r"L\['kwargs'\]\['(\w+)'\]", name):
        return f"its argument {argument[1]!r}"
    if position := re.match(r"L\['args'\]\[(\d+)\]", name):
        return f"its argument {list(inspect.signature(model.forward).parameters)[int(position[1])]!r}"
    return "the global " + re.sub(r"G\['(?:__import_)?(\w+)'\]", lambda found: found[1].replace("_dot_", "."), name)


def _state(model: nn.Module) -> Iterator[tuple[tuple[str, str], Any]]:
    """Every attribute of every module with what it holds: containers and plain objects by their contents."""
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key in ("_buffers", "_parameters"):
                yield from (((path, name), each) for name, each in value.items())
            elif key != "_modules":
                yield (path, key), _contents(value)


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
    elif not callable(value) and hasattr(value, "__dict__"):
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
