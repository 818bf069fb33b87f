"""Which rank was late or different, from the last collectives of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any

from shardgraph.runtime.watch.wording import named

Records = Sequence[Mapping[str, Any]]
"""Of one rank, as :func:`shardgraph.runtime.watch.flight.records` has them."""


def findings(ranks: Mapping[int, Records]) -> list[str]:
    """What differs between ranks, in sentences; collectives are the same by the number of their graph and place."""
    found = [f"Rank {rank} has no collectives in the record." for rank, records in sorted(ranks.items()) if not records]
    of_graphs, *outside = (_known(ranks, group) for group in ["", *_groups(ranks)])
    if len(of_graphs) > 1:
        found += [*_different(of_graphs, _what), *_behind(of_graphs), *_latest(of_graphs)]
    for known in outside:  # ranks may call them from different lines, with other sizes
        if len(known) > 1:
            found += [*_different(known, lambda record: str(record["kind"])), *_behind(known)]
    same = len([records for records in ranks.values() if records]) > 1
    return found or (["All ranks made the same collectives, and none was late."] if same else [])


def _groups(ranks: Mapping[int, Records]) -> list[str]:
    """The groups that were used outside of graphs."""
    return sorted({str(each["group"]) for records in ranks.values() for each in records if "group" in each})


def _known(ranks: Mapping[int, Records], group: str) -> dict[int, dict[tuple[int, int], Mapping[str, Any]]]:
    """The collectives of each rank by graph and place; of a ``group`` outside of graphs, by their number in it."""
    mine = {rank: [each for each in records if each.get("group", "") == group] for rank, records in ranks.items()}
    return {rank: {(each["call"], each["place"]): each for each in found} for rank, found in mine.items() if found}


def _different(
    known: Mapping[int, Mapping[tuple[int, int], Mapping[str, Any]]], what: Callable[[Mapping[str, Any]], str]
) -> list[str]:
    """The first collective that ranks do not have in common, of those that they all may have in their records."""
    start = max(min(places) for places in known.values())
    common = sorted({place for places in known.values() for place in places if place >= start})
    for place in common:
        here = {rank: what(places[place]) for rank, places in sorted(known.items()) if place in places}
        kinds: dict[str, list[int]] = {}
        for rank, text in here.items():
            kinds.setdefault(text, []).append(rank)
        if len(kinds) > 1:
            told = "; ".join(f"{_first(members)}: {text}" for text, members in kinds.items())
            axis = next(places[place]["axis"] for places in known.values() if place in places)
            of = f"graph {place[0]}" if place[0] else f"group {axis!r}, outside of graphs"
            return [f"The ranks differ at collective {place[1]} of {of}: {told}."]
    return []


def _behind(known: Mapping[int, Mapping[tuple[int, int], Mapping[str, Any]]]) -> list[str]:
    """The ranks that have started less than the first."""
    last = {rank: max(places) for rank, places in known.items()}
    behind = sorted(rank for rank, place in last.items() if place < max(last.values()))
    if not behind:
        return []
    first = min(set(known) - set(behind))
    theirs, ours = (_what(known[rank][last[rank]]) for rank in (behind[0], first))
    return [f"{_first(behind)} had last started {theirs}, when rank {first} had started {ours}."]


def _latest(known: Mapping[int, Mapping[tuple[int, int], Mapping[str, Any]]]) -> list[str]:
    """The largest time between two starts of one collective."""
    found = []
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
            took = "done" if each.get("done") else "not finished"
            if each["finished"] is not None:
                took = f"{(each['finished'] - each['started']) * 1e3:.2f} ms"
            place = f"{each['call']}.{each['place']}" if each["call"] else f"-.{each['place']}"
            rows.append((str(rank), start, place, _what(each), took))
    return rows


def _what(record: Mapping[str, Any]) -> str:
    where = f" ({record['line']})" if record["line"] else ""
    return f"{record['kind']} of {record['value']}, {record['bytes']} bytes over {record['axis']!r}{where}"


def _first(ranks: Sequence[int]) -> str:
    """Ranks at the beginning of a sentence."""
    return named(ranks).capitalize()
