"""Bytes and seconds in human-readable units, in columns, and mesh axis sizes that divide lengths."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence

from shardgraph.errors import ShardGraphError

SIZE = "a positive number of bytes, or a text such as '80GiB' or '80 GB'"

_UNITS = {"": 1, "b": 1} | {
    prefix + end: base**power
    for end, base in (("b", 1000), ("ib", 1024))
    for power, prefix in enumerate("kmgt", start=1)
}


def format_bytes(nbytes: float) -> str:
    """``"1.5 GiB"``."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024
    return f"{nbytes:.1f} TiB"


def format_seconds(seconds: float) -> str:
    """``"1.5 ms"``."""
    for unit, scale in (("s", 1.0), ("ms", 1e-3), ("us", 1e-6)):
        if seconds >= scale:
            return f"{seconds / scale:.3g} {unit}"
    return f"{seconds / 1e-9:.3g} ns"


def aligned(rows: Iterable[Sequence[str]]) -> list[str]:
    """A line for each row of cells: the first column to the left, the others to the right."""
    rows = list(rows)
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(row[1:], widths[1:], strict=True))])
        for row in rows
    ]


def parse_bytes(size: int | float | str) -> int:
    """``80 * 2**30`` for ``"80GiB"``, ``80 * 10**9`` for ``"80 GB"``; a number is in bytes.

    Raises:
        ShardGraphError: ``size`` is no size, or not above 0.
    """
    written = re.fullmatch(r"([\d.]+(?:e[+-]?\d+)?)\s*([kmgt]?i?b)?", str(size).strip().lower())
    try:
        if written is None or isinstance(size, bool):
            raise ValueError
        number, unit = written[1], written[2] or ""
        nbytes = (int(number) if number.isdigit() else float(number)) * _UNITS[unit]
        if not 1 <= nbytes < math.inf:
            raise ValueError
    except (KeyError, ValueError):
        raise ShardGraphError(f"{size!r} is no size: it may be {SIZE}") from None
    return int(nbytes)


def divisors(*lengths: int) -> list[int]:
    """The first 8 numbers from 2 to 512 that divide all ``lengths``: mesh axis sizes for errors to suggest."""
    most = min(*lengths, 512) if lengths else 0
    return [size for size in range(2, most + 1) if not any(length % size for length in lengths)][:8]


def is_whole(value: object, least: int) -> bool:
    """Whether a value is a whole number from ``least``."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least
