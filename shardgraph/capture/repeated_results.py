"""The results of a graph with many equal layers, in their order, from those of the graph with few.

Equal layers return equal things: keys and values for a cache, hidden states, weights of attention. Further layers
return theirs between what the two units return, so that all that comes later has a higher index.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from shardgraph import ir
from shardgraph.capture.insertion import pairs, with_copies
from shardgraph.capture.stacks import UnequalLayersError

RETURNED = (ir.Output, ir.IntermediateBase)
"""The roles that are numbered; a gradient that comes in has the number of what it is the gradient of."""


class RepeatedResults:
    """The results of a graph with few layers, by their ``roles`` and the ``units`` that they are of, and of the graph
    with ``repeats`` more units.

    ``units`` are 0 and 1 for the two units, anything else outside of them. ``order`` are the new graph's results: the
    position here of what each of them is, or is like, and the number of its unit, 0 outside. ``second`` are the
    positions of what the second unit returns, by those of their equals in the first.

    Raises:
        UnequalLayersError: the results of the second unit do not follow on those of the first.
    """

    def __init__(self, roles: Sequence[ir.Role | None], units: Sequence[int | None], repeats: int) -> None:
        self.units, self.order = units, with_copies(units, repeats)
        self._last = repeats + 1
        first, second = ([i for i, of in enumerate(units) if of == unit] for unit in (0, 1))
        self.second = dict(pairs(first, second))
        self._units = {role: unit for role, unit in zip(roles, units, strict=True) if isinstance(role, RETURNED)}
        self._equals = {roles[other]: roles[one] for one, other in self.second.items()}
        self._new: dict[tuple[ir.Role, int], ir.Role] = {}
        numbers = {kind: count() for kind in RETURNED}
        for position, number in self.order:
            if isinstance(role := roles[position], RETURNED):
                known = self._equals.get(role, role), number
                self._new[known] = type(role)(next(numbers[type(role)]))

    def unit(self, role: ir.Role) -> int | None:
        """The unit that returns this, or that gets this gradient of what it returns."""
        return self._units.get(_returned(role))

    def moved(self, role: ir.Role, units: int | None) -> ir.Role:
        """The role ``units`` further on, in the new graph, where the second unit is taken for the first copy; or that
        of the same thing there, if None."""
        of = _returned(role)
        first, number = of, units or 0
        if of in self._equals:
            first, number = self._equals[of], self._last if units is None else units + 1
        new = self._new.get((first, number)) or self._new[first, 0]
        if not isinstance(role, ir.Tangent):
            return new
        return ir.Tangent(new.index if isinstance(new, ir.Output) else -1 - new.index)

    def aliases(self, few: Mapping[int, ir.OutputAlias]) -> dict[int, ir.OutputAlias]:
        """How outputs alias other values, from how they do in the graph with few layers.

        Raises:
            UnequalLayersError: two layers return views of values that are not alike.
        """

        def moved(role: Any, units: int | None) -> ir.OutputAlias | None:
            alias = few.get(role.index)
            if alias is None or not isinstance(alias.base, RETURNED):
                return alias
            return replace(alias, base=self.moved(alias.base, units))

        for other, one in self._equals.items():
            if isinstance(one, ir.Output) and moved(one, 1) != moved(other, 0):
                raise UnequalLayersError("two layers return views of values that are not alike")
        new = {of: moved(role, number) for (role, number), of in self._new.items() if isinstance(role, ir.Output)}
        return {of.index: alias for of, alias in new.items() if alias is not None}


def _returned(role: ir.Role) -> ir.Role:
    """What is returned that this is, or is the gradient of."""
    if not isinstance(role, ir.Tangent):
        return role
    return ir.Output(role.index) if role.index >= 0 else ir.IntermediateBase(-1 - role.index)
