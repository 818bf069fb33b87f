"""The tracer's guards that modules have no hooks, checked together: they are as many as all others."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from operator import getitem, is_, itemgetter
from typing import Any

from torch import nn
from torch._guards import Guard

from shardgraph.torch_api.guarded_layers import Repeated, plain_name

_modules = itemgetter("_modules")
Hooks = Mapping[str, Sequence[str]]
"""By the path of a module, the names of its dictionaries of hooks that are empty."""


class NoHooks:
    """Conditions that dictionaries of hooks are empty, of the modules that are at these paths in ``root`` at the time.

    Raises:
        LookupError: it has no such modules.
    """

    def __init__(self, root: nn.Module, hooks: Hooks) -> None:
        self._root, self._hooks = root, hooks
        self._look_up()

    def _look_up(self) -> None:
        found = {"": self._root}
        places: list[tuple[dict[str, Any], str, nn.Module]] = []
        together: defaultdict[tuple[str, ...], list[dict[str, Any]]] = defaultdict(list)
        for path, names in self._hooks.items():
            parts = path.split(".") if path else []
            for i, name in enumerate(parts):
                here = ".".join(parts[: i + 1])
                if here not in found:
                    parent = found[".".join(parts[:i])]
                    found[here] = _modules(vars(parent))[name]
                    places.append((vars(parent), name, found[here]))
            together[tuple(names)].append(vars(found[path]))
        self._parents, self._names, self._children = map(list, zip(*places, strict=True)) if places else ([], [], [])
        self._together = [(itemgetter(*names, names[0]), modules) for names, modules in together.items()]

    @property
    def hold(self) -> bool:
        """Whether all modules are without these hooks."""
        try:
            if not all(map(is_, map(getitem, map(_modules, self._parents), self._names), self._children)):
                self._look_up()  # a module is another one
            return not any(any(chain.from_iterable(map(get, modules))) for get, modules in self._together)
        except (LookupError, TypeError):
            return False

    @property
    def failing(self) -> str:
        """The first condition that does not hold, such as ``not model.dropout._forward_hooks``; empty if all do."""
        if self.hold:
            return ""
        for path, names in self._hooks.items():
            for name in names:
                try:
                    empty = not getattr(self._root.get_submodule(path), name)
                except AttributeError:
                    empty = False
                if not empty:
                    return f"not {path}.{name}"
        return "a module that forward used is gone"


def without_hooks(
    guards: Iterable[Guard], own: str, root: nn.Module, repeated: Repeated
) -> tuple[dict[str, list[str]], list[Guard]]:
    """The dictionaries of hooks that guards say are empty, and so they are in ``root``, and all other guards.

    ``own`` is the tracer's name of the root. What is said of a layer is of all layers that it stands for, as in
    :func:`shardgraph.torch_api.guarded_layers.for_all_layers`.
    """
    hooks: defaultdict[str, list[str]] = defaultdict(list)
    others: list[Guard] = []
    for guard in guards:
        paths, key = _said_of(guard, own, repeated)
        if paths and all(_is_empty(root, path, key) for path in paths):
            for path in paths:
                hooks[path].append(key)
        else:
            others.append(guard)
    return {path: sorted(keys) for path, keys in hooks.items()}, others


def _said_of(guard: Guard, own: str, repeated: Repeated) -> tuple[list[str], str]:
    """The paths of the modules of which a guard says that they have no hooks, and of which kind; no paths if it does
    not say so."""
    if guard.create_fn_name() != "EMPTY_NN_MODULE_HOOKS_DICT":
        return [], ""
    name = plain_name(guard.originating_source).removeprefix(own)
    match = re.fullmatch(r"((?:\.\w+)*)\.(_\w+)", name)
    if match is None:
        return [], ""
    path, key = match[1].removeprefix("."), match[2]
    for stack, layers in repeated:
        number, _, rest = path.removeprefix(f"{stack}.").partition(".")
        if path.startswith(f"{stack}.") and number.isdecimal() and int(number) in layers:
            return [".".join(filter(None, (stack, str(each), rest))) for each in layers[int(number)]], key
    return [path], key


def _is_empty(root: nn.Module, path: str, key: str) -> bool:
    try:
        return vars(root.get_submodule(path))[key] == {}
    except (AttributeError, KeyError):
        return False
