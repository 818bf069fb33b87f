"""What other devices would do to the best layout, by estimate: more memory, faster links, one more node."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.device import Link
from shardgraph.search.batches import Batches
from shardgraph.search.estimates import Estimated, Estimates, per_sample

_GIB = 2**30
_SAME = 0.002  # less is no change


def what_if(
    estimates: Estimates,
    estimated: Sequence[Estimated],
    budget: int,
    cluster: Cluster,
    batches: Batches,
    *,
    free_mesh: bool,
) -> Iterator[str]:
    """Sentences about the best estimate under each change, compared with the best of ``estimated``, as things are; one
    more node is a change if the mesh is free."""
    if (best := _best(estimated, budget)) is None:
        return
    with_more = estimates.within(budget + _GIB, estimated, cluster)
    yield f"with 1 GiB more in each device: {_compared(_best(with_more, budget + _GIB), best)}"
    faster = {"links inside a node": replace(cluster, intra=_twice(cluster.intra))}
    if cluster.nodes > 1 and cluster.inter is not None:
        faster["a network between nodes"] = replace(cluster, inter=_twice(cluster.inter))
    for name, other in faster.items():
        # Of what does not fit, links change nothing but how stages are balanced, where they are part of a layer's time.
        balanced = other.intra != cluster.intra
        left = (
            pair[0]
            for pair in estimated
            if (pair[1].memory <= budget or (balanced and pair[0].stages > 1)) and _may_gain(pair, best)
        )
        again = [(layout, guess) for layout in left if (guess := estimates.again(layout, other)) is not None]
        yield f"with {name} twice as fast: {_compared(_best(again, budget), best)}"
    ranks = best[0].ranks
    if not free_mesh:
        return
    more = ranks + cluster.devices_per_node
    if cluster.inter is not None and ranks == cluster.world_size:
        larger = replace(cluster, nodes=cluster.nodes + 1)
        total = None if batches.total is None else batches.total * more // ranks
        with_node = estimates.all(more, larger, replace(batches, total=total), lambda guesses: _least(guesses, budget))
        yield f"with one more node, of {more} devices: {_compared(_best(with_node, budget), best)} per sample"


def _may_gain(pair: Estimated, best: Estimated) -> bool:
    """Whether links twice as fast may make a layout faster than the best one is: they leave its computation as it is,
    and halve its operators' collectives at most. Stages with faster operators may be balanced otherwise."""
    layout, guess = pair
    if layout.stages > 1 and layout.degree > 1:
        return True
    return guess.compute / layout.samples / (2 if layout.degree > 1 else 1) < per_sample(best)


def _twice(link: Link) -> Link:
    return replace(link, bandwidth=2 * link.bandwidth)


def _best(estimated: Sequence[Estimated], budget: int) -> Estimated | None:
    return min((pair for pair in estimated if pair[1].memory <= budget), key=per_sample, default=None)


def _least(estimated: Sequence[Estimated], budget: int) -> float:
    best = _best(estimated, budget)
    return math.inf if best is None else per_sample(best)


def _compared(other: Estimated | None, best: Estimated) -> str:
    """How much less time the other one takes for a sample."""
    gain = 0.0 if other is None else 1 - per_sample(other) / per_sample(best)
    if other is None or gain < _SAME:
        return "no less time"
    named = f", as {other[0].name} on {dict(other[0].mesh)}" if other[0].name != best[0].name else ""
    return f"{gain:.1%} less time{named}"
