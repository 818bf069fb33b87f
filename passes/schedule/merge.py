"""Merges small collectives: one buffer takes the latency of one, and what it holds is copied instead."""

from __future__ import annotations

import itertools
import operator
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.ir import buckets
from shardgraph.ir.attributes import AVERAGES, MADE_BY, MEMORY_KIND, REDUCES, SOURCE, SUBJECT, VALUE, Attribute
from shardgraph.passes.base import Context, Graphs, GraphsPass, of_kind
from shardgraph.passes.builder import Builder
from shardgraph.passes.schedule.members import bucket_of
from shardgraph.passes.schedule.transfers import is_computed, made_ready, reached, wait_of

aten = torch.ops.aten

_ELEMENTWISE = frozenset({aten.div.Tensor, aten._to_copy.default})
"""What may be done to a whole buffer as well as to each of the gradients in it."""


@dataclass(frozen=True)
class MergeCollectives(GraphsPass):
    """Takes forward and backward graphs; in each, merges the all-gathers of the parameters of a bucket
    (:mod:`shardgraph.passes.schedule.members`), the reductions of their gradients, and the averages of buffers, that
    are over the same ranks and in the same dtype.

    A merged gather is where the first of its gathers was, a merged reduction where the last of its was. Reductions that
    follow another one (hybrid sharding), divisions and casts are done to the buffer if they are equal for all of it.
    So gradients of a bucket are reduced apart if other reductions follow: those of norms among divided operators, which
    are summed over these too, would each be summed and divided alone, as would all others.
    A buffer has its parameters in one order in every graph, those that backward gathers again first, so that all of
    its collectives can read what lies side by side (:mod:`shardgraph.runtime.side_by_side`).

    Must not change: what each value is, and other collectives.
    """

    name = "merge-collectives"
    requires = frozenset({"split"})
    provides = frozenset({"merged-collectives"})
    excludes = frozenset({"merged-collectives", "scheduled"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        if not context.plan.bucket:
            return
        bucket = bucket_of(context)
        backward = [graphs[name] for name in of_kind(graphs, "backward")]
        again = {SUBJECT.of(start) for gm in backward for start in ir.collectives(gm) if _is_gather(start)}
        apart = _apart(bucket, backward)
        places = {fqn: (number, fqn not in again, i) for i, (fqn, number) in enumerate(bucket.items())}
        for gm in graphs.values():
            for members in _together(filter(_is_gather, ir.collectives(gm)), SUBJECT, places, {}):
                _gather_together(gm, context, members)
            for members in _together(filter(_is_reduction, ir.collectives(gm)), REDUCES, places, apart):
                _reduce_together(gm, context, members)
            for members in _averages(gm, context.plan.bucket):
                _reduce_together(gm, context, members)


def _averages(gm: fx.GraphModule, most: int) -> Iterator[list[fx.Node]]:
    """Averages of buffers that can be merged, of at most so many bytes together."""
    filled: dict[Any, list[fx.Node]] = {}
    for start in ir.collectives(gm):
        if start in AVERAGES and all(ir.is_wait(node) or node.target in _ELEMENTWISE for node in _after(start)):
            operand = start.args[0].meta["val"]
            filled.setdefault((start.args[1:], operand.dtype, operand.device), []).append(start)
    for alike in filled.values():
        together, nbytes = [alike[:1]], _nbytes(alike[0])
        for start in alike[1:]:
            nbytes += _nbytes(start)
            if nbytes > most:
                together.append([])
                nbytes = _nbytes(start)
            together[-1].append(start)
        yield from (members for members in together if len(members) > 1)


def _nbytes(start: fx.Node) -> int:
    nbytes: int = start.args[0].meta["val"].nbytes
    return nbytes


def _is_gather(start: fx.Node) -> bool:
    """Whether a collective gathers a parameter that is on the device from the start, and needs no gather before."""
    if start.target is not ir.ALL_GATHER or MEMORY_KIND.get(start) != "gathered":
        return False
    waits = (node for node in made_ready(start) if ir.is_wait(node))
    return all(wait.args[0].target is ir.ALL_REDUCE for wait in waits)  # of a scale


def _is_reduction(start: fx.Node) -> bool:
    """Whether a collective is the first that reduces a gradient, and nothing but the reduction needs its result."""
    if start.target not in (ir.REDUCE_SCATTER, ir.ALL_REDUCE) or start not in REDUCES:
        return False
    first = not any(ir.is_wait(node) for node in _before(start))
    return first and all(node in REDUCES for node in _after(start))


def _apart(bucket: Mapping[str, int], backward: Iterable[fx.GraphModule]) -> dict[str, str]:
    """By parameter, the reductions that follow the first one of its gradient, if others of its bucket have the same;
    for one alone those of most others, since a collective of its own would take longer than what it keeps apart."""
    follow = dict.fromkeys(bucket, "")
    for start in itertools.chain.from_iterable(map(ir.collectives, backward)):
        if _is_reduction(start) and REDUCES.of(start) in follow:
            others = sorted(node for node in _after(start) if ir.is_collective(node))
            follow[REDUCES.of(start)] = str([(node.target, node.args[1:]) for node in others])
    counts = Counter((bucket[fqn], each) for fqn, each in follow.items())
    most = {number: each for (number, each), _ in reversed(counts.most_common())}
    return {fqn: each if counts[bucket[fqn], each] > 1 else most[bucket[fqn]] for fqn, each in follow.items()}


def _together(
    starts: Iterator[fx.Node],
    parameter: Attribute[str],
    places: Mapping[str, tuple[int, bool, int]],
    apart: Mapping[str, str],
) -> Iterator[list[fx.Node]]:
    """Collectives of one bucket, which can be merged, in the order of their places in it; those of parameters that
    ``apart`` tells from others are not merged with these."""
    filled: dict[Any, list[fx.Node]] = {}
    for start in starts:
        fqn, operand = parameter.of(start), start.args[0].meta["val"]
        if (place := places.get(fqn)) is not None:
            key = place[0], apart.get(fqn), start.target, start.args[1:], operand.dtype, operand.device
            filled.setdefault(key, []).append(start)
    alike = (members for members in filled.values() if len(members) > 1)
    return (sorted(members, key=lambda start: places[parameter.of(start)]) for members in alike)


def _gather_together(gm: fx.GraphModule, context: Context, members: Sequence[fx.Node]) -> None:
    first, axis = min(members), ir.group_of(members[0])
    for node in sorted({node for member in members for node in made_ready(member) if node > first}):
        first.prepend(node)
    waits = [wait_of(member) for member in members]
    labels = {SUBJECT: _subjects(members), SOURCE: SOURCE.get(first, ""), MEMORY_KIND: "gathered"}
    build = Builder(gm.graph, context.values, labels, after=first.prev)
    buffer = build.all_gather(build.call(buckets.pack, [member.args[0] for member in members], 1), axis)
    parts = build.call(buckets.unpack_parts, buffer, [_shape(wait) for wait in waits], context.values.ranks(axis))
    _replace(build, parts, waits)
    _erase([*members, *waits])


def _reduce_together(gm: fx.GraphModule, context: Context, members: Sequence[fx.Node]) -> None:
    last, done = max(members), set[fx.Node]()
    after = sorted({node for member in members for node in _after(member)})
    labels: dict[Attribute[Any], Any] = {SUBJECT: _subjects(members), SOURCE: SOURCE.get(last, "")}
    if last in REDUCES:
        labels[REDUCES] = ", ".join(REDUCES.of(member) for member in members)
    else:
        labels[AVERAGES] = tuple(fqn for member in members for fqn in AVERAGES.of(member))
    build = Builder(gm.graph, context.values, labels, after=last)
    parts = context.values.ranks(ir.group_of(last)) if last.target is ir.REDUCE_SCATTER else 1
    buffer = build.call(buckets.pack, [member.args[0] for member in members], parts)
    same: list[fx.Node] | None = list(members)
    while same is not None:  # what is done to all of them equally is done to the buffer
        values, (each, *_) = same, same
        buffer = build.call(each.target, buffer, *each.args[1:], **each.kwargs)
        done.update(same)
        same = _equal_users(values)
    point = _replace(build, build.call(buckets.unpack, buffer, [_shape(value) for value in values]), values)
    _erase(done)
    for node in after:  # behind the last of what is unpacked
        if node not in done:
            point.append(node)
            point = node


def _equal_users(values: Sequence[fx.Node]) -> list[fx.Node] | None:
    """The only users of all values, if they do the same to each that may be done to all of them at once."""
    users = [next(iter(value.users)) for value in values if len(value.users) == 1]
    if len(users) < len(values) or not all(user.op == "call_function" for user in users):
        return None
    forms = {(user.target, user.args[1:], tuple(user.kwargs.items())) for user in users}
    merged = users[0].target in _ELEMENTWISE or users[0].target in (ir.ALL_REDUCE, ir.WAIT)
    return users if merged and len(forms) == 1 else None


def _replace(build: Builder, unpacked: fx.Node, values: Sequence[fx.Node]) -> fx.Node:
    """Let users of the values use what is unpacked in their place, with the same meaning; returns the last of it."""
    for i, value in enumerate(values):
        item = build.call(operator.getitem, unpacked, i)
        kept = {key: meant for key, meant in value.meta.items() if key not in (VALUE.key, MADE_BY.key)}
        item.meta.update(kept)
        value.replace_all_uses_with(item)
    return item


def _erase(nodes: Iterable[fx.Node]) -> None:
    for node in sorted(nodes, reverse=True):
        node.graph.erase_node(node)


def _shape(node: fx.Node) -> tuple[int, ...]:
    return tuple(node.meta["val"].shape)


def _subjects(members: Sequence[fx.Node]) -> str:
    first, second, *others = (str(SUBJECT.get(member)) for member in members)
    return f"{first}, {second}" + (f" and {len(others)} more" if others else "")


def _before(start: fx.Node) -> set[fx.Node]:
    """The nodes that reduce a gradient up to this one."""
    return reached(start, lambda node: node.all_input_nodes, lambda node: node in REDUCES)


def _after(start: fx.Node) -> set[fx.Node]:
    """All nodes that depend on a node, but for the output."""
    return reached(start, lambda node: node.users, is_computed)
