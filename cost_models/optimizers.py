"""The state and the memory traffic of optimizers, by name."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from shardgraph.errors import ShardGraphError, nearest


@dataclass(frozen=True)
class OptimizerCost:
    """An optimizer's memory and traffic, counted in tensors of the size of a parameter's shard.

    ``states`` are kept for every parameter, and ``counters`` are scalar tensors of 4 bytes; ``temporaries`` are live
    while one parameter is updated, of which ``left`` are still there while the next one is, or ``at_once`` of each
    while all of them are (torch's default for parameters on an accelerator that are no DTensors); ``moved`` are read or
    written by an update.
    """

    states: int
    counters: int
    temporaries: int
    moved: int
    left: int = 0
    at_once: int = 0


OPTIMIZERS: dict[str, OptimizerCost] = {
    # D. Kingma, J. Ba, "Adam", arXiv:1412.6980; torch.optim's forms for one tensor at a time and for all.
    "adamw": OptimizerCost(states=2, counters=1, temporaries=2, moved=7, left=1, at_once=1),
    "adam": OptimizerCost(states=2, counters=1, temporaries=2, moved=7, left=1, at_once=1),
    "sgd": OptimizerCost(states=0, counters=0, temporaries=0, moved=3),
    "sgd+momentum": OptimizerCost(states=1, counters=0, temporaries=0, moved=5),
}


UPDATED_TOGETHER = 1 << 20
"""Bytes of shards that a step updates together, even where each is smaller. What an update takes for itself is as large
as what is updated, so more than the largest shard are not."""

SMALL_SHARD, STORED_TOGETHER = 1 << 20, 8 << 20
"""Shards of up to so many bytes are stored beside others to be updated together, up to so many bytes of them."""


def in_stretches(sizes: Iterable[tuple[str, int]], most: int) -> Iterator[list[str]]:
    """The names of what has these sizes, in stretches that follow on each other, of up to ``most`` bytes."""
    stretch: list[str] = []
    filled = 0
    for name, nbytes in sizes:
        if stretch and filled + nbytes > most:
            yield stretch
            stretch, filled = [], 0
        stretch.append(name)
        filled += nbytes
    if stretch:
        yield stretch


def updates_of(sizes: Sequence[float]) -> float:
    """How many tensors the update of shards of these sizes in bytes computes on, if small ones are updated together:
    those, with a last one that is not full. It grows by as much with each of equal layers."""
    parts = [min(1.0, nbytes / UPDATED_TOGETHER) for nbytes in sizes]
    return min(float(len(parts)), sum(parts) + any(part < 1 for part in parts))


def optimizer_cost(name: str) -> OptimizerCost:
    """The costs of an optimizer; ShardGraphError if it is not described."""
    if name not in OPTIMIZERS:
        raise ShardGraphError(
            f"the costs of the optimizer {name!r} are not described; there are {', '.join(OPTIMIZERS)}"
            f"{nearest(name, OPTIMIZERS)}"
        )
    return OPTIMIZERS[name]
