"""Outputs of types that pytree does not know: dataclasses and plain objects that hold tensors.

A model may return its own dataclass, or an object such as a key-value cache. Such a type is registered
with ``torch.utils._pytree`` the first time it is seen: what holds tensors becomes children, the rest is
kept beside them.
"""

from __future__ import annotations

from typing import Any

import torch

from shardgraph.torch_api import pytree

_PLAIN = (torch.Tensor, int, float, complex, bool, str, bytes, type(None), torch.dtype, torch.device, torch.Size)


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


def _unflatten(children: Any, context: Any) -> Any:
    cls, names, rest = context
    value = object.__new__(cls)
    vars(value).update(zip(names, children, strict=True))
    vars(value).update(rest)
    return value
