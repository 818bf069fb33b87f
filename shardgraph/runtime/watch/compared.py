"""Which rank was late or different, from the last collectives of all ranks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any

from shardgraph.runtime.watch.wording import named

Records = Sequence[Mapping[str, Any]]
"""Of one rank, as :func:`shardgraph.runtime.watch.flight.records` has them."""


def findings(ranks: Mapping[int, Records]) -> list[str]:
    """What differs between ranks, in sentences; collectives are the same by the number of their graph and place."""
    by_place = {rank: {(each["call"], each["place"]): each for each in records} for rank, records in ranks.items()}
    known = {rank: places for rank, places in by_place.items() if places}
    found = [f"Rank {rank} has no collectives in the record." for rank in sorted(set(ranks) - set(known))]
    if len(known) < 2:
        return found
    return [*found, *_different(known), *_late(known)] or ["All ranks made the same collectives, and none was late."]


def _different(known: Mapping[int, Mapping[tuple[int, int], Mapping[str, Any]]]) -> list[str]:
    """The first collective that ranks do not have in common, of those that they all may have in their records."""
    start = max(min(places) for places in known.values())
    common = sorted({place for places in known.values() for place in places if place >= start})
    for place in common:
        here = {rank: _what(places[place]) for rank, places in sorted(known.items()) if place in places}
        kinds: dict[str, list[int]] = {}
        for rank, what in here.items():
            kinds.setdefault(what, []).append(rank)
        if len(kinds) > 1:
            told = "; ".join(f"{_first(members)}: {what}" for what, members in kinds.items())
            return [f"The ranks differ at collective {place[1]} of graph {place[0]}: {told}."]
    return []


def _late(known: Mapping[int, Mapping[tuple[int, int], Mapping[str, Any]]]) -> list[str]:
    """The ranks that have started less than the first, and the largest time between two starts of one collective."""
    last = {rank: max(places) for rank, places in known.items()}
    behind = sorted(rank for rank, place in last.items() if place < max(last.values()))
    found = []
    if behind:
        first = min(set(known) - set(behind))
        theirs, ours = (_what(known[rank][last[rank]]) for rank in (behind[0], first))
        found.append(f"{_first(behind)} had last started {theirs}, when rank {first} had started {ours}.")
    shared = set.intersection(*(set(places) for places in known.values()))
    if shared:
        starts = {place: {rank: places[place]["started"] for rank, places in known.items()} for place in shared}
        widest = max(shared, key=lambda place: max(starts[place].values()) - min(starts[place].values()))
        late = max(starts[widest], key=lambda rank: starts[widest][rank])
        waited = max(starts[widest].values()) - min(starts[widest].values())
        what = _what(next(iter(known.values()))[widest])
        found.append(f"Rank {late} was the latest by most, {waited * 1e3:.1f} ms after the first, at {what}.")
    return found


def table(ranks: Mapping[int, Records], last: int) -> list[tuple[str, ...]]:
    """The ``last`` collectives of each rank as rows: rank, time, graph and place, what it is, and how long it took."""
    rows: list[tuple[str, ...]] = []
    for rank, records in sorted(ranks.items()):
        for each in records[-last:]:
            start = datetime.fromtimestamp(each["started"]).strftime("%H:%M:%S.%f")[:-3]
            took = (
                "not finished" if each["finished"] is None else f"{(each['finished'] - each['started']) * 1e3:.2f} ms"
            )
            rows.append((str(rank), start, f"{each['call']}.{each['place']}", _what(each), took))
    return rows


def _what(record: Mapping[str, Any]) -> str:
    where = f" ({record['line']})" if record["line"] else ""
    return f"{record['kind']} of {record['value']}, {record['bytes']} bytes over {record['axis']!r}{where}"


def _first(ranks: Sequence[int]) -> str:
    """Ranks at the beginning of a sentence."""
    return named(ranks).capitalize()
