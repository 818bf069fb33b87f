"""Buckets: what is done to the buffer is done to each of the tensors in it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from shardgraph import ir
from shardgraph.ir import buckets
from shardgraph.proof.held import Held, UntypedError

aten = torch.ops.aten

Ranks = Callable[[str], int]

_OF_EACH = frozenset({ir.WAIT, ir.ALL_REDUCE, aten.div.Tensor, aten._to_copy.default})
"""What neither moves elements nor depends on where they are."""


@dataclass(frozen=True)
class Packed:
    """The tensors in a buffer, which has ``parts`` parts of each, part after part."""

    tensors: tuple[Held, ...]
    parts: int

    def then(self, target: Any, args: tuple[Any, ...], ranks: Ranks, of_each: Callable[[Held], Any]) -> Any:
        """What an operation on the buffer gives; ``of_each`` is what it gives of a tensor.

        Raises:
            UntypedError: the operation reads the buffer otherwise than it is laid out.
        """
        if target in (buckets.unpack, buckets.unpack_parts):
            return self._unpacked(*args)
        parts = self.parts
        if target in (ir.ALL_GATHER, ir.REDUCE_SCATTER):
            size = ranks(args[-1])
            before, parts = (1, size) if target is ir.ALL_GATHER else (size, 1)
            if self.parts != before:
                raise UntypedError(f"a buffer of {self.parts} parts, and {before} would be right")
        elif target not in _OF_EACH or any(isinstance(arg, Held) for arg in args):
            raise UntypedError(f"{target} of a buffer of several tensors")
        tensors = tuple(of_each(each) for each in self.tensors)
        if not all(isinstance(each, Held) for each in tensors):
            raise UntypedError("of a tensor in the buffer it is not known")
        return replace(self, tensors=tensors, parts=parts)

    def _unpacked(self, shapes: Sequence[Sequence[int]], parts: int = 1) -> list[Held]:
        if [tuple(shape) for shape in shapes] != [each.shape for each in self.tensors] or parts != self.parts:
            raise UntypedError("a buffer is read otherwise than it was written")
        return list(self.tensors)


def packed(tensors: Sequence[Any], parts: int) -> Packed:
    """What :func:`shardgraph.ir.buckets.pack` gives.

    Raises:
        UntypedError: a tensor does not have equal parts.
    """
    if any(each.shape[0] % parts if each.shape else parts > 1 for each in tensors):
        raise UntypedError(f"a tensor without {parts} equal parts is packed")
    return Packed(tuple(tensors), parts)
