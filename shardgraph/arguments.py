"""The door of public functions: what each argument may be, checked before anything is done with it.

A function says it once, by parameter::

    @checked(model=MODEL, nproc=WHOLE, timeout=SECONDS)
    def f(model, nproc=2, *, timeout=300.0): ...

An argument that is not allowed is an :class:`~shardgraph.errors.ArgumentError`, in one sentence: ``f(): nproc is '2';
it may be a whole number from 1``. Default values are allowed whatever they are, so that None needs no mention. Missing
and unknown arguments are Python's own errors. Arguments that do not fit each other (a plan and a mesh) are told where
that is known.

A check takes microseconds. What is called in every step of a training looks at its arguments by itself, and calls
:meth:`Kind.check` only where they are unusual.
"""

from __future__ import annotations

import functools
import inspect
import itertools
import math
import numbers
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parameter import is_lazy

from shardgraph.errors import ArgumentError, FieldError, ShardGraphError, nearest, shown
from shardgraph.sizes import SIZE, is_whole, parse_bytes

P = ParamSpec("P")
R = TypeVar("R")


@dataclass(frozen=True)
class Kind:
    """What an argument may be: ``allowed`` in words, and whether a value ``fits``.

    ``hint`` adds what helps with a value that does not, ``convert`` makes what the function is given of one that does.
    """

    allowed: str
    fits: Callable[[Any], bool]
    hint: Callable[[Any], str] = lambda value: ""
    convert: Callable[[Any], Any] = lambda value: value
    error: type[ArgumentError] = ArgumentError

    def __or__(self, other: Kind) -> Kind:
        def fits(value: Any) -> bool:
            return self.fits(value) or other.fits(value)

        def convert(value: Any) -> Any:
            return self.convert(value) if self.fits(value) else other.convert(value)

        def hint(value: Any) -> str:
            return self.hint(value) or other.hint(value)

        return Kind(f"{self.allowed}, or {other.allowed}", fits, hint, convert, self.error)

    def check(self, name: str, value: Any, or_else: str = "") -> Any:
        """``value``, converted.

        Raises:
            ArgumentError: it does not fit; ``or_else`` is what else may be given.
        """
        if not self.fits(value):
            raise self.error(f"{name} is {shown(value)}; it may be {self.allowed}{or_else}{self.hint(value)}")
        return self.convert(value)


def checked(*tables: Mapping[str, Kind], **kinds: Kind) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Decorate a function or method to check its arguments: by ``kinds``, and those of ``tables`` that it has."""
    known = {name: kind for table in tables for name, kind in table.items()} | kinds

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        signature = inspect.signature(function)
        assert kinds.keys() <= signature.parameters.keys(), kinds.keys() - signature.parameters.keys()
        mine = {name: (known[name], each) for name, each in signature.parameters.items() if name in known}
        called = function.__qualname__.removesuffix(".__init__")

        @functools.wraps(function)
        def door(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                bound = signature.bind(*args, **kwargs)
            except TypeError:
                return function(*args, **kwargs)  # Python says which argument is missing or unknown
            given = bound.arguments
            for name, (kind, parameter) in mine.items():
                if name not in given or given[name] is parameter.default:
                    continue
                or_none = ", or None" if parameter.default is None else ""
                given[name] = kind.check(f"{called}(): {name}", given[name], or_none)
            return function(*bound.args, **bound.kwargs)

        return door

    return decorate


def check_fields(record: Any, where: str, **kinds: Kind) -> None:
    """Check fields of a frozen dataclass in its ``__post_init__``, and convert them; ``where`` says whose they are.

    Raises:
        ArgumentError: one of them does not fit.
    """
    for name, kind in kinds.items():
        value = getattr(record, name)
        converted = kind.check(f"{where}{name}", value)
        if converted is not value:
            object.__setattr__(record, name, converted)


# -- what there is


def instance(allowed: str, *classes: type, hint: Callable[[Any], str] = lambda value: "") -> Kind:
    """An object of one of ``classes``."""
    return Kind(allowed, lambda value: isinstance(value, classes), hint)


def one_of(names: Iterable[str]) -> Kind:
    """One of these texts."""
    names = list(names)

    def hint(value: Any) -> str:
        return nearest(value, names) if isinstance(value, str) else ""

    return Kind(" or ".join(map(repr, names)), lambda value: isinstance(value, str) and value in names, hint)


def number(allowed: str, fits: Callable[[float], bool]) -> Kind:
    """A number, not a boolean, of which ``fits`` is true; it is never so of NaN where ``fits`` compares."""

    def is_it(value: Any) -> bool:
        if not isinstance(value, numbers.Real) or isinstance(value, (bool, np.bool_)):
            return False
        try:
            return fits(float(value))
        except OverflowError:  # larger than all numbers of 64 bits
            return False

    return Kind(allowed, is_it)


def whole(least: int, what: str = "a whole number") -> Kind:
    """A whole number from ``least``."""
    return Kind(f"{what} from {least}", lambda value: is_whole(value, least))


def sequence_of(allowed: str, each: Kind, least: int = 0) -> Kind:
    """A list or tuple of at least so many of what ``each`` is; it becomes a tuple. A text is no sequence of letters."""

    def fits(value: Any) -> bool:
        return LIST.fits(value) and len(value) >= least and all(map(each.fits, value))

    return Kind(allowed, fits, convert=tuple, error=FieldError)


def mapping_of(allowed: str, each: Kind, names: Callable[[Any], bool] = lambda name: isinstance(name, str)) -> Kind:
    """A mapping of names to what ``each`` is."""

    def fits(value: Any) -> bool:
        return isinstance(value, Mapping) and all(map(names, value)) and all(map(each.fits, value.values()))

    return Kind(allowed, fits)


def of_plan(kind: Kind) -> Kind:
    """The same of a field of a plan: an error is a PlanError too."""
    return Kind(kind.allowed, kind.fits, kind.hint, kind.convert, FieldError)


def _class_given(value: Any) -> str:
    if isinstance(value, type) and issubclass(value, nn.Module):
        return f"; this is the class: make a module of it, {value.__name__}(...)"
    return ""


def _lazy(model: nn.Module) -> str:
    """The name of a parameter or buffer that gets its shape at the first call, or ``""``."""
    named = itertools.chain(model.named_parameters(), model.named_buffers())
    return next((name for name, each in named if is_lazy(each)), "")


def _made_by_call(value: Any) -> str:
    if not isinstance(value, nn.Module):
        return ""
    return f"; {_lazy(value)!r} is of a lazy module: call the model once, with inputs as it will have, and give it then"


def _is_size(value: Any) -> bool:
    if not isinstance(value, (int, float, str)):
        return False
    try:
        return 0 < parse_bytes(value) < 2**63
    except (ShardGraphError, OverflowError):
        return False


def _array_in(value: Any) -> bool:
    """Whether there is a numpy array in the inputs of a call."""
    if isinstance(value, Mapping):
        return any(map(_array_in, value.values()))
    return isinstance(value, np.ndarray) or (isinstance(value, (tuple, list)) and any(map(_array_in, value)))


FROM_NUMPY = "; torch.from_numpy(array) makes a tensor of a numpy array"


def _inputs_hint(value: Any) -> str:
    if isinstance(value, np.ndarray) or _array_in(value):
        return FROM_NUMPY
    if isinstance(value, str):
        return f"; a plan is named as plan={value!r}"
    return "; inputs by name are example_kwargs" if isinstance(value, Mapping) else ""


def _names_device(value: Any) -> bool:
    try:
        return isinstance(value, torch.device) or (isinstance(value, str) and bool(torch.device(value)))
    except RuntimeError:
        return False


def _may_be_optimized(value: Any) -> bool:
    """Whether an optimizer may take these: an iterator is taken for what it gives, which torch looks at."""
    if not isinstance(value, Sequence):
        others = (Mapping, torch.Tensor, nn.Module, np.ndarray, AbstractSet)
        return isinstance(value, Iterable) and not isinstance(value, others)
    return len(value) > 0 and all(isinstance(each, (torch.Tensor, Mapping, tuple)) for each in value)


def _are_axes(pairs: Iterable[Any]) -> bool:
    pairs = list(pairs)
    if not all(isinstance(pair, tuple) and len(pair) == 2 for pair in pairs):
        return False
    named = all(isinstance(axis, str) and axis and is_whole(size, 1) for axis, size in pairs)
    return named and len(dict(pairs)) == len(pairs)


LIST = Kind("a list or tuple", lambda value: isinstance(value, Sequence) and not isinstance(value, (str, bytes)))
NONE = Kind("None", lambda value: value is None)
ANYTHING = Kind("anything", lambda value: True)
BOOL = instance("True or False", bool)
TEXT = instance("a text", str)
NAME = Kind("a text that is not empty", lambda value: isinstance(value, str) and value != "")
CALLABLE = Kind("a function", callable)
PATH = Kind(
    "a path", lambda value: isinstance(value, (str, os.PathLike)) and "\0" not in str(value) and str(value) != ""
)
WHOLE = whole(1)
SEED = Kind("a whole number of 64 bits", lambda value: is_whole(value, -(2**63)) and value < 2**64)
SECONDS = number("a number of seconds above 0 and below 1e9", lambda value: 0 < value < 1e9)
POSITIVE = number("a number above 0", lambda value: 0 < value < math.inf)
NOT_NEGATIVE = number("a number from 0", lambda value: 0 <= value < math.inf)
BYTES = of_plan(Kind(SIZE, _is_size))

MODEL = Kind(
    "an nn.Module, whose parameters all have shapes",
    lambda value: isinstance(value, nn.Module) and not _lazy(value),
    lambda value: _class_given(value) or _made_by_call(value),
)
OPTIMIZER = instance("a torch.optim.Optimizer", torch.optim.Optimizer)
MAKES_OPTIMIZER = Kind("what makes an optimizer of parameters, such as torch.optim.Adam", callable)
TENSOR = instance("a tensor", torch.Tensor)
DTYPE = instance("a torch.dtype", torch.dtype)
DEVICE = Kind("a device, such as 'cpu' or 'cuda:0'", _names_device)
GROUP = instance("a process group", dist.ProcessGroup)
INPUTS = Kind(
    "the positional inputs of one call, as a tuple: (x,); one tensor is that too",
    lambda value: isinstance(value, (tuple, list, torch.Tensor)) and not _array_in(value),
    _inputs_hint,
    lambda value: (value,) if isinstance(value, torch.Tensor) else tuple(value),
)
KEYWORDS = Kind(
    "the keyword inputs of one call, by name: {'x': x}",
    lambda value: isinstance(value, Mapping) and all(isinstance(key, str) for key in value) and not _array_in(value),
    lambda value: FROM_NUMPY if _array_in(value) else "",
)
MESH = Kind(
    "axis sizes by name, whole numbers from 1, outermost first: {'dp': 4}",
    lambda value: isinstance(value, Mapping) and _are_axes(value.items()),
    error=FieldError,
)
AXES = Kind("pairs of them", lambda value: isinstance(value, (tuple, list)) and _are_axes(value), error=FieldError)
PARAMETERS = Kind(
    "parameters or parameter groups, such as module.parameters()",
    _may_be_optimized,
    lambda value: "; give its parameters()" if isinstance(value, nn.Module) else "",
)
STATE = mapping_of("a state dict: what a module has by name", ANYTHING)
# Whether they have these methods, ranks agree on: one that lacks an object must not leave the others waiting.
OBJECTS = mapping_of("objects that have state_dict() and load_state_dict(), by name", ANYTHING)
