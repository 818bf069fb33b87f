"""Values of nodes by fake propagation: the operation itself on fake tensors, or a rule that stands in for it.

A rule is registered beside the definition of what has no meaning outside of a group of ranks: collectives, and the
operations to which a rank gives their meaning. Values are those of rank 0, which has the longest of uneven parts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from shardgraph.mesh import Mesh, size_along

Rule = Callable[..., Any]
_RULES: dict[Any, Rule] = {}
R = TypeVar("R", bound=Rule)


def fake(target: Any) -> Callable[[R], R]:
    """Register the rule that gives the value of a node calling ``target``.

    It takes the number of ranks along a mesh axis, as a function of the axis, and the arguments with fake tensors.
    """

    def register(rule: R) -> R:
        _RULES[target] = rule
        return rule

    return register


@dataclass(frozen=True)
class Propagation:
    """Computes values of nodes in ``fake_mode``, on a rank of ``mesh``."""

    fake_mode: Any
    mesh: Mesh

    def value(self, target: Any, args: Any, kwargs: Any) -> Any:
        """What ``target`` gives for arguments in which nodes stand for their values."""
        given, named = pytree.tree_map_only(fx.Node, lambda node: self.fake(node.meta["val"]), (args, kwargs))
        with self.fake_mode:
            rule = _RULES.get(target)
            return target(*given, **named) if rule is None else rule(self.ranks, *given, **named)

    def empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """The contiguous value of a given shape that an input has."""
        with self.fake_mode:
            return torch.empty(shape, dtype=like.dtype, device=like.device)

    def fake(self, value: Any) -> Any:
        """A value in this mode: constants have real tensors, and those of two modes do not mix."""
        if not isinstance(value, torch.Tensor) or getattr(value, "fake_mode", None) is self.fake_mode:
            return value
        with self.fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    def ranks(self, axis: str) -> int:
        """How many ranks there are along an axis, or several together."""
        return size_along(self.mesh, axis)


def layout_of(value: Any) -> list[Any]:
    """Each tensor's shape, dtype, device and strides, where they matter; other values as such."""
    leaves = pytree.tree_leaves(value, is_leaf=lambda leaf: leaf is None)
    return [
        (tuple(leaf.shape), leaf.dtype, leaf.device, _strides(leaf)) if isinstance(leaf, torch.Tensor) else leaf
        for leaf in leaves
    ]


def _strides(tensor: torch.Tensor) -> tuple[int, ...]:
    if not tensor.numel():
        return ()
    return tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
