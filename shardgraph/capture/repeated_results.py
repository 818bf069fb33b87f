"""The results of a graph with many equal layers, in their order, from those of the graph with few.

Equal layers return equal things, such as keys and values for a cache. What comes after those of further layers has a
higher index in the output.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from itertools import count
from typing import Any

from shardgraph import ir
from shardgraph.capture.insertion import pairs, with_copies
from shardgraph.capture.returned import Order
from shardgraph.capture.stacks import UnequalLayersError

Returned = ir.Output | ir.IntermediateBase
RETURNED = (ir.Output, ir.IntermediateBase)
"""The roles that are numbered; a gradient that comes in has the number of what it is the gradient of."""


class RepeatedResults:
    """The results of a graph with few layers, by their ``roles``, ``values`` and the ``units`` that they are of, and of
    the graph with ``repeats`` more units.

    ``units`` are 0 and 1 for the two units, anything else outside of them. ``returned`` is the order of the outputs, if
    that is known. ``order`` are the new graph's results: the position here of what each of them is, or is like, and
    the number of its unit, 0 outside; its own ``roles`` are what they are if they are returned. ``returned_by`` are the
    units that its outputs are of. ``second`` are the positions of what the second unit returns, by those of their
    equals in the first.

    Raises:
        UnequalLayersError: one unit has more results than the other, or other ones are returned.
    """

    def __init__(
        self,
        roles: Sequence[ir.Role | None],
        values: Sequence[Any],
        units: Sequence[int | None],
        repeats: int,
        returned: Order | None = None,
    ) -> None:
        self.units, self._last = units, repeats + 1
        self.order = _order(roles, values, units, repeats, returned)
        self.returned_by = [units[position] for position, _ in self.order if isinstance(roles[position], ir.Output)]
        first, second = ([i for i, of in enumerate(units) if of == unit] for unit in (0, 1))
        self.second = dict(pairs(first, second))
        self._units = {role: unit for role, unit in zip(roles, units, strict=True) if isinstance(role, RETURNED)}
        # What the second unit returns, by its equal in the first; and all of the new graph by unit.
        self._equals = dict[Returned, Returned]()
        for one, other in self.second.items():
            if isinstance(first_role := roles[one], RETURNED) and isinstance(second_role := roles[other], RETURNED):
                self._equals[second_role] = first_role
        self._new = dict[tuple[Returned, int], Returned]()
        numbers = {kind: count() for kind in RETURNED}
        self.roles = list[Returned | None]()
        for position, number in self.order:
            role = roles[position]
            returned_role = type(role)(next(numbers[type(role)])) if isinstance(role, RETURNED) else None
            self.roles.append(returned_role)
            if isinstance(role, RETURNED) and returned_role is not None:
                self._new[self._equals.get(role, role), number] = returned_role

    def unit(self, role: Returned | ir.Tangent) -> int | None:
        """The unit that returns this, or that gets this gradient of what it returns."""
        return self._units.get(_returned(role))

    def moved(self, role: Returned | ir.Tangent, units: int | None) -> ir.Role:
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

        def moved(role: Returned, units: int | None) -> ir.OutputAlias | None:
            alias = few.get(role.index)
            if alias is None or not isinstance(alias.base, RETURNED):
                return alias
            return replace(alias, base=self.moved(alias.base, units))

        for other, one in self._equals.items():
            if isinstance(one, ir.Output) and moved(one, 1) != moved(other, 0):
                raise UnequalLayersError("two layers return views of values that are not alike")
        new = {of: moved(role, number) for (role, number), of in self._new.items() if isinstance(role, ir.Output)}
        return {of.index: alias for of, alias in new.items() if alias is not None}


def _order(
    roles: Sequence[ir.Role | None],
    values: Sequence[Any],
    units: Sequence[int | None],
    repeats: int,
    returned: Order | None,
) -> list[tuple[int, int]]:
    order = with_copies(units, repeats)
    if returned is None:
        return order
    outputs = [i for i, role in enumerate(roles) if isinstance(role, ir.Output)]
    known = [(outputs[i], number) for i, number in returned]
    places = [place for place, each in enumerate(order) if isinstance(roles[each[0]], ir.Output)]
    copies = [order[place] for place in places]
    again = Counter(known) - Counter(copies)  # a None in place of what layers might return
    if Counter(copies) - Counter(known) or any(values[position] is not None for position, _ in again):
        raise UnequalLayersError("layers return other values in the graph than in the call that was recorded")
    if places != list(range(places[0], places[0] + len(places))):
        raise UnequalLayersError("outputs are among other results")
    return [*order[: places[0]], *known, *order[places[-1] + 1 :]]


def _returned(role: Returned | ir.Tangent) -> Returned:
    """What is returned that this is, or is the gradient of."""
    if not isinstance(role, ir.Tangent):
        return role
    return ir.Output(role.index) if role.index >= 0 else ir.IntermediateBase(-1 - role.index)
