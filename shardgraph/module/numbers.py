"""Python numbers among the inputs of a sharded module's calls, and their part of a program's cache key."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

import torch

from shardgraph.capture.numbers import as_tensor, constant_key

_INT64 = range(-(2**63), 2**63)


def shown(key: tuple[type, Any]) -> str:
    """A :func:`constant_key` as readable text."""
    return str(key[1]) if issubclass(key[0], (float, complex)) else repr(key[1])


class Numbers:
    """Which numbers are constants of a program: each of them, until its value changes.

    A number that changes becomes a 0-dimensional tensor input, so that a new value needs no new program: in float64, or
    in float32 where float64 would promote other tensors as the number does not. If neither computes what the number
    does (a size, an index, a number that the model returns), it stays a constant, with one program per value.
    """

    def __init__(self) -> None:
        self._seen: dict[tuple[Any, int, type], Any] = {}
        self._changing: set[tuple[Any, int, type]] = set()
        self._floating: defaultdict[Any, torch.dtype | None] = defaultdict(lambda: torch.float64)

    def see(self, leaves: list[Any], spec: Any) -> None:
        """Record the numbers of a call with these flattened inputs."""
        for i, leaf in enumerate(leaves):
            if type(leaf) is float or (type(leaf) is int and leaf in _INT64):
                where = (spec, i, type(leaf))
                if constant_key(self._seen.setdefault(where, leaf)) != constant_key(leaf):
                    self._changing.add(where)

    def lift(self, leaves: list[Any], spec: Any) -> list[Any]:
        """The inputs, with numbers that change replaced by tensors."""
        floating = self._floating[spec]
        if floating is None or not self._changing:
            return leaves
        return [as_tensor(leaf, floating) if self._lifts(spec, i, leaf) else leaf for i, leaf in enumerate(leaves)]

    def give_up(self, spec: Any) -> bool:
        """Lift this structure's numbers to the next dtype, finally to none; returns whether that changes anything."""
        tried, kinds = self._floating[spec], {kind for structure, _, kind in self._changing if structure == spec}
        if tried is None or not kinds:
            return False
        self._floating[spec] = torch.float32 if float in kinds and tried == torch.float64 else None
        return True

    def _lifts(self, spec: Any, i: int, leaf: Any) -> bool:
        in_range = type(leaf) is not int or leaf in _INT64
        return in_range and (spec, i, type(leaf)) in self._changing
