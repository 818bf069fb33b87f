"""The operations of a program, and its modules, as tables for people."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from shardgraph.passes.analysis.rows import Row
from shardgraph.sizes import aligned, format_bytes, format_seconds

_SHOWN = 30  # modules that print shows; all of them are entries


class ModuleCosts(dict[str, dict[str, float]]):
    """The costs of every module by its name; it prints as a table of those that compute longest."""

    @classmethod
    def of(cls, rows: Sequence[Row]) -> ModuleCosts:
        """Of ``rows``; one counts for its module and for each module around it."""
        modules = cls()
        for row in rows:
            for path in {"", *accumulate(row.module.split("."), "{}.{}".format)}:
                entry = modules.setdefault(path, {"flops": 0, "moved": 0, "seconds": 0.0, "sent": 0})
                entry["flops"] += row.flops
                entry["sent"] += row.sent
                entry["moved"] += 0 if row.stream else row.read + row.written
                entry["seconds"] += 0 if row.stream else row.seconds
        return cls(sorted(modules.items()))

    def table(self, limit: int | None = _SHOWN) -> str:
        """The ``limit`` modules that compute longest, all if None, as text; the model itself is the first."""
        shown = sorted(self.items(), key=lambda item: -item[1]["seconds"])[:limit]
        cells: list[Sequence[str]] = [("module", "time", "GFLOP", "moved", "sent")]
        for name, costs in shown:
            moved, sent = (format_bytes(costs[kind]) for kind in ("moved", "sent"))
            cells.append(
                (name or "(the model)", format_seconds(costs["seconds"]), f"{costs['flops'] / 1e9:,.3f}", moved, sent)
            )
        return "\n".join([*aligned(cells), *_others(len(self) - len(shown), "modules")])

    def __repr__(self) -> str:
        return self.table()


def operation_table(rows: Sequence[Row], limit: int | None) -> str:
    """The ``limit`` slowest operations, all if None, with the totals of all rows below."""
    shown = sorted(rows, key=lambda row: -row.seconds)[:limit]
    cells: list[Sequence[str]] = [("operation", "module", "half", "stream", "GFLOP", "moved", "time", "live")]
    for row in shown:
        moved, live = format_bytes(row.read + row.written), format_bytes(row.live)
        place = (row.node, row.module or "(the model)", row.half, row.stream or "compute")
        cells.append((*place, f"{row.flops / 1e9:,.3f}", moved, format_seconds(row.seconds), live))
    moved = format_bytes(sum(row.read + row.written for row in rows))
    totals = (f"{sum(row.flops for row in rows) / 1e9:,.3f}", moved, format_seconds(sum(row.seconds for row in rows)))
    peak = max((row.live for row in rows), default=0)
    cells.append((f"all {len(rows)}", "", "", "all streams", *totals, f"peak {format_bytes(peak)}"))
    return "\n".join([*aligned(cells), *_others(len(rows) - len(shown), "operations")])


def _others(left: int, what: str) -> list[str]:
    return [f"and {left:,} other {what}: .table(limit=None) shows all"] if left else []
