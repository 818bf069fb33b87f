"""Reading the fields of a file: a value that is not allowed is an error that names its place and the allowed values."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable
from dataclasses import MISSING, fields
from typing import Any, NoReturn

from shardgraph import sizes
from shardgraph.errors import ClusterError, ShardGraphError, nearest, shown

At = tuple[str, ...]
"""A position: the file, then the names of nested fields."""

Reader = Callable[[Any, At], Any]
"""Converts the raw value at a position of a file, or raises ClusterError."""


def path(file: str, *names: object) -> str:
    return ".".join(map(str, names)) or "the file"


def refuse(at: At, value: object, allowed: str) -> NoReturn:
    raise ClusterError(f"{at[0]}: {path(*at)} is {shown(value)}; it may be {allowed}")


def text(value: Any, at: At) -> str:
    return value if isinstance(value, str) else refuse(at, value, "a text")


def number(allowed: str, convert: Callable[[Any], float], fits: Callable[[float], bool]) -> Reader:
    """What ``convert`` returns, where it raises no error and the number ``fits``; booleans are not numbers."""

    def read(value: Any, at: At) -> float:
        try:
            # PyYAML reads 3e9 as a string, as YAML 1.1 does: only 3.0e+9 is a number there.
            converted = math.nan if isinstance(value, bool) else convert(value)
        except (TypeError, ValueError, OverflowError, ShardGraphError):
            converted = math.nan
        return converted if fits(converted) else refuse(at, value, allowed)

    return read


SIZE = number(sizes.SIZE, sizes.parse_bytes, math.isfinite)
WHOLE = number("a whole number from 1", operator.index, lambda value: value >= 1)
POSITIVE = number("a number above 0, at most 1e24", float, lambda value: 0 < value <= 1e24)
SECONDS = number("a number of seconds from 0 to 1e6", float, lambda value: 0 <= value <= 1e6)
PART = number("a number from 0 to 1", float, lambda value: 0 <= value <= 1)


def mapping(content: str, read: Reader, known: Callable[[str], bool]) -> Reader:
    """A mapping of names to what ``read`` returns; ``content`` describes the ``known`` names in errors."""

    def read_all(value: Any, at: At) -> dict[str, Any]:
        if not isinstance(value, dict):
            refuse(at, value, f"a mapping of {content}")
        for key in value:
            if not (isinstance(key, str) and known(key)):
                raise ClusterError(f"{at[0]}: unknown field {path(*at, key)}; {path(*at)} is a mapping of {content}")
        return {key: read(each, (*at, key)) for key, each in value.items()}

    return read_all


def record(kind: type, **readers: Reader) -> Reader:
    """A dataclass ``kind`` from a mapping of its fields; those without a default are required."""
    required = {each.name for each in fields(kind) if each.default is MISSING and each.default_factory is MISSING}

    def read(value: Any, at: At) -> Any:
        if not isinstance(value, dict):
            refuse(at, value, f"a mapping of {', '.join(readers)}")
        for key in value:
            if key not in readers:
                hint = nearest(str(key), readers) or f"; the fields are {', '.join(readers)}"
                raise ClusterError(f"{at[0]}: unknown field {path(*at, key)}{hint}")
        for key in readers:
            if key in required and key not in value:
                raise ClusterError(f"{at[0]}: the field {path(*at, key)} is missing")
        return kind(**{key: readers[key](each, (*at, key)) for key, each in value.items()})

    return read
