"""What a step waits for: its collectives and copies, with what the schedule expects of each and what was measured."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from shardgraph.cost_models.timeline import Timeline
from shardgraph.errors import ShardGraphError
from shardgraph.passes.analysis.rows import Row
from shardgraph.sizes import format_bytes, format_seconds


@dataclass(frozen=True)
class Transfer:
    """A collective, or a copy between host and device, which takes ``seconds`` on its ``stream``.

    ``half`` and ``wait`` are the graph and the node that waits for it, and ``exposed`` the seconds that the computation
    is expected to be idle there. ``nbytes`` are those on the wire, or copied.
    """

    half: str
    wait: str
    label: str
    module: str
    stream: str
    nbytes: int
    seconds: float
    exposed: float


def transfers_of(rows: Sequence[Row], timeline: Timeline) -> Iterator[Transfer]:
    """Those of a program's rows, of which ``timeline`` has the spans, in the order in which they are awaited."""
    for i, (row, span) in enumerate(zip(rows, timeline.spans, strict=True)):
        if row.waits:
            start = rows[i - row.waits]
            nbytes = start.sent or start.written
            where = row.half, row.node, start.label, start.module, start.stream
            yield Transfer(*where, nbytes, start.seconds, span.waited)


def table_of(transfers: Sequence[Transfer], measured: Mapping[tuple[str, str], float] | None, limit: int) -> str:
    """The ``limit`` transfers that are waited for longest, and the sums of all, as text.

    Raises:
        ShardGraphError: ``measured`` has none of them, or has others.
    """
    waited = {(each.half, each.wait): each.exposed for each in transfers}
    if measured is not None:
        if measured.keys() != waited.keys():
            raise ShardGraphError(
                f"{len(measured)} waits were measured, and the program has {len(waited)} of other names: analyse the "
                "program that was measured, with the same model, inputs and plan, and fold=False"
            )
        waited = dict(measured)

    def line(label: str, stream: str, nbytes: str, *seconds: float) -> str:
        return f"{label[:62]:<64}{stream:<14}{nbytes:>12}" + "".join(f"{format_seconds(s):>12}" for s in seconds)

    columns = ("takes", "expected", *(["measured"] if measured is not None else []))
    lines = [f"{'collective or copy':<64}{'stream':<14}{'bytes':>12}" + "".join(f"{each:>12}" for each in columns)]
    for each in sorted(transfers, key=lambda each: -waited[each.half, each.wait])[:limit]:
        found = () if measured is None else (measured[each.half, each.wait],)
        label = f"{each.half[0]}:{each.label}"
        lines.append(line(label, each.stream, format_bytes(each.nbytes), each.seconds, each.exposed, *found))
    total = () if measured is None else (sum(measured.values()),)
    takes, exposed = sum(each.seconds for each in transfers), sum(each.exposed for each in transfers)
    lines.append(line(f"all {len(transfers)}", "", "", takes, exposed, *total))
    return "\n".join(lines)
