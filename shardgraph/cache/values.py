"""Values of graphs as JSON, and back. Nothing is pickled or evaluated: what is not listed here is refused.

Numbers, text and None are themselves; anything else is a list that begins with its kind.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import operator
import sys
from collections.abc import Callable, Mapping
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

import torch
from torch import fx
from torch.distributed.tensor import Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardgraph import ir
from shardgraph.errors import ShardGraphError
from shardgraph.ir.attributes import Part
from shardgraph.torch_api import Fakes, FakeTensor, FakeTensorMode, OpOverload, pytree

P = ParamSpec("P")
R = TypeVar("R")


class NotStorable(ShardGraphError):
    """A value that the format does not have; or, in reading, a text that is not of the format."""


def well_formed(read: Callable[P, R]) -> Callable[P, R]:
    """``read``, that raises NotStorable for whatever it stumbles over in a text that is not of the format."""

    @functools.wraps(read)
    def reading(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return read(*args, **kwargs)
        except (KeyError, TypeError, ValueError, IndexError, AttributeError) as error:
            raise NotStorable(f"an entry that is not well formed: {type(error).__name__}: {error}") from error

    return reading


OPERATORS = ("aten", "prims", "prim", "shardgraph", "_c10d_functional", "c10d", "torchvision", "rngprims")
_FUNCTIONS = "shardgraph.ir."  # what passes write that is not an operator is defined there
_RECORDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(ir.Accumulated, ir.Buffer, ir.Forwarded, ir.Gathered, ir.Gradient, ir.Input, ir.IntermediateBase),
        *(ir.Checked, ir.Mutation, ir.Output, ir.Parameter, ir.Returned, ir.Saved, ir.SquaredNorm, ir.Tangent),
        *(ir.AttributeResult, ir.AttributeSet, ir.OutputAlias, Part),
    )
}
_NAMED: dict[str, dict[str, Any]] = {
    "dtype": {str(v): v for v in vars(torch).values() if isinstance(v, torch.dtype)},
    "layout": {str(v): v for v in vars(torch).values() if isinstance(v, torch.layout)},
    "memory_format": {str(v): v for v in vars(torch).values() if isinstance(v, torch.memory_format)},
}
_PLACEMENTS: dict[str, tuple[Any, tuple[str, ...]]] = {
    "Replicate": (Replicate, ()),
    "Partial": (Partial, ("reduce_op",)),
    "Shard": (Shard, ("dim",)),
    "_StridedShard": (_StridedShard, ("dim", "split_factor")),
}
"""DTensor's placements by name, each with what it is made of."""
_PLACEMENT_KINDS = frozenset(kind for kind, _ in _PLACEMENTS.values())
_ATOMS = (type(None), bool, int, str)


def target_name(target: Any) -> str:
    """The name of what a node calls."""
    own = getattr(target, "__name__", "")
    if isinstance(target, OpOverload):
        name = f"{target.namespace}:{target.overloadpacket.__name__}.{target._overloadname}"
    elif target is not None and getattr(operator, own, None) is target:
        name = f"operator:{own}"
    elif isinstance(target, FunctionType):
        name = f"{target.__module__}:{target.__qualname__}"
    else:
        raise NotStorable(f"a call of {target}")
    if target_of(name) is not target:
        raise NotStorable(f"a call of {name}")
    return name


def target_of(name: str) -> Any:
    """What a node calls, by name: an operator of known libraries, of Python's or of the graphs' own functions."""
    module, _, path = name.partition(":")
    found: Any = None
    if module in OPERATORS:
        packet, _, overload = path.rpartition(".")
        found = getattr(getattr(getattr(torch.ops, module), packet, None), overload, None)
        found = found if isinstance(found, OpOverload) else None
    elif module == "operator" and not path.startswith("_"):
        found = getattr(operator, path, None)
    elif module.startswith(_FUNCTIONS) and (file := sys.modules.get(module)) is not None:
        found = vars(file).get(path)
        found = found if isinstance(found, FunctionType) else None
    if found is None:
        raise NotStorable(f"a call of {name}")
    return found


def class_named(name: str) -> type:
    """A class that is loaded, by its module and name."""
    module, _, path = name.partition(":")
    found: Any = sys.modules.get(module)
    for part in path.split("."):
        found = vars(found).get(part) if found is not None else None
    if not isinstance(found, type):
        raise NotStorable(f"the class {name}")
    return found


_HERE = "here"


class Writer:
    """Writes values. ``numbers`` are those of nodes by node; real tensors are collected in ``tensors``.

    The device ``here``, of this rank, is written without its index: it is another one where it is read.
    """

    def __init__(self, here: torch.device | None = None) -> None:
        self._here = here
        self.numbers: dict[fx.Node, int] = {}
        self.tensors: list[torch.Tensor] = []
        self._storages: dict[Any, int] = {}

    def write(self, value: Any) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if kind is fx.Node:
            return ["node", self.numbers[value]]
        if kind is float:
            return value if math.isfinite(value) else ["float", repr(value)]
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if kind.__name__ in _RECORDS and _RECORDS[kind.__name__] is kind:
            return ["record", kind.__name__, *(self.write(getattr(value, f.name)) for f in dataclasses.fields(value))]
        if kind is torch.Size:
            return ["size", *value]
        if kind is tuple:
            return ["tuple", *map(self.write, value)]
        if isinstance(value, list) and (kind is list or kind.__module__.startswith("torch.fx")):
            return ["list", *map(self.write, value)]
        if isinstance(value, Mapping):
            return ["dict", *([self.write(key), self.write(each)] for key, each in value.items())]
        if kind in (frozenset, set):
            return [kind.__name__, *sorted(map(self.write, value), key=repr)]
        if kind is slice:
            return ["slice", *map(self.write, (value.start, value.stop, value.step))]
        if kind in (torch.dtype, torch.layout, torch.memory_format):
            return [kind.__name__, str(value)]
        if kind is torch.device:
            return ["device", self._place(value)]
        if isinstance(value, type) and class_named(name := f"{value.__module__}:{value.__qualname__}") is value:
            return ["class", name]
        if kind is complex:
            return ["complex", value.real.hex(), value.imag.hex()]
        if kind in _PLACEMENT_KINDS:
            return ["placement", kind.__name__, *(getattr(value, field) for field in _PLACEMENTS[kind.__name__][1])]
        raise NotStorable(f"a value of type {kind.__module__}.{kind.__qualname__}")

    def _tensor(self, value: torch.Tensor) -> Any:
        if type(value) is FakeTensor:
            storage = value.untyped_storage()
            number = self._storages.setdefault(storage, len(self._storages))
            size = storage.nbytes()
            shape, strides = list(value.shape), list(value.stride())
            if not all(type(each) is int for each in (*shape, *strides, size)):
                raise NotStorable("a symbolic size")
            place = [number, size, value.storage_offset()]
            return ["fake", shape, strides, str(value.dtype), self._place(value.device), value.requires_grad, *place]
        if type(value) not in (torch.Tensor, torch.nn.Parameter) or value.is_meta or value.layout != torch.strided:
            raise NotStorable(f"a tensor of type {type(value).__name__} as a constant")
        self.tensors.append(value.detach())
        return ["tensor", len(self.tensors) - 1, self._place(value.device), type(value) is torch.nn.Parameter]

    def _place(self, device: torch.device) -> str:
        return _HERE if device == self._here else str(device)


class Reader:
    """Reads what :class:`Writer` wrote: ``nodes`` by number, real ``tensors`` by number, fake ones of ``mode``."""

    def __init__(self, mode: FakeTensorMode, tensors: list[torch.Tensor], here: torch.device | None = None) -> None:
        self._here = here
        self.nodes: list[fx.Node] = []
        self._fakes, self._tensors = Fakes(mode), tensors

    def read(self, text: Any) -> Any:
        if type(text) is not list:
            return text
        kind, *rest = text
        if kind == "node":
            return self.nodes[rest[0]]
        if kind == "fake":
            return self._fake(*rest)
        if kind == "record":
            return _RECORDS[rest[0]](*map(self.read, rest[1:]))
        if kind == "dict":
            return {self.read(key): self.read(each) for key, each in rest}
        if kind in _NAMED:
            return _NAMED[kind][rest[0]]
        return self._READERS[kind](self, rest)

    def _fake(self, shape: Any, strides: Any, dtype: str, device: str, trained: bool, *memory: int) -> torch.Tensor:
        tensor = self._fakes.make(shape, strides, _NAMED["dtype"][dtype], self._device(device), *memory)
        return tensor.requires_grad_() if trained else tensor

    def _constant(self, rest: Any) -> torch.Tensor:
        number, device, parameter = rest
        tensor = self._tensors[number].to(self._device(device))
        return torch.nn.Parameter(tensor, requires_grad=False) if parameter else tensor

    def _device(self, place: str) -> torch.device:
        if place != _HERE:
            return torch.device(place)
        if self._here is None:
            raise NotStorable("a device of another rank")
        return self._here

    _READERS: dict[str, Any] = {  # noqa: RUF012 - never changed
        "tuple": lambda self, rest: tuple(map(self.read, rest)),
        "list": lambda self, rest: [self.read(each) for each in rest],
        "set": lambda self, rest: set(map(self.read, rest)),
        "frozenset": lambda self, rest: frozenset(map(self.read, rest)),
        "size": lambda self, rest: torch.Size(rest),
        "slice": lambda self, rest: slice(*map(self.read, rest)),
        "device": lambda self, rest: self._device(rest[0]),
        "float": lambda self, rest: float(rest[0]),
        "complex": lambda self, rest: complex(*map(float.fromhex, rest)),
        "placement": lambda self, rest: _placement(*rest),
        "class": lambda self, rest: class_named(rest[0]),
        "tensor": _constant,
    }


def _placement(name: str, *parts: Any) -> Placement:
    kind, fields = _PLACEMENTS[name]
    made: Placement = kind(**dict(zip(fields, parts, strict=True)))
    return made


def spec_data(spec: Any, writer: Writer) -> Any:
    """The structure of a call's result as data for JSON."""
    if spec.is_leaf():
        return None
    children = [spec_data(spec.child(i), writer) for i in range(spec.num_children)]
    return [writer.write(spec.type), writer.write(spec.context), children]


def spec_of(data: Any, reader: Reader) -> Any:
    """The structure that :func:`spec_data` wrote, whose types must be known to pytree here."""
    if data is None:
        return pytree.tree_structure(0)
    kind, context, children = data
    if (found := reader.read(kind)) not in pytree.SUPPORTED_NODES:
        raise NotStorable(f"{found} in the structure of the result")
    return pytree.TreeSpec(found, reader.read(context), [spec_of(child, reader) for child in children])
