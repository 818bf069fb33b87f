"""Reading the fields of a file: a value that is not allowed is an error that names its place and the allowed values."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn

from shardgraph.errors import ClusterError, ShardGraphError, nearest
from shardgraph.sizes import SIZE, parse_bytes


@dataclass(frozen=True)
class At:
    """A position in a file, as errors name it."""

    file: str
    path: str = ""

    def child(self, name: object) -> At:
        return At(self.file, f"{self.path}.{name}" if self.path else str(name))

    def refuse(self, value: object, allowed: str) -> NoReturn:
        raise ClusterError(f"{self.file}: {self.path or 'the file'} is {value!r}; it may be {allowed}")


Reader = Callable[[Any, At], Any]
"""Converts the raw value at a position of a file, or raises ClusterError."""


def text(value: Any, at: At) -> str:
    return value if isinstance(value, str) else at.refuse(value, "a text")


def size(value: Any, at: At) -> int:
    try:
        return parse_bytes(value)
    except ShardGraphError:
        at.refuse(value, SIZE)


def whole(value: Any, at: At) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        at.refuse(value, "a whole number from 1")
    return value


def number(allowed: str, fits: Callable[[float], bool]) -> Reader:
    def read(value: Any, at: At) -> float:
        try:
            # PyYAML reads 3e9 as a string, as YAML 1.1 does: only 3.0e+9 is a number there.
            converted = math.nan if isinstance(value, bool) else float(value)
        except (TypeError, ValueError):
            converted = math.nan
        if not (math.isfinite(converted) and fits(converted)):
            at.refuse(value, allowed)
        return converted

    return read


POSITIVE = number("a number above 0", lambda value: value > 0)
SECONDS = number("a number of seconds from 0", lambda value: value >= 0)
PART = number("a number from 0 to 1", lambda value: 0 <= value <= 1)


def mapping(what: str, read: Reader, known: Callable[[str], bool] = lambda key: True) -> Reader:
    """A mapping of names to what ``read`` returns; ``what`` describes the ``known`` names in errors."""

    def read_all(value: Any, at: At) -> dict[str, Any]:
        if not isinstance(value, dict):
            at.refuse(value, f"a mapping of {what}")
        for key in value:
            if not (isinstance(key, str) and known(key)):
                raise ClusterError(f"{at.file}: unknown field {at.child(key).path}; {at.path} is a mapping of {what}")
        return {key: read(each, at.child(key)) for key, each in value.items()}

    return read_all


def record(kind: type, readers: dict[str, Reader]) -> Reader:
    """A dataclass ``kind`` from a mapping of its fields; those without a default are required."""
    required = {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }

    def read(value: Any, at: At) -> Any:
        if not isinstance(value, dict):
            at.refuse(value, f"a mapping of {', '.join(readers)}")
        for key in value:
            if key not in readers:
                hint = nearest(str(key), readers) or f"; the fields are {', '.join(readers)}"
                raise ClusterError(f"{at.file}: unknown field {at.child(key).path}{hint}")
        for key in readers:
            if key in required and key not in value:
                raise ClusterError(f"{at.file}: the field {at.child(key).path} is missing")
        return kind(**{key: readers[key](each, at.child(key)) for key, each in value.items()})

    return read
