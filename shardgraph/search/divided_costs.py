"""Costs of a model divided as no program was made for: among fewer ranks, those of several nodes, or along two axes.

Placements of operators take seconds to assign, and there are many such divisions. So their costs follow from those of
the model divided along one axis inside a node: what a division divides, it divides further among more ranks, and what
it sends takes as much longer as the collectives of its axis do, in latencies and in bytes. Layouts that are best by
these estimates are priced exactly like any other.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.collectives import collective_seconds
from shardgraph.cost_models.group import Group
from shardgraph.search.layer_costs import LayerCosts, Part

_LEAST = 2**20  # bytes of a message of a ring whose time says how much faster one group of ranks is than another
_MANY = 2**50  # bytes beside whose time a latency is nothing
_DIVIDED = ("saved", "parameters", "gathered", "reduced")
_HALVES = {"forward": "exposed", "backward": "exposed_back"}
_PARTS = ("head", "layer", "tail")
_AROUND = ("working", "crossing")


class Slower(NamedTuple):
    """How many times as long collectives take in one group of ranks as in another: their latencies, and their bytes."""

    latency: float
    bandwidth: float


def among(undivided: LayerCosts, divided: LayerCosts, axis: str, few: int, many: int, slower: Slower) -> LayerCosts:
    """The costs of a division along ``axis`` among ``many`` ranks, more or fewer, from those among ``few``; what it
    sends takes ``slower`` times as long."""
    if few == many and slower == (1, 1):
        return divided
    line = undivided.divided_by(many, divided, few)

    def part(one: Part, near: Part, far: Part) -> Part:
        factor = near.latent * slower.latency + (1 - near.latent) * slower.bandwidth
        sent = near.sent * factor
        fields = {"sent": sent, "latency": near.latency * slower.latency}
        for half, exposed in _HALVES.items():
            whole, waits = getattr(one, half), getattr(near, exposed)
            work = max(0.0, whole + (_work(near, half) - whole) * (1 - 1 / many) / (1 - 1 / few))
            if axis == "cp":  # attention hides what a ring passes on; all else waits for what is sent
                waits = max(waits, sent / 2 - work)
            else:  # computation hides as much of what is added as it does, and as large a part of what is left
                waits = waits + (sent - near.sent) / 2 if factor > 1 else waits * factor
            fields |= {half: work + waits, exposed: waits}
        return far.positive._replace(**fields)

    changed: dict[str, Any] = {name: max(0.0, getattr(line, name)) for name in _AROUND}
    changed |= {name: part(*(getattr(costs, name) for costs in (undivided, divided, line))) for name in _PARTS}
    return replace(line, **changed)


def both(
    undivided: LayerCosts, axis: str, outer: LayerCosts, outer_ranks: int, inner: LayerCosts, inner_ranks: int
) -> LayerCosts:
    """The costs of a model divided along two axes, from those along each of them alone; ``axis`` is the outer one."""

    def ratio(one: float, divided: float) -> float:
        return divided / one if one else 1.0

    def grown(seconds: float, latent: float, factor: float) -> float:
        """What is sent takes less where there is less of it, but for latencies, a part of its seconds."""
        return seconds * (latent + (1 - latent) * factor)

    def held(one: float, a: float, b: float) -> float:
        """Each axis divides what the other leaves as it would all, but for what neither divides, such as scores that
        the model returns."""
        if not one:
            return 0.0
        whole = min((each - one / ranks) / (1 - 1 / ranks) for each, ranks in ((a, outer_ranks), (b, inner_ranks)))
        return max(a * b / one, whole + (one - whole) / (outer_ranks * inner_ranks))

    def part(one: Part, a: Part, b: Part) -> Part:
        fields = {name: held(*(getattr(each, name) for each in (one, a, b))) for name in _DIVIDED}
        works = {half: (_work(a, half), _work(b, half)) for half in _HALVES}
        of_a, of_b = ratio(one.saved, a.saved), ratio(one.saved, b.saved)
        if axis == "cp":  # a ring passes on a rank's keys and values, whatever is saved of them
            of_b = ratio(one.forward + one.backward, sum(other for _, other in works.values()))
        for half, exposed in _HALVES.items():
            work, other = works[half]
            waits = grown(getattr(a, exposed), a.latent, of_b) + grown(getattr(b, exposed), b.latent, of_a)
            fields |= {half: work * ratio(getattr(one, half), other) + waits, exposed: waits}
        sent = grown(a.sent, a.latent, of_b) + grown(b.sent, b.latent, of_a)
        return one._replace(sent=sent, latency=a.latency + b.latency, **fields)

    every = undivided, outer, inner
    changed: dict[str, Any] = {name: part(*(getattr(costs, name) for costs in every)) for name in _PARTS}
    for name in _AROUND:
        changed[name] = held(*(getattr(costs, name) for costs in every))
    if len(undivided.rows) == len(outer.rows) == len(inner.rows):
        changed["rows"] = tuple(a * b / one for one, a, b in zip(*(costs.rows for costs in every), strict=True))
    return replace(undivided, **changed)


def slower(cluster: Cluster, axis: str, far: Group, near: int, nbytes: float, whole: bool = False) -> Slower:
    """How many times as long the collectives along ``axis`` take in the group ``far`` as among ``near`` ranks of a
    node, or of as many nodes of one device. A ring passes on a rank's part of ``nbytes`` bytes of activations; those
    that are ``whole`` between products are reduced, others gathered and scattered."""
    other = cluster.group_of(((axis, near),), axis)
    if axis == "cp":
        rings = [_ring_seconds(cluster, group, max(_LEAST, int(nbytes))) for group in (far, other)]
        return Slower(1.0, rings[0] / rings[1])
    operation = {"ep": "all_to_all_single", "tp": "all_reduce" if whole else "all_gather_into_tensor"}[axis]
    latencies, seconds = (
        [collective_seconds(operation, sent, sent, group, cluster.efficiency) for group in (far, other)]
        for sent in (0, _MANY)
    )
    return Slower(latencies[0] / latencies[1] if latencies[1] else 1.0, seconds[0] / seconds[1])


def _ring_seconds(cluster: Cluster, group: Group, nbytes: int) -> float:
    part = nbytes // group.ranks
    return (group.ranks - 1) * collective_seconds("send", part, part, group, cluster.efficiency)


def _work(divided: Part, half: str) -> float:
    """Seconds of a half of a part without those in which it waits for collectives."""
    seconds: float = getattr(divided, half) - getattr(divided, _HALVES[half])
    return seconds
