"""Plans that do not treat all of a model's equal layers alike: for a memory limit between those that do."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import accumulate, pairwise

from shardgraph.capture.stacks import Stack
from shardgraph.passes.recompute.names import wildcards
from shardgraph.plans.annotations.kinds import offload, recompute
from shardgraph.plans.plan import Plan
from shardgraph.search.layouts import Layout


def mixed(plan: Plan, layout: Layout, stack: Stack) -> Plan:
    """``plan``, of ``layout`` but for how the layers of ``stack`` differ, with that too.

    The first layers, of a stage, are those to recompute: what they save is held longest. The last are those whose
    parameters stay gathered: they are needed again soonest. What is saved in host memory is of layers far from each
    other, so that each copy has the time until the next one begins.
    """
    equal = range(stack.head, stack.layers)
    away = [equal[place * len(equal) // layout.away] for place in range(layout.away)]
    full = [layer for layers in _of_stages(plan, stack) for layer in layers[: layout.full]]
    again = [(f"{stack.path}.{numbers}", recompute()) for numbers in _numbers(full)]
    moved = [(f"{stack.path}.{numbers}", offload()) for numbers in _numbers(away)]
    plan = replace(plan, annotations=(*plan.annotations, *again, *moved))
    last = equal[len(equal) - layout.kept :]
    ((pattern, entry),) = plan.parameters
    kept = ((f"{stack.path}.{numbers}.*", replace(entry, reshard_after_forward=False)) for numbers in _numbers(last))
    return replace(plan, parameters=((pattern, entry), *kept))


def _of_stages(plan: Plan, stack: Stack) -> Iterator[range]:
    """The equal layers of each stage of ``plan``, or all of them."""
    counts = plan.pipeline.balance if plan.pipeline is not None else (stack.layers,)
    for start, end in pairwise([0, *accumulate(counts)]):
        yield range(max(start, stack.head), end)


def _numbers(layers: Iterable[int]) -> list[str]:
    """Wildcards for the numbers of layers."""
    return wildcards([str(layer) for layer in layers])
