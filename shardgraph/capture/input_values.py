"""Calls of a model on fake tensors in which those that are computed from inputs alone have values.

What a model's Python asks for, and the shapes that depend on values, are then those of the real inputs. Nothing is
computed before it is asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardgraph.capture.numbers import is_number
from shardgraph.torch_api import FakeTensor, outside_modes, pytree

aten = torch.ops.aten
_ASKED = (aten._local_scalar_dense.default, aten.equal.default)
_CPU = torch.device("cpu")


@dataclass(eq=False)
class _Known:
    """A value that a function makes of others that are known; ``place`` is where in the model it was made."""

    function: Callable[..., Any]
    args: Any = ()
    kwargs: Any = field(default_factory=dict)
    place: Any = None
    made: Any = None

    def value(self) -> Any:
        """The real value, on the CPU."""
        for each in self._pending():
            args, kwargs = pytree.tree_map_only(_Known, lambda known: known.made, (each.args, each.kwargs))
            each.made = each.function(*args, **kwargs)
        return self.made

    def _pending(self) -> list[_Known]:
        """This value after all it depends on, without what has been made."""
        found: dict[_Known, None] = {}
        stack = [self]
        while stack:
            missing = [each for each in stack[-1].operands() if each.made is None and each not in found]
            if missing:
                stack += missing
            elif (last := stack.pop()).made is None:
                found[last] = None
        return list(found)

    def operands(self) -> Iterator[_Known]:
        return (leaf for leaf in pytree.tree_leaves((self.args, self.kwargs)) if isinstance(leaf, _Known))

    def places(self) -> set[Any]:
        """Where this value, and all it depends on, was made."""
        seen, stack = {self}, [self]
        while stack:
            fresh = {*stack.pop().operands()} - seen
            seen |= fresh
            stack += fresh
        return {each.place for each in seen}


class InputValues(TorchDispatchMode):
    """Inside, the values of ``fakes`` are those of ``leaves``, flattened inputs of which some may have none.

    ``place`` tells where in the model a call is. ``told`` is given every operation with its operands that was given a
    value, that value or shape, and the places in which it was computed.
    """

    def __init__(
        self,
        fakes: Iterable[Any],
        leaves: Iterable[Any],
        place: Callable[[], Any] = lambda: None,
        told: Callable[[Any, Any, Any, set[Any]], None] = lambda *_: None,
    ) -> None:
        super().__init__()
        self._known: dict[Any, _Known] = {}
        self._held: list[Any] = []  # so that no memory is used twice
        self._place, self._told = place, told
        for fake, leaf in zip(fakes, leaves, strict=True):
            if isinstance(fake, torch.Tensor) and not is_empty(leaf) and not is_number(leaf):
                self._keep(fake, _Known(_on_cpu, (leaf,)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.is_mutable:
            self._forget(func, args, kwargs)
            return func(*self._without_masks(func, args), **kwargs)
        known = self._computed(func, args, kwargs)
        if known is None:
            return func(*self._without_masks(func, args), **kwargs)
        if func in _ASKED:
            value = _real(known)
            self._told(func, args, value, known.places())
            return value
        if torch.Tag.dynamic_output_shape in func.tags:
            result = self._sized(known, args)
            self._told(func, args, pytree.tree_map(lambda each: each.shape, result), known.places())
        else:
            result = func(*args, **kwargs)
        if isinstance(result, torch.Tensor):
            self._keep(result, known)
        elif isinstance(result, (tuple, list)):
            for i, each in enumerate(result):
                if isinstance(each, torch.Tensor):
                    self._keep(each, _Known(lambda whole, i: whole[i], (known, i), place=known.place))
        return result

    def _of(self, tensor: Any) -> _Known | None:
        return self._known.get(memory_of(tensor)) if isinstance(tensor, torch.Tensor) else None

    def _keep(self, tensor: torch.Tensor, known: _Known) -> None:
        self._held.append(tensor)
        self._known[memory_of(tensor)] = known

    def _forget(self, func: Any, args: Any, kwargs: Any) -> None:
        """Of whatever shares the memory that an operation writes to the value is not known from now on."""
        arguments = func._schema.arguments
        given = dict(zip((each.name for each in arguments), args, strict=False)) | kwargs
        writes = (each.name for each in arguments if each.alias_info is not None and each.alias_info.is_write)
        written = pytree.tree_leaves([given.get(name) for name in writes])
        lost = {each.untyped_storage()._cdata for each in written if isinstance(each, torch.Tensor)}
        self._known = {memory: known for memory, known in self._known.items() if memory[0] not in lost}

    def _computed(self, func: Any, args: Any, kwargs: Any) -> _Known | None:
        """What is known of the result of an operation; None if it depends on more than inputs."""
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        given = []
        for leaf in leaves:
            each = self._of(leaf) if isinstance(leaf, torch.Tensor) else leaf
            if isinstance(leaf, torch.Tensor) and each is None:
                constant = leaf.constant if isinstance(leaf, FakeTensor) else leaf
                if constant is None:
                    return None
                each = _Known(_on_cpu, (constant,))
            given.append(_CPU if isinstance(each, torch.device) else each)
        own, named = pytree.tree_unflatten(given, spec)
        named = {name: value for name, value in named.items() if name != "pin_memory"}
        return _Known(func, own, named, place=self._place())

    def _sized(self, known: _Known, args: Any) -> Any:
        """A fake tensor like the real one, for an operation the shape of whose result depends on values."""
        like = next(leaf for leaf in pytree.tree_leaves(args) if isinstance(leaf, torch.Tensor))
        return pytree.tree_map_only(torch.Tensor, lambda t: like.new_empty(t.shape, dtype=t.dtype), _real(known))

    def _without_masks(self, func: Any, args: Any) -> Any:
        """The arguments of an operation with an index, in which known masks are the numbers of what they choose."""
        if func.overloadpacket not in (aten.index, aten.index_put, aten.index_put_):
            return args
        whole, index, *value = args
        chosen: list[Any] = []
        for each in index:
            known = self._of(each) if isinstance(each, torch.Tensor) and each.dtype is torch.bool else None
            if known is None:
                chosen.append(each)
            else:
                count = _real(_Known(_count, (known,)))
                self._told(func, each, count, known.places())
                chosen += aten.nonzero_static.default(each, size=count).unbind(1)
        return (whole, chosen, *value)


def memory_of(tensor: torch.Tensor) -> Any:
    """Autograd gives a view an object of its own: it is known by the memory that it is."""
    return tensor.untyped_storage()._cdata, tensor.storage_offset(), tensor.shape, tensor.stride(), tensor.dtype


def is_empty(leaf: Any) -> bool:
    """Whether it is no tensor with values."""
    return not isinstance(leaf, torch.Tensor) or leaf.is_meta or isinstance(leaf, FakeTensor)


def _on_cpu(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().cpu()


def _count(mask: torch.Tensor) -> int:
    return int(mask.count_nonzero())


def _real(known: _Known) -> Any:
    with outside_modes(), torch.no_grad():
        return known.value()
