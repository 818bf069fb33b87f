"""Checks of the fields of plans and annotations."""

from __future__ import annotations

from shardgraph.errors import PlanError


def expect(allowed: bool, field: str, value: object, expected: str) -> None:
    """Raise PlanError, which names what is ``expected``, unless the value of ``field`` is ``allowed``."""
    if not allowed:
        raise PlanError(f"{field} is {value!r}; it may be {expected}")


def is_whole(value: object, least: int) -> bool:
    """Whether a value is a whole number from ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
