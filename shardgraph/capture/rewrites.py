"""Modules that compute something in a way that cannot be captured, and another way for each in which it can.

One table, by class. While a model is captured, the classes that it has modules of compute with the other forward; it
must give the same results and gradients. What runs outside of programs is as the classes have it.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from fnmatch import fnmatch
from typing import Any

from torch import nn

from shardgraph.arguments import CALLABLE, NONE, Kind, checked
from shardgraph.capture.expert_loops import EXPERT_LOOPS
from shardgraph.capture.ranges import RANGES
from shardgraph.capture.speech import MASKS, SOUND_ENCODERS

_NOT_COMPILING = "*.modeling_switch_transformers.is_torchdynamo_compiling"
_functions: dict[str, Callable[[Callable[..., Any]], Callable[..., Any]]] = MASKS | {
    _NOT_COMPILING: lambda _: lambda: False  # the way that it takes if it compiles fails without an attention mask
}
_rewrites: dict[str, Callable[..., Any]] = EXPERT_LOOPS | RANGES | SOUND_ENCODERS
_one_at_a_time = threading.RLock()

_CLASS = Kind(
    "a class of modules, or the name of one, such as 'package.module.Class'",
    lambda value: "." in value if isinstance(value, str) else isinstance(value, type) and issubclass(value, nn.Module),
)


@checked(kind=_CLASS, forward=CALLABLE | NONE)
def rewrite(kind: type[nn.Module] | str, forward: Callable[..., Any] | None) -> None:
    """Have modules of a class captured with another forward, from now on.

    Args:
        kind: the class, or its name with that of its module, ``"package.module.Class"``; subclasses that have no
            forward of their own are included.
        forward: ``forward(self, ...)``, which returns what the class's own does, with the same gradients, and can be
            captured; None to take back what was said.

    Raises:
        ArgumentError, a TypeError: ``kind`` is neither.
    """
    name = kind if isinstance(kind, str) else _name(kind)
    if forward is None:
        _rewrites.pop(name, None)
    else:
        _rewrites[name] = forward


def rewrites_of(model: nn.Module) -> dict[type[nn.Module], Callable[..., Any]]:
    """The classes of a model's modules that have another forward, and that."""
    found = {}
    for kind in dict.fromkeys(map(type, model.modules())):
        owner = next((each for each in kind.__mro__ if "forward" in vars(each)), None)
        if owner is not None and (forward := _rewrites.get(_name(owner))) is not None:
            found[owner] = forward
    return found


@contextmanager
def rewritten(model: nn.Module) -> Iterator[None]:
    """Inside, these classes compute with their other forward, and some functions of ``transformers`` are others."""
    with _one_at_a_time:
        found = [(kind, "forward", forward) for kind, forward in rewrites_of(model).items()]
        found += [(module, name, make(vars(module)[name])) for module, name, make in _functions_of(model)]
        before = [(owner, name, vars(owner)[name]) for owner, name, _ in found]
        try:
            for owner, name, value in found:
                setattr(owner, name, value)
            yield
        finally:
            for owner, name, value in before:
                setattr(owner, name, value)


def _functions_of(model: nn.Module) -> list[tuple[Any, str, Callable[..., Any]]]:
    """The modules of Python that have such functions, and what makes the others."""
    modules = (sys.modules.get(kind.__module__) for kind in dict.fromkeys(map(type, model.modules())))
    models = [each for each in dict.fromkeys(modules) if each and each.__name__.startswith("transformers.models.")]
    named = [(each, pattern, make) for each in models for pattern, make in _functions.items()]
    found = [(each, pattern.rpartition("."), make) for each, pattern, make in named]
    return [
        (each, name, make)
        for each, (where, _, name), make in found
        if name in vars(each) and fnmatch(each.__name__, where)
    ]


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
