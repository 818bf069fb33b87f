"""What is live at the peak of a step by name: parameters and what is kept of each, and what modules save."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping

import torch

from shardgraph.report.analysis import Analysis
from shardgraph.sizes import format_bytes

_MOST = 3
"""Names that are told of a kind."""

_OF_PARAMETERS = ("parameters", "gradients", "optimizer state")
"""Kinds of which each parameter has a part in proportion to its shard."""


def kinds_at_peak(live: Mapping[str, int], analysis: Analysis, shapes: Mapping[str, torch.Size]) -> list[str]:
    """The bytes that are ``live`` at the peak, a line for each of the largest kinds, with what most are of by name.

    Equal layers are one name: ``model.layers.*.mlp``. Of what is saved, names are those of modules whose values are.
    """
    named = {kind: _of_parameters(analysis, shapes) for kind in _OF_PARAMETERS} | {"saved": _saved(analysis)}
    largest = sorted(live.items(), key=lambda kind: -kind[1])[:4]
    return [_described(kind, nbytes, named.get(kind, {})) for kind, nbytes in largest if nbytes]


def place_of_peak(analysis: Analysis) -> str:
    """The operation at whose end most is live, with its module and line, in words."""
    peak = analysis.peak
    where = f" of {peak.module}" if peak.module else ""
    line = f" ({peak.source})" if peak.source else ""
    return f"in {'the optimizer' if peak.half == 'optimizer' else peak.half}, {peak.operation}{where}{line}"


def _described(kind: str, nbytes: int, parts: Mapping[str, float]) -> str:
    total = sum(parts.values())
    shares = {name: nbytes * part / total for name, part in Counter(parts).most_common(_MOST)} if total else {}
    told = ", ".join(f"{name} {format_bytes(int(share))}" for name, share in shares.items() if share > nbytes / 20)
    return f"{format_bytes(nbytes)} {kind}" + (f", of which {told}" if told else "")


def _of_parameters(analysis: Analysis, shapes: Mapping[str, torch.Size]) -> dict[str, float]:
    """Elements of a rank's shards of parameters."""
    elements: Counter[str] = Counter()
    for fqn, entry in analysis.plan.resolve(shapes).items():
        local = entry.local_shape(shapes[fqn], analysis.plan.mesh)
        elements[_folded(fqn)] += torch.Size(local).numel()
    return dict(elements)


def _saved(analysis: Analysis) -> dict[str, float]:
    """Bytes that modules save in forward."""
    nbytes: Counter[str] = Counter()
    before = 0
    for row in analysis.rows:
        if row.half != "forward":
            break
        saved = row.memory.get("saved", 0)
        if saved > before and row.module:
            nbytes[_folded(row.module)] += saved - before
        before = saved
    return dict(nbytes)


def _folded(name: str) -> str:
    return re.sub(r"(?<=\.)\d+(?=\.|$)", "*", name)
