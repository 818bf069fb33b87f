"""Values of nodes by fake propagation: the operation itself on fake tensors, or a rule that replaces it.

Operations that have no meaning outside a group of ranks (collectives, and operations that depend on the rank) have a
rule, registered next to their definition. Values are those of rank 0, which has the longest of uneven shards.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import fx
from torch.utils import _pytree as pytree

from shardgraph import torch_api
from shardgraph.mesh import Mesh, size_along

Rule = Callable[..., Any]
_RULES: dict[Any, Rule] = {}
R = TypeVar("R", bound=Rule)
Make = Callable[[list[torch.Tensor]], Any]
"""Makes a value of the operands of an operation."""


def fake(target: Any) -> Callable[[R], R]:
    """Register the rule for the value of a node that calls ``target``.

    Its arguments are a function from a mesh axis to its number of ranks, and the node's arguments as fake tensors.
    """

    def register(rule: R) -> R:
        _RULES[target] = rule
        return rule

    return register


def arranges(operation: R) -> R:
    """Decorate an operation that arranges its operands, so that its value follows from their layouts alone."""
    fake(operation)(lambda ranks, *args: torch_api.by_layout(operation, *args))
    return operation


@dataclass(frozen=True)
class Propagation:
    """Computes values of nodes in ``fake_mode``, on a rank of ``mesh``.

    An operation runs once for operands of one layout, and later results are laid out as its own: equal layers need the
    same operations.
    """

    fake_mode: Any
    mesh: Mesh
    _made: dict[Any, Make] = field(default_factory=dict, init=False, repr=False, compare=False)

    def value(self, target: Any, args: Any, kwargs: Any) -> Any:
        """The result of ``target`` for arguments in which nodes stand for their values."""
        if target is operator.getitem:
            return self._run(target, *self._operands(args, kwargs))
        if kwargs or any(isinstance(arg, (list, tuple, dict)) for arg in args):
            leaves, spec = pytree.tree_flatten(self._operands(args, kwargs))
        else:  # most calls: each argument is a leaf
            leaves, spec = [self._operand(arg) for arg in args], None
        tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
        if not all(map(_is_known, leaves)):  # a number that is read from a tensor cannot be compared
            return self._run(target, *self._operands(args, kwargs))
        key = target, spec, tuple([_placed(leaf, tensors) for leaf in leaves])
        if key in self._made:
            return self._made[key](tensors)
        value = self._run(target, *self._operands(args, kwargs))
        if (make := again(self.fake_mode, value, tensors)) is not None:
            self._made[key] = make
        return value

    def _operand(self, arg: Any) -> Any:
        return self.fake(arg.meta["val"]) if isinstance(arg, fx.Node) else arg

    def _operands(self, args: Any, kwargs: Any) -> Any:
        return pytree.tree_map_only(fx.Node, self._operand, (args, kwargs))

    def _run(self, target: Any, args: Any, kwargs: Any) -> Any:
        with self.fake_mode, torch_api.no_autocast():
            rule = _RULES.get(target)
            return target(*args, **kwargs) if rule is None else rule(self.ranks, *args, **kwargs)

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


def again(mode: Any, value: Any, operands: list[torch.Tensor]) -> Make | None:
    """What makes a value like ``value``, of fake tensors of ``mode``, of other operands that are laid out as those that
    it was made of; in memory of theirs where ``value`` is in theirs. None if there is more to it than a layout."""
    leaves, spec = pytree.tree_flatten(value)
    if not all(torch_api.is_plain_fake(leaf) for leaf in leaves):
        return None
    memories = [leaf.untyped_storage()._cdata for leaf in (*operands, *leaves)]
    own = memories[len(operands) :]
    places = [(memories.index(each), leaf) for each, leaf in zip(own, leaves, strict=True)]

    def make(others: list[torch.Tensor]) -> Any:
        storages = {place: other.untyped_storage() for place, other in enumerate(others)}
        for place, leaf in places:
            if place not in storages:
                storages[place] = torch_api.meta_memory(leaf.untyped_storage().nbytes())
        return pytree.tree_unflatten([torch_api.fake_like(mode, storages[place], leaf) for place, leaf in places], spec)

    return make


def _is_known(leaf: Any) -> bool:
    """Whether an argument has no number that is known only when the program runs."""
    numbers = (leaf, *leaf.shape, *leaf.stride()) if isinstance(leaf, torch.Tensor) else (leaf,)
    return not any(isinstance(number, (torch.SymInt, torch.SymFloat, torch.SymBool)) for number in numbers)


def _placed(leaf: Any, tensors: list[torch.Tensor]) -> Any:
    """An argument as what a result depends on: of a tensor its layout, and which of ``tensors`` has its memory."""
    if not isinstance(leaf, torch.Tensor):
        return type(leaf), leaf
    memory = leaf.untyped_storage()
    shared = next(i for i, each in enumerate(tensors) if each.untyped_storage()._cdata == memory._cdata)
    layout = leaf.shape, leaf.stride(), leaf.storage_offset(), leaf.dtype, leaf.device, leaf.requires_grad
    return *layout, memory.nbytes(), shared


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
