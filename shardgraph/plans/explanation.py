"""Why a plan was chosen, as text: the candidates side by side, and what each lost by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from shardgraph.plans.annotations.kinds import offload
from shardgraph.plans.candidate import Candidate
from shardgraph.plans.offload_plan import NOTHING
from shardgraph.sizes import format_bytes, format_seconds


def explained(name: str, note: str, division: str, considered: Sequence[Candidate], remarks: Sequence[str]) -> str:
    """The text; the chosen candidate is the first. ``division``: how samples are divided, if known."""
    begin = [f"plan {name!r}: {note}", *([f"  {division}"] if division else [])] if considered else []
    return "\n".join([*begin, reasons(name, considered, remarks)])


def reasons(name: str, considered: Sequence[Candidate], remarks: Sequence[str]) -> str:
    """The text without what a plan says of itself as text: its note, and how samples are divided."""
    if not considered:
        return f"plan {name!r} was not chosen among others: plan='auto' with example inputs searches all layouts"
    lines = [f"  {_bound(considered[0])}", "", *_table(considered)]
    if remarks:
        lines += ["", *(f"  {remark}" for remark in remarks)]
    return "\n".join(lines)


def bounds_told(bounds: Sequence[tuple[str, float]]) -> Iterator[str]:
    """A line for each mesh that was not priced, with what a sample takes at least there."""
    if bounds:
        yield "\n  not priced, and by their estimates less the error of estimates per sample at least"
    yield from (f"    {format_seconds(seconds):>8}  {where}" for where, seconds in bounds)


def comparison_table(considered: Sequence[Candidate]) -> list[list[str]]:
    """The candidates as cells of a table, the heads first; the chosen candidate is the first."""
    rows = [["plan", "mesh", "recomputed", "memory", "a sample", "why"]]
    for each in considered:
        cells = [format_bytes(each.memory), format_seconds(each.per_sample), _verdict(each, considered[0])]
        rows.append([each.name, _division(each, considered[0]), each.recompute, *cells])
    return rows


_HEADS = ("plan", "mesh", "recomputed", "memory", "sample", "compute", "exposed", "idle", "")
_WORDS = ("plan", "mesh", "recomputed", "")  # columns that begin at the left


def _table(considered: Sequence[Candidate]) -> Iterator[str]:
    """The candidates side by side, in columns no wider than they need."""
    rows = [_HEADS, *(_cells(candidate, considered[0]) for candidate in considered)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        columns = zip(_HEADS, row, widths, strict=True)
        cells = (cell.ljust(width) if head in _WORDS else cell.rjust(width) for head, cell, width in columns)
        yield f"  {'  '.join(cells)}".rstrip()


def _bound(best: Candidate) -> str:
    """What takes the time of a step."""
    parts = {"computation": best.compute - best.calls - best.again, "recomputation": best.again}
    parts |= {"waiting for Python to call operations": best.calls}
    over = ", ".join(_shares(dict(best.over), best.seconds) if len(best.over) > 1 else [what for what, _ in best.over])
    parts |= {"communication that it does not hide" + (f" ({over})" if over else ""): best.exposed}
    parts |= {"waiting for other stages": best.bubble}
    parts |= {"the optimizer": max(0.0, best.seconds - sum(parts.values()))}
    return f"its step is {', '.join(_shares(parts, best.seconds))}" if best.seconds else "its step takes no time"


def _shares(parts: Mapping[str, float], whole: float) -> list[str]:
    """What takes more than half a hundredth of the whole, with its share."""
    return [f"{seconds / whole:.0%} {kind}" for kind, seconds in parts.items() if seconds > 0.005 * whole]


def _cells(candidate: Candidate, best: Candidate) -> tuple[str, ...]:
    total = candidate.seconds or 1.0
    shares = (f"{seconds / total:.0%}" for seconds in (candidate.compute, candidate.exposed, candidate.bubble))
    costs = format_bytes(candidate.memory), format_seconds(candidate.per_sample)
    return (candidate.name, _division(candidate, best), candidate.recompute, *costs, *shares, _verdict(candidate, best))


def _division(candidate: Candidate, best: Candidate) -> str:
    """The mesh, microbatches, schedule and what is in host memory; and the precision, if it is not that of the best."""
    mesh = " x ".join(f"{axis}={size}" for axis, size in candidate.mesh)
    mesh += f", {candidate.microbatches} microbatches" if candidate.microbatches > 1 else ""
    mesh += " reduced once" if candidate.reduces_once else ""
    if candidate.plan is None:
        return mesh
    other = best.plan is not None and candidate.plan.precision != best.plan.precision
    return mesh + _ways(candidate.plan) + (f", {str(candidate.plan.precision) or 'dtypes as stored'}" if other else "")


def _ways(plan: Any) -> str:
    """The schedule of a plan's stages, whether its loss is in chunks, and what it keeps in host memory."""
    schedule = f", {plan.pipeline.schedule}" if plan.pipeline is not None else ""
    schedule += ", loss in chunks" if plan.loss_chunk is not None else ""
    some = any(isinstance(annotation, offload) for _, annotation in plan.annotations)
    away = str(plan.offload) if plan.offload != NOTHING else "what some layers save" if some else ""
    return schedule + (f", {away} on the host" if away else "")


def _verdict(candidate: Candidate, best: Candidate) -> str:
    """Why it was not chosen: it is too large, or the part of its time per sample that grew most."""
    if candidate is best:
        return "<- chosen"
    if not candidate.fits:
        return f"too large, by {format_bytes(candidate.memory - best.memory)} more than the chosen one takes"
    if candidate.per_sample < best.per_sample:
        return f"{1 - candidate.per_sample / best.per_sample:.1%} faster by prediction, and slower as measured"
    if candidate.per_sample == best.per_sample:
        return "as fast, and larger"
    slower = candidate.per_sample / best.per_sample - 1

    def shares(of: Candidate) -> dict[str, float]:
        per = of.per_sample / of.seconds if of.seconds else 0.0
        named = {"computes more": of.compute - of.calls - of.again, "recomputes more": of.again}
        named |= {"waits more for Python": of.calls}
        named |= {"communicates more": of.exposed, "waits for stages": of.bubble}
        rest = {"updates more": of.seconds - sum(named.values())}
        return {kind: seconds * per for kind, seconds in (named | rest).items()}

    own, chosen = shares(candidate), shares(best)
    most = max(own, key=lambda kind: own[kind] - chosen[kind])
    return f"{slower:.1%} slower: {most}"
