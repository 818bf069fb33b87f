"""The modules of a model with what each costs, as data for a page's table."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any

from shardgraph.passes.analysis.rows import Row
from shardgraph.pictures.tree import Module, Tree

_SUMMED = ("seconds", "flops", "sent", "numel", "bytes")


@dataclass
class _Cost:
    """A module and its submodules: sums over a step of one rank, and the most live bytes while one of them runs."""

    seconds: float = 0.0
    flops: int = 0
    sent: int = 0
    live: int = 0
    children: dict[str, _Cost] = field(default_factory=dict)

    def add(self, row: Row) -> None:
        self.seconds += 0.0 if row.stream else row.seconds
        self.flops += row.flops
        self.sent += row.sent
        self.live = max(self.live, row.live)


def module_tree(rows: Iterable[Row], plan: Tree | None) -> dict[str, Any]:
    """The model as nested modules, for JSON.

    A module has its ``name`` and ``path``, and of itself and all below it: ``seconds`` of computation, ``flops``,
    bytes ``sent``, the most bytes ``live`` while it runs; with the plan's modules also its ``numel`` of parameters, the
    ``bytes`` that a rank holds of them, and ``placed``, their placements. Consecutive layers that cost the same are
    the ``children`` of one entry, which has their number as ``layers``, and their sums. The model is ``staged`` if it
    lies in the stages of a pipeline: rows are then of one microbatch, and bytes of all stages.
    """
    whole = _Cost()
    for row in rows:
        at = whole
        at.add(row)
        for name in row.module.split(".") if row.module else ():
            at = at.children.setdefault(name, _Cost())
            at.add(row)
    entry = _entry("", "model", whole, plan.root if plan is not None else None)
    return entry | ({"staged": True} if plan is not None and plan.stages else {})


def _entry(path: str, name: str, cost: _Cost, held: Module | None) -> dict[str, Any]:
    entry: dict[str, Any] = {
        "name": name,
        "path": path,
        "seconds": float(f"{cost.seconds:.4g}"),
        "flops": cost.flops,
        "sent": cost.sent,
        "live": cost.live,
    }
    if held is not None:
        parameters = list(held.parameters())
        entry["numel"] = sum(each.whole_bytes // each.itemsize for each in parameters)
        entry["bytes"] = held.nbytes
        entry["placed"] = sorted({each.placement for each in parameters})
    names = dict.fromkeys([*(held.children if held is not None else ()), *cost.children])
    below = [
        _entry(
            f"{path}.{child}".lstrip("."),
            child,
            cost.children.get(child, _Cost()),
            held.children.get(child) if held is not None else None,
        )
        for child in names
    ]
    return entry | ({"children": list(_grouped(below))} if below else {})


def _grouped(entries: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """The entries; numbered ones that follow each other and cost the same are in an entry of their own."""
    for _, group in groupby(entries, lambda entry: _likeness(entry) if entry["name"].isdigit() else entry["name"]):
        alike = list(group)
        if len(alike) == 1:
            yield alike[0]
            continue
        sums: dict[str, Any] = {key: sum(each[key] for each in alike) for key in _SUMMED if key in alike[0]}
        yield {
            "name": f"{alike[0]['name']} to {alike[-1]['name']}",
            "path": f"{alike[0]['path']} to {alike[-1]['name']}",
            "layers": len(alike),
            "live": max(each["live"] for each in alike),
            **({"placed": alike[0]["placed"]} if "placed" in alike[0] else {}),
            **sums,
            "children": alike,
        }


def _likeness(entry: dict[str, Any]) -> tuple[object, ...]:
    return (
        *(entry.get(key) for key in ("flops", "sent", "numel", "bytes")),
        tuple(entry.get("placed", ())),
        tuple((each["name"], *_likeness(each)) for each in entry.get("children", ())),
    )
