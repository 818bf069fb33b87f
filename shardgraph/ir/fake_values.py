"""Values of nodes by fake propagation: the operation itself on fake tensors, or a rule that replaces it.

Operations that have no meaning outside a group of ranks (collectives, and operations that depend on the rank) have a
rule, registered next to their definition. Values are those of rank 0, which has the longest of uneven shards.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from shardgraph import torch_api
from shardgraph.mesh import Mesh, size_along

Rule = Callable[..., Any]
_RULES: dict[Any, Rule] = {}
R = TypeVar("R", bound=Rule)


def fake(target: Any) -> Callable[[R], R]:
    """Register the rule for the value of a node that calls ``target``.

    Its arguments are a function from a mesh axis to its number of ranks, and the node's arguments as fake tensors.
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
        """The result of ``target`` for arguments in which nodes stand for their values."""
        operands, named = pytree.tree_map_only(fx.Node, lambda node: self.fake(node.meta["val"]), (args, kwargs))
        with self.fake_mode, torch_api.no_autocast():
            rule = _RULES.get(target)
            return target(*operands, **named) if rule is None else rule(self.ranks, *operands, **named)

    def empty(self, shape: tuple[int, ...], like: torch.Tensor) -> torch.Tensor:
        """A contiguous value of the given shape, otherwise like ``like``."""
        with self.fake_mode:
            return torch.empty(shape, dtype=like.dtype, device=like.device)

    def fake(self, value: Any) -> Any:
        """A value converted to this mode: constants are real tensors, and fake tensors of two modes do not mix."""
        if not isinstance(value, torch.Tensor) or getattr(value, "fake_mode", None) is self.fake_mode:
            return value
        with self.fake_mode:
            return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=value.device)

    def ranks(self, axis: str) -> int:
        """The number of ranks along an axis, or along several together."""
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
