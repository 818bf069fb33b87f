"""Two analyses of one job side by side: what their plans decide differently, and what each costs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from shardgraph.errors import ShardGraphError
from shardgraph.plans.differences import Difference, differences
from shardgraph.report.analysis import Analysis
from shardgraph.report.parts import Parts, parts_of
from shardgraph.report.pipeline import PipelineAnalysis
from shardgraph.sizes import aligned, format_bytes, format_seconds

_WIDE = 72  # characters of a difference that fit on a line
_SHOWN = 0.0005  # the smallest part of a whole that has a line


@dataclass(frozen=True)
class Comparison:
    """Two analyses of one job; see :func:`shardgraph.compare`."""

    first: Analysis | PipelineAnalysis
    second: Analysis | PipelineAnalysis

    @cached_property
    def decisions(self) -> tuple[Difference, ...]:
        """The parts of the plans that differ, with what each decides."""
        return differences(self.first.plan, self.second.plan)

    @cached_property
    def parts(self) -> tuple[Parts, Parts]:
        """The costs of a step of either, in parts that add up."""
        return parts_of(self.first), parts_of(self.second)

    @property
    def ratio(self) -> float:
        """Seconds per sample of the second, as a multiple of the first's."""
        one, other = self.parts
        return other.per_sample / one.per_sample if one.per_sample else 1.0

    def table(self) -> str:
        """The costs side by side, as text. If the steps have other numbers of samples, seconds are those per sample."""
        names = [f"{each.plan.name} on {each.plan.world_size}" for each in (self.first, self.second)]
        return side_by_side(names, self.parts)

    def __str__(self) -> str:
        one, other = (each.plan for each in (self.first, self.second))
        lines = [f"plan {one.name} and plan {other.name} on {self.first.cluster.name}: {self._verdict}", ""]
        short = [each for each in self.decisions if len(each.first) + len(each.second) <= _WIDE]
        width = max((len(each.part) for each in short), default=0)
        lines += [f"  {each.part:<{width}}  {each.first}  ->  {each.second}" for each in short]
        for each in self.decisions:
            if each not in short:
                lines += [f"  {each.part}", f"      {each.first}", f"   -> {each.second}"]
        lines += [] if self.decisions else ["  both decide the same"]
        return "\n".join([*lines, "", *(f"  {line}" for line in self.table().splitlines())])

    @property
    def _verdict(self) -> str:
        ratio = self.ratio
        one, other = (each.peak for each in self.parts)
        time = "as fast" if abs(ratio - 1) < _SHOWN else f"{abs(ratio - 1):.1%} {'slower' if ratio > 1 else 'faster'}"
        room = f"{format_bytes(abs(other - one))} {'more' if other > one else 'less'}" if other != one else "as much"
        return f"the second is {time} and takes {room} memory"


def compared(first: Analysis | PipelineAnalysis, second: Analysis | PipelineAnalysis) -> Comparison:
    """The comparison of two analyses.

    Raises:
        ShardGraphError: they are not of one job: of another model, sequence length, optimizer or cluster.
    """
    clusters = [replace(each.cluster, nodes=1) for each in (first, second)]  # as many nodes as a plan needs
    if clusters[0] != clusters[1]:
        raise ShardGraphError(
            f"these two are not of one job, whose plans could be compared: they are priced on the clusters "
            f"{clusters[0].name!r} and {clusters[1].name!r}, whose prices or sizes differ. Analyse both for one "
            "cluster; shardgraph.what_if says what a plan does on another"
        )
    for what, of in _JOB.items():
        one, other = of(first), of(second)
        if one != other:
            raise ShardGraphError(
                f"these two are not of one job, whose plans could be compared: {what} of plan {first.plan.name!r} is "
                f"{one}, and of plan {second.plan.name!r} {other}. Analyse both for the same model, inputs and "
                "cluster; shardgraph.what_if says what a plan does under other conditions"
            )
    only = _modules(first) ^ _modules(second)
    if only:
        raise ShardGraphError(
            f"these two are not of one model, whose plans could be compared: only one of them computes in "
            f"{', '.join(map(repr, sorted(only)[:3]))}. Analyse the same model under both plans"
        )
    return Comparison(first, second)


def _tokens(analysis: Analysis | PipelineAnalysis) -> float:
    return analysis.tokens / analysis.samples if analysis.samples else 0.0


_JOB: dict[str, Callable[[Analysis | PipelineAnalysis], object]] = {
    "the optimizer": lambda analysis: analysis.optimizer,
    "the number of tokens in a sample": _tokens,
}


def _modules(analysis: Analysis | PipelineAnalysis) -> set[str]:
    """The modules that multiply matrices, equal layers counted once: no plan moves that to another module."""
    return {re.sub(r"(?<=\.)\d+(?=\.)", "*", row.module) for row in analysis.rows if row.flops and row.module}


def side_by_side(names: Sequence[str], costs: Sequence[Parts]) -> str:
    """A column for each of several costs, with how the last differs from the first if there are two."""
    same = len({each.samples for each in costs}) == 1
    seconds = [{kind: value / (1 if same else max(1, p.samples)) for kind, value in p.seconds.items()} for p in costs]
    rows = [("", *names, *(["difference"] if len(costs) == 2 else []))]
    rows += _lines("step" if same else "seconds per sample", seconds, format_seconds)
    rows += _lines("memory at the peak", [each.memory for each in costs], format_bytes)
    if any(each.host for each in costs):
        rows += _lines("host memory at its peak", [each.host for each in costs], format_bytes)
    return "\n".join(aligned(rows))


def _lines(whole: str, each: Sequence[Mapping[str, float]], form: Callable[[float], str]) -> Iterator[tuple[str, ...]]:
    """A line for a sum and one for each of its parts, the largest first."""
    sums = [sum(parts.values()) for parts in each]
    yield _line(whole, sums, form)
    named = sorted({kind for parts in each for kind in parts})
    kinds = sorted(named, key=lambda kind: -max(parts.get(kind, 0) for parts in each))
    for kind in kinds:
        values = [parts.get(kind, 0) for parts in each]
        if max(values) > _SHOWN * max(sums):
            yield _line(f"  {kind}", values, form)


def _line(name: str, values: Sequence[float], form: Callable[[float], str]) -> tuple[str, ...]:
    cells = [form(value) if value else "-" for value in values]
    if len(values) != 2:
        return (name, *cells)
    one, other = values
    change = other - one
    relative = f" ({change / one:+.1%})" if one else ""
    return (name, *cells, f"{'+' if change > 0 else '-'}{form(abs(change))}{relative}" if change else "same")
