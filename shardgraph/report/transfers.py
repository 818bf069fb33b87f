"""What a step waits for: its collectives and copies, with what the schedule expects of each and what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardgraph.cost_models.timeline import Timeline
from shardgraph.errors import ShardGraphError
from shardgraph.passes.analysis.rows import Row
from shardgraph.sizes import format_bytes, format_seconds


@dataclass(frozen=True)
class Transfer:
    """A collective, or a copy between host and device, which takes ``seconds`` on its ``stream``.

    ``half`` and ``wait`` are the graph and the node that waits for it, and ``waited`` the seconds that the computation
    is expected to be idle there; ``slows`` are the seconds by which it slows the computation beside it. ``nbytes`` are
    those on the wire, or copied.
    """

    half: str
    wait: str
    label: str
    module: str
    stream: str
    nbytes: int
    seconds: float
    slows: float
    waited: float

    @property
    def exposed(self) -> float:
        """Seconds that the step is longer for it."""
        return self.slows + self.waited


def transfers_of(rows: Sequence[Row], timeline: Timeline) -> Iterator[Transfer]:
    """Those of a program's rows, of which ``timeline`` has the spans, in the order in which they are awaited."""
    for i, (row, span) in enumerate(zip(rows, timeline.spans, strict=True)):
        if row.waits:
            start = rows[i - row.waits]
            nbytes = start.sent or start.written
            where = row.half, row.node, start.label, start.module, start.stream
            yield Transfer(*where, nbytes, start.seconds, timeline.spans[i - row.waits].task.slows, span.waited)


def table_of(transfers: Sequence[Transfer], measured: Mapping[tuple[str, str], float] | None, limit: int) -> str:
    """The ``limit`` transfers of which most is exposed, and the sums of all, as text.

    Raises:
        ShardGraphError: ``measured`` is not of these.
    """
    names = [(each.half, each.wait) for each in transfers]
    if measured is not None and measured.keys() != set(names):
        raise ShardGraphError(
            f"{len(measured)} waits were measured, and the program has {len(names)} of other names: analyse the "
            "program that was measured, with the same model, inputs and plan, and fold=False"
        )
    found = [[] if measured is None else [measured[name]] for name in names]
    seconds = [[each.seconds, each.slows, each.waited, *more] for each, more in zip(transfers, found, strict=True)]
    most = sorted(range(len(names)), key=lambda i: -max(transfers[i].exposed, *found[i], 0.0))[:limit]
    columns = ["takes", "slows", "waits", *(["measured"] if measured is not None else [])]
    lines = [_line("collective or copy", "stream", "bytes", columns)]
    for i in most:
        each = transfers[i]
        label = f"{each.half[0]}:{each.label}"
        lines.append(_line(label, each.stream, format_bytes(each.nbytes), map(format_seconds, seconds[i])))
    totals = map(format_seconds, map(sum, zip(*seconds, strict=True)))
    return "\n".join([*lines, _line(f"all {len(names)}", "", "", totals)])


def _line(label: str, stream: str, nbytes: str, cells: Iterable[str]) -> str:
    return f"{label[:48]:<50}{stream:<14}{nbytes:>10}" + "".join(f"{cell:>10}" for cell in cells)
