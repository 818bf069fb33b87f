"""The streams of a step over time, as compact data for a page's canvas."""

from __future__ import annotations

from typing import Any

from shardgraph.cost_models.timeline import COMPUTE
from shardgraph.report.analysis import Analysis


def timeline_data(analysis: Analysis) -> dict[str, Any]:
    """The spans of each stream, for JSON.

    ``spans`` are six whole numbers each, one after the other: the index of the stream, of the half of the step, of the
    operation's label and of its module; the nanoseconds at which it starts, and those that it takes. ``streams``,
    ``halves``, ``labels`` and ``modules`` are what the indices mean.
    """
    tables: dict[str, dict[str, int]] = {name: {} for name in ("streams", "halves", "labels", "modules")}
    tables["streams"][COMPUTE] = 0  # on top
    spans: list[int] = []
    for row, span in zip(analysis.rows, analysis.timeline.spans, strict=True):
        nanoseconds = round((span.end - span.start) * 1e9)
        if nanoseconds:
            named = (span.task.stream, row.half, row.label, row.module)
            spans += [table.setdefault(name, len(table)) for table, name in zip(tables.values(), named, strict=True)]
            spans += [round(span.start * 1e9), nanoseconds]
    return {name: list(table) for name, table in tables.items()} | {"spans": spans}
