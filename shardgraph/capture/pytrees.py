"""Inputs and outputs of types that pytree does not know: dataclasses and plain objects that hold tensors.

A model may return its own dataclass, or an object such as a key-value cache, and be given a batch that is a dataclass.
Such a type is registered with ``torch.utils._pytree`` the first time it is seen: what holds tensors becomes children,
the rest is kept beside them. Of an input all attributes are children, since a program is chosen by what they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import is_dataclass
from typing import Any

import torch

from shardgraph.torch_api import pytree

_PLAIN = (torch.Tensor, int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


def flatten(call: Any) -> tuple[list[Any], Any]:
    """The leaves and the structure of what a module is called with, in which dataclasses with tensors are opened."""
    leaves, spec = pytree.tree_flatten(call)
    if _register_inputs(leaves):
        return flatten(call)
    return leaves, spec


def _register_inputs(leaves: Sequence[Any]) -> bool:
    """Register the types of dataclasses that hold tensors; whether there were any."""
    kinds = {
        type(leaf)
        for leaf in leaves
        if not isinstance(leaf, _PLAIN)
        and is_dataclass(leaf)
        and not isinstance(leaf, type)
        and hasattr(leaf, "__dict__")
        and any(isinstance(each, torch.Tensor) for each in pytree.tree_leaves(list(vars(leaf).values())))
    }
    for kind in kinds:
        pytree.register_pytree_node(kind, _flatten_all, _unflatten)
    return bool(kinds)


def register_types(value: Any) -> None:
    """Register the type of every unknown container in ``value``."""
    for leaf in pytree.tree_leaves(value):
        if isinstance(leaf, _PLAIN) or not hasattr(leaf, "__dict__") or isinstance(leaf, type):
            continue
        if type(leaf) not in pytree.SUPPORTED_NODES:
            pytree.register_pytree_node(type(leaf), _flatten, _unflatten)
        register_types(list(vars(leaf).values()))


def _is_child(value: Any) -> bool:
    """Whether an attribute holds tensors, or is of a type that may. The type of one that does is registered, also where
    the type of what has the attribute was registered for another model."""
    if isinstance(value, (list, tuple, dict)):
        return any(_is_child(item) for item in pytree.tree_leaves(value))
    if isinstance(value, torch.Tensor) or type(value) in pytree.SUPPORTED_NODES:
        return True
    held = pytree.tree_leaves(list(getattr(value, "__dict__", {}).values()))
    if any(isinstance(leaf, torch.Tensor) for leaf in held):
        register_types(value)
        return type(value) in pytree.SUPPORTED_NODES
    return False


def _flatten(value: Any) -> tuple[list[Any], Any]:
    state = vars(value)
    children = tuple(name for name, item in state.items() if _is_child(item))
    rest = tuple((name, item) for name, item in state.items() if name not in children)
    return [state[name] for name in children], (type(value), children, rest)


def _flatten_all(value: Any) -> tuple[list[Any], Any]:
    return list(vars(value).values()), (type(value), tuple(vars(value)), ())


def _unflatten(children: Any, context: Any) -> Any:
    cls, names, rest = context
    value = object.__new__(cls)
    vars(value).update(zip(names, children, strict=True))
    vars(value).update(rest)
    return value
