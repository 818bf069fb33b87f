"""The tracer's guards of a layer, for other layers that it was traced for."""

from __future__ import annotations

import dataclasses
import re
import types
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch._guards import Guard, Source

Repeated = Sequence[tuple[str, Mapping[int, Sequence[int]]]]
"""Stacks by their paths in the traced module, and for each layer there, the layers of the model that it stands for, of
which it is the first."""

_MISSING = AttributeError, KeyError, IndexError, NameError


def for_all_layers(guards: Iterable[Guard], own: str, repeated: Repeated) -> Iterator[Guard]:
    """The guards, each of a layer's for all layers that it stands for. ``own`` is the tracer's name of the module."""
    cache: dict[tuple[Source, int], Source] = {}
    for guard in guards:
        for source in _in_all_layers(guard.originating_source, own, repeated, cache):
            yield guard if source is guard.originating_source else source.make_guard(guard.create_fn)


def ordered_in_all_layers(ordered: Iterable[Source], own: str, repeated: Repeated) -> set[Source]:
    """The dictionaries whose order of keys guards rely on, each of a layer's for all layers that it stands for."""
    return {each for source in ordered for each in _in_all_layers(source, own, repeated, {})}


def _in_all_layers(
    source: Source, own: str, repeated: Repeated, cache: dict[tuple[Source, int], Source]
) -> list[Source]:
    if (layer := _layer(source, own, repeated)) is None:
        return [source]
    part, stands_for = layer
    return [_renumbered(source, part, number, cache) for number in stands_for]


def unequal(captured: Any, model: nn.Module, repeated: Repeated) -> str:
    """The first thing that tracing read of a layer of ``model`` and that is not equal in a layer that it stands for.

    Empty if there is none. Numbers that count the layers, as the place of a layer in a cache does, are taken for equal.
    Also, what is not known about a stack that the guards do not mention.
    """
    output = captured.output_graph
    first, *_ = output.local_scope
    own = f"L['{first}']"
    scope = {"L": {**output.local_scope, first: model}, "G": output.global_scope}
    read = {path: set[int]() for path, _ in repeated}
    for guard in output.guards:
        layer = _layer(guard.originating_source, own, repeated)
        if layer is None:
            continue
        source, stands_for = layer
        path, number = _path(source, own)
        layers = model.get_submodule(path)._modules
        read[path].add(number)
        expression = compile(_name(guard.originating_source).replace(_name(source), "_layer"), "<guard>", "eval")
        value = _value(expression, scope, layers[str(stands_for[0])])
        for other in stands_for[1:]:
            found = _value(expression, scope, layers[str(other)])
            if not _alike(guard, value, found) and not _counts(value, found, other - stands_for[0]):
                return f"{_name(guard.originating_source)} is another one in layer {other} of {path}"
    unread = [path for path, layers in repeated if read[path] != set(layers)]
    return f"the layers of {unread[0]} are not among what was read" if unread else ""


def _layer(source: Source, own: str, repeated: Repeated) -> tuple[Source, Sequence[int]] | None:
    """The part of a source that is a layer of a stack, and the layers that it stands for."""
    for part in _parts(source):
        if str(getattr(part, "index", "")).isdecimal():
            path, number = _path(part, own)
            for stack, layers in repeated:
                if path == stack and number in layers:
                    return part, layers[number]
    return None


def _parts(source: Source) -> Iterator[Source]:
    """A source and all that it is made of."""
    yield source
    for field in dataclasses.fields(source):
        if isinstance(part := getattr(source, field.name), Source):
            yield from _parts(part)


def _path(source: Source, own: str) -> tuple[str, int]:
    """The stack and the number of what may be a layer; an empty name if it is none."""
    name = plain_name(source)
    path, _, number = name.removeprefix(f"{own}.").rpartition(".")
    return (path, int(number)) if number.isdecimal() and name.startswith(own) else ("", -1)


def plain_name(source: Source) -> str:
    """The tracer's name of a source, in which modules inside others are attributes of these."""
    return re.sub(r"(?:\.__dict__)?(?:\['_modules'\]|\._modules)\['(\w+)'\]", r".\1", _name(source))


def _renumbered(source: Source, layer: Source, number: int, cache: dict[tuple[Source, int], Source]) -> Source:
    """``source`` with another layer in place of ``layer``."""
    if source == layer:
        return dataclasses.replace(source, index=str(number))  # type: ignore[call-arg]
    if (known := cache.get((source, number))) is None:
        fields = {f.name: getattr(source, f.name) for f in dataclasses.fields(source)}
        sources = {name: part for name, part in fields.items() if isinstance(part, Source)}
        moved = {name: _renumbered(part, layer, number, cache) for name, part in sources.items()}
        changed = any(moved[name] is not sources[name] for name in moved)
        known = cache[source, number] = dataclasses.replace(source, **moved) if changed else source
    return known


def _name(source: Source) -> str:
    name: Any = source.name
    return str(name() if callable(name) else name)  # a method in older releases


def _value(expression: types.CodeType, scope: dict[str, Any], layer: Any) -> Any:
    try:
        return eval(expression, {}, {**scope, "_layer": layer})
    except _MISSING as error:
        return type(error)


def _alike(guard: Guard, one: Any, other: Any) -> bool:
    """Whether a guard that holds for ``one`` says the same of ``other``."""
    kind, create = guard.create_fn_name(), guard.create_fn
    if type(one) is not type(other):
        return False
    if kind == "TYPE_MATCH":
        return True
    if attribute := getattr(create, "keywords", {}).get("attr"):
        return _has(one, attribute) == _has(other, attribute)
    if kind in ("DICT_CONTAINS", "DICT_NOT_CONTAINS"):
        key = next(iter(create.args), None) if create.args else create.keywords.get("key")  # type: ignore[attr-defined]
        return (key in one) == (key in other)
    return _equal(one, other)


def _counts(one: Any, other: Any, layers: int) -> bool:
    """Whether two numbers are as far from each other as the layers that have them."""
    return type(one) is type(other) is int and other - one == layers


def _has(value: Any, attribute: str) -> tuple[bool, bool]:
    return hasattr(value, attribute), attribute in getattr(value, "__dict__", {})


def _equal(one: Any, other: Any) -> bool:
    """Whether tracing finds the same in two values."""
    if one is other:
        return True
    if type(one) is not type(other):
        return False
    if isinstance(one, nn.Module):
        return True  # what was read of it has guards of its own
    if isinstance(one, torch.Tensor):
        return (one.shape, one.dtype, one.requires_grad) == (other.shape, other.dtype, other.requires_grad)
    if isinstance(one, dict):
        names = [[key for key in each if not isinstance(key, int)] for each in (one, other)]  # hooks have numbers
        pairs = zip(one.values(), other.values(), strict=False)
        return names[0] == names[1] and len(one) == len(other) and all(_equal(*pair) for pair in pairs)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(_equal, one, other))
    if isinstance(one, types.MethodType):
        return one.__func__ is other.__func__ and _equal(one.__self__, other.__self__)
    try:
        return bool(one == other)
    except Exception:  # of an object's own comparison
        return False
