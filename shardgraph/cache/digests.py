"""Digests of Python objects: equal only if tracing cannot tell the objects apart.

All that can be reached of an object counts: attributes, the code of functions with their defaults and closures, the
whole dictionary of every class in the resolution order, and which objects are the same. What cannot be read this way,
such as an object of C, has no digest (:class:`NoDigest`), unless it is known to be no part of a trace.
"""

from __future__ import annotations

import collections
import enum
import functools
import hashlib
import inspect
import logging
import os
import pathlib
import re
import sys
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Set
from contextvars import ContextVar
from typing import Any, Generic

import torch
from torch import nn

from shardgraph.torch_api import OpOverload

_MOST = 1_000_000  # objects
_MOST_BYTES = 1 << 26  # of constant tensors


class NoDigest(Exception):
    """An object that may be read by a trace, and that no digest describes."""


_ATOMS = (type(None), bool, int, str, bytes, complex, type(Ellipsis), type(NotImplemented), range, slice)
_BY_TEXT = (
    *(torch.dtype, torch.device, torch.layout, torch.memory_format, torch.Size, torch.finfo, torch.iinfo),
    *(OpOverload, pathlib.PurePath, re.Pattern, inspect.Signature, inspect.Parameter, types.GenericAlias),
    types.UnionType,
)
BUILT_IN = (
    *(types.BuiltinFunctionType, types.MethodDescriptorType, types.WrapperDescriptorType, types.MethodWrapperType),
    *(types.GetSetDescriptorType, types.MemberDescriptorType, types.ClassMethodDescriptorType),
)
# What tracing does not look into: logs, locks, and the operators' own tables.
_OPAQUE = (logging.Logger, type(threading.Lock()), type(threading.RLock()), type(torch.ops))
_CONTAINERS = frozenset((dict, list, tuple, set, frozenset, str, int, float, bytes, collections.OrderedDict, Generic))
_OPAQUE_NAMES = frozenset(
    ("PyCapsule", "instancemethod", "_tuplegetter", "SimpleQueue", "ProcessGroup")
)  # of C and C++
VOLATILE = frozenset(("_original_object_hash", "_torchdynamo_wrapper_id"))
"""Attributes with another value in every process, by which libraries know objects; no traced code may name them."""
OF_THE_RUN = frozenset(
    ("get_rank", "get_world_size", "get_backend", "get_local_rank", "is_initialized", "device_count")
)
"""Functions of torch whose results are constants of a trace, and differ from process to process."""
_SKIPPED = frozenset(
    (
        *("__dict__", "__weakref__", "__doc__", "__module__", "__annotations__", "_abc_impl", "__orig_bases__"),
        *("__abstractmethods__", "__static_attributes__", "__firstlineno__", "__parameters__", "__annotate_func__"),
        *("__annotations_cache__", "__slotnames__"),
    )
)


class Digest:
    """Collects objects; :attr:`text` is the digest of all so far. ``codes`` are the code objects that it describes.

    ``looked_up`` are all names that traced code looks up, None while that is not known.
    """

    def __init__(self, model: nn.Module | None = None) -> None:
        self._hash = hashlib.sha256()
        self._texts: list[str] = []  # that are not in the hash yet
        self._known: dict[int, int] = {}
        self._alive: list[Any] = []
        self._inside = True
        self._tensors: set[int] = set()
        self._modules = set() if model is None else {id(module) for module in model.modules()}
        self.codes: set[types.CodeType] = set()
        self.looked_up: Set[str] | None = None
        for module in () if model is None else model.modules():
            for holder in (module._parameters, module._buffers, vars(module)):
                self._tensors.update(id(each) for each in holder.values() if isinstance(each, torch.Tensor))

    @property
    def text(self) -> str:
        self._bytes(b"")
        return self._hash.hexdigest()

    def may_call(self, name: str) -> bool:
        """Whether traced code names a function, as far as its names are known."""
        return self.looked_up is None or name in self.looked_up

    def put(self, *tokens: Any) -> None:
        """Add plain values."""
        self._texts.append(repr(tokens))

    def _bytes(self, content: bytes) -> None:
        self._hash.update("".join(self._texts).encode(errors="surrogatepass"))
        self._hash.update(content)
        self._texts.clear()

    def outside(self, value: Any) -> None:
        """Add an object that is not part of the model, and that a private copy of the model shares with it."""
        before, self._inside = self._inside, False
        try:
            self.add(value)
        finally:
            self._inside = before

    def add(self, value: Any) -> None:
        """Add an object with all that can be reached of it.

        Raises:
            NoDigest: something of it cannot be described.
        """
        kind = type(value)
        if kind in _ATOMS:
            self.put(kind.__name__, value)
            return
        if kind is float:
            self.put("float", value.hex())
            return
        describe = _OF_KIND.get(kind)
        if describe is None and isinstance(value, _BY_TEXT):
            self.put(kind.__qualname__, str(value))
            return
        if not self._inside and id(value) in self._modules:
            raise NoDigest("a function that holds a module of the model, rather than being given it")
        held = not self._inside and id(value) in self._tensors  # then its value counts
        if not held and (number := self._known.get(id(value))) is not None:
            self.put("again", number)
            return
        if len(self._alive) > _MOST:
            raise NoDigest("too many objects")
        self._known[id(value)] = len(self._alive)
        self._alive.append(value)
        if describe is not None:
            describe(self, value)
        else:
            self._describe(value, kind)

    def _describe(self, value: Any, kind: type) -> None:
        """An object whose type is none of those in ``_OF_KIND``."""
        if value is os.environ:
            raise NoDigest("an object that reads variables of the environment")
        if isinstance(value, torch.Tensor):
            self._tensor(value)
        elif isinstance(value, type):
            self._class(value)
        elif isinstance(value, types.ModuleType):
            self.put("module", value.__name__)
        elif isinstance(value, property):
            self._items("property", (value.fget, value.fset, value.fdel, kind))
        elif isinstance(value, threading.local):
            self._items("local", (dict(vars(value)),))
        elif isinstance(value, functools.partial):
            self._items("partial", (value.func, value.args, value.keywords, vars(value)))
        elif kind is types.GeneratorType:  # as context managers hold; the tracer cannot run one that it has not made
            self.code(value.gi_code)
        elif isinstance(value, weakref.ref):
            self._items("weakref", (value(),))
        elif kind is ContextVar:
            self._items("context", (value.name, value.get(None)))
        elif value is sys.modules or isinstance(value, _OPAQUE) or kind.__name__ in _OPAQUE_NAMES or _is_typing(kind):
            self.put("opaque", kind.__qualname__, str(value) if _is_typing(kind) else "")
        elif _is_of_torch(kind) and " at 0x" not in repr(value):
            self.put(kind.__qualname__, repr(value))
        elif isinstance(value, enum.Enum):
            self.put("member", value.name)
            self.add(kind)
        elif hasattr(value, "__wrapped__") and kind.__module__ == "functools":
            self._items(kind.__name__, (value.__wrapped__,))
        elif kind.__module__ == "numpy":
            self._numpy(value)
        else:
            self._object(value, kind)

    def _built_in(self, value: Any) -> None:
        self.put("builtin", getattr(value, "__module__", None), value.__qualname__)
        owner = getattr(value, "__self__", None)
        bound = type(owner).__module__ == "pybind11_builtins"  # to its own C++ code
        if owner is not None and not isinstance(owner, types.ModuleType) and not bound:
            self.add(owner)

    def _sequence(self, value: Any) -> None:
        self._items(type(value).__name__, value)

    def _set(self, value: Any) -> None:
        self.put(type(value).__name__, sorted(map(self._alone, value)))

    def _mapping(self, value: Any) -> None:
        self._items(type(value).__name__, [part for item in value.items() for part in item])

    def _default(self, value: Any) -> None:
        self._items("defaultdict", (value.default_factory, *(part for item in value.items() for part in item)))

    def _method(self, value: Any) -> None:
        self._items("method", (value.__func__, value.__self__))

    def _wrapped(self, value: Any) -> None:
        self._items(type(value).__name__, (value.__func__,))

    def _items(self, name: str, values: Any) -> None:
        self.put(name, len(values))
        for each in values:
            self.add(each)

    def _alone(self, value: Any) -> str:
        """The digest of an element of a set, which has no order."""
        alone = Digest()
        alone._inside = self._inside
        alone.add(value)
        self.codes |= alone.codes
        return alone.text

    def _object(self, value: Any, kind: type) -> None:
        """An instance of a Python class: its class, its attributes, and what it contains."""
        known = kind is object  # nothing but itself
        self.put("object", kind.__module__, kind.__qualname__)
        self.add(kind)
        if (contents := self._contents(value)) is not None:
            known = True
            self._items("contents", contents)
        slots = [name for each in kind.__mro__ for name in _slots(each)]
        if slots:
            known = True
            self._items("slots", [(name, getattr(value, name, "missing")) for name in slots])
        attributes = getattr(value, "__dict__", None)
        if isinstance(attributes, dict):
            known = True
            own = {key: each for key, each in attributes.items() if key not in VOLATILE and not _is_derived(kind, key)}
            self.put("attributes", len(own))
            for key, each in own.items():
                self.add(key)
                self.add(each)
        hidden = (each for each in kind.__mro__[:-1] if each not in _CONTAINERS and not _shows_all(each))
        if not known or next(hidden, None) is not None:
            raise NoDigest(f"a {kind.__module__}.{kind.__qualname__}")

    def _contents(self, value: Any) -> list[Any] | None:
        """What an instance of a subclass of a built-in type has as that type; None if it is of none."""
        if isinstance(value, dict):
            return [*dict.items(value)]
        if isinstance(value, list):
            return list.copy(value)
        if isinstance(value, tuple):
            return [*tuple.__iter__(value)]
        if isinstance(value, set):
            return sorted(map(self._alone, set.__iter__(value)))
        if isinstance(value, frozenset):
            return sorted(map(self._alone, frozenset.__iter__(value)))
        for base in (str, int, float, bytes):
            if isinstance(value, base):
                return [base.__str__(value) if base is str else base.__repr__(value)]
        return None

    def _tensor(self, value: torch.Tensor) -> None:
        kind = type(value)
        self.put("tensor", kind.__qualname__, tuple(value.shape), str(value.dtype), value.requires_grad, value.layout)
        if self._inside and id(value) in self._tensors:  # an input of the graph
            parameter = isinstance(value, nn.Parameter)
            self.put("input", None if parameter or value.layout != torch.strided else value.stride())
            return
        if kind not in (torch.Tensor, nn.Parameter) or value.layout != torch.strided or value.grad_fn is not None:
            raise NoDigest(f"a constant {kind.__name__}")
        self.put(value.stride(), str(value.device))
        if not value.is_meta:
            if value.numel() * value.element_size() > _MOST_BYTES:
                raise NoDigest("a large constant tensor")
            plain = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8) if value.numel() else None
            self._bytes(b"" if plain is None else plain.numpy().tobytes())

    def _numpy(self, value: Any) -> None:
        if not hasattr(value, "tobytes") or getattr(value, "dtype", None) is None or value.dtype.hasobject:
            self.put("numpy", type(value).__qualname__, getattr(value, "__qualname__", ""))
            return
        self.put("numpy", type(value).__qualname__, str(value.dtype), value.shape)
        self._bytes(value.tobytes())

    def _function(self, value: types.FunctionType) -> None:
        if value.__name__ in OF_THE_RUN and str(value.__module__).startswith("torch."):
            raise NoDigest(f"the function {value.__qualname__}, which differs from run to run")
        if value is os.getenv:
            raise NoDigest("a function that reads variables of the environment")
        if getattr(value, "_dynamo_marked_constant", False) and self.may_call(value.__name__):
            raise NoDigest(f"the function {value.__qualname__}, whose result is taken as a constant")
        self.put("function", value.__module__, value.__qualname__)
        self.code(value.__code__)
        before, self._inside = self._inside, False
        try:
            own = {key: each for key, each in vars(value).items() if key not in VOLATILE}
            self._items("defaults", (value.__defaults__, value.__kwdefaults__, value.__closure__, own))
            if not has_file(value.__code__):  # its globals are no module's
                names = [name for name in _names(value.__code__) if name in value.__globals__]
                self._items("globals", [(name, value.__globals__[name]) for name in sorted(names)])
        finally:
            self._inside = before

    def _cell(self, value: Any) -> None:
        try:
            contents = value.cell_contents
        except ValueError:
            self.put("cell", "empty")
            return
        self._items("cell", (contents,))

    def _class(self, value: type) -> None:
        self.put("class", value.__module__, value.__qualname__)
        for each in value.__mro__:
            if not _is_python(each):
                self.put("built in", each.__module__, each.__qualname__)
                continue
            if each is not value:
                self.add(each)
                continue
            before, self._inside = self._inside, False
            entries = [(key, entry) for key, entry in sorted(vars(each).items()) if key not in _SKIPPED]
            try:
                self.put("entries", len(entries))
                for key, entry in entries:
                    self.put(key)
                    self.add(entry)
            finally:
                self._inside = before
        if type(value) is not type and _is_python(value):
            self.add(type(value))

    def code(self, code: types.CodeType) -> None:
        """Add a code object, with those inside it."""
        self.codes.add(code)
        flags = code.co_flags, code.co_argcount, code.co_posonlyargcount, code.co_kwonlyargcount, code.co_firstlineno
        self.put(code.co_filename, code.co_qualname, flags, code.co_code, code.co_exceptiontable)
        self.put(code.co_names, code.co_varnames, code.co_freevars, code.co_cellvars, code.co_linetable)
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.code(constant)
            elif isinstance(constant, frozenset):
                self.put("set", sorted(map(repr, constant)))
            else:
                self.put(type(constant).__name__, constant)


_OF_KIND: dict[type, Callable[[Digest, Any], None]] = {
    type: Digest._class,
    types.FunctionType: Digest._function,
    types.CodeType: Digest.code,
    types.CellType: Digest._cell,
    types.MethodType: Digest._method,
    **dict.fromkeys(BUILT_IN, Digest._built_in),
    **dict.fromkeys((tuple, list, collections.deque), Digest._sequence),
    **dict.fromkeys((set, frozenset), Digest._set),
    **dict.fromkeys((dict, collections.OrderedDict, types.MappingProxyType), Digest._mapping),
    collections.defaultdict: Digest._default,
    **dict.fromkeys((staticmethod, classmethod), Digest._wrapped),
}
"""What describes most objects, by their type: a chain of questions would take most of the time."""


def _is_python(kind: type) -> bool:
    """Whether a class is made by Python, or can be changed as one."""
    bound = _is_of_torch(kind) or type(kind).__module__ == "pybind11_builtins"
    return bool(kind.__flags__ & (1 << 9)) and not bound  # Py_TPFLAGS_HEAPTYPE


def _shows_all(kind: type) -> bool:
    """Whether what a class gives its instances is in their dictionary or slots: not of a class of C."""
    return _is_python(kind) and (kind.__dictoffset__ != 0 or "__slots__" in vars(kind))


def _is_of_torch(kind: type) -> bool:
    """Whether a class of torch's C++, whose values print as what they are."""
    return isinstance(kind.__module__, str) and kind.__module__.startswith("torch._C")


def _is_typing(kind: type) -> bool:
    return kind.__module__ in ("typing", "_typing", "typing_extensions")


def _is_derived(kind: type, name: str) -> bool:
    """Whether an attribute is what a class of this package has computed of its others, and kept."""
    owner = next((each for each in kind.__mro__ if name in vars(each)), None)
    return (
        owner is not None
        and owner.__module__.startswith("shardgraph.")
        and type(vars(owner)[name]) is functools.cached_property
    )


def _slots(kind: type) -> Iterator[str]:
    slots = vars(kind).get("__slots__", ())
    for name in (slots,) if isinstance(slots, str) else slots:
        if name not in ("__dict__", "__weakref__"):
            yield f"_{kind.__name__.lstrip('_')}{name}" if name.startswith("__") and not name.endswith("__") else name


def has_file(code: types.CodeType) -> bool:
    """Whether a file has the text of this code; else it was made at run time."""
    return not code.co_filename.startswith("<") or code.co_filename.startswith("<frozen ")


def _names(code: types.CodeType) -> set[str]:
    """The names that a code object, and those inside it, look up."""
    return set(code.co_names).union(*(_names(each) for each in code.co_consts if isinstance(each, types.CodeType)))
