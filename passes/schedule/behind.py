"""Computes behind collectives that would be awaited at once what does not depend on them, such as weight gradients.

Between a tensor-parallel layer's gradient and its sum over ranks nothing is left to compute that depends on it, but the
gradients of weights do not: computed behind the start of the collective, they hide it. As the backward of weights fills
a pipeline's bubbles (P. Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241). In forward, weights that are
cast for what comes next do not depend on it either.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from shardgraph import ir
from shardgraph.ir.attributes import MEMORY_KIND, REDUCES, ROLE
from shardgraph.ir.buckets import pack
from shardgraph.ir.rank_operations import pad_shard
from shardgraph.passes.analysis.random_state import draws
from shardgraph.passes.base import Context
from shardgraph.passes.schedule.memory import Memory, memory_of
from shardgraph.passes.schedule.times import Times
from shardgraph.passes.schedule.transfers import wait_of


def compute_behind(step: Sequence[fx.GraphModule], times: Times, context: Context) -> None:
    """Move computation behind the collectives of a step's graphs that are neither gathers nor reductions.

    Their waits come before the first node that uses them. What precedes a start, and is not needed for it, is put
    before its wait, from the last such node on, until it takes as long as the collective; then what comes after the
    wait, up to the next such collective, and does not need it. Where operands are held for longer, or results for
    earlier, their bytes fit under the peak that the step has without that.
    """
    graphs = {gm: [start for start in ir.collectives(gm) if _is_of_operators(start)] for gm in step}
    if not any(graphs.values()):
        return
    memory = memory_of(step, context)
    for gm, starts in graphs.items():
        seconds = times.of(gm)
        for start in starts:
            _await_at_use(start)
        for start in starts:
            left = _move_behind(start, seconds, memory)
            _bring_forward(start, left, seconds, memory, _starts_of_operators)


_TINY = 0.001
"""The part of a step's peak that is too little to mind."""


def compute_before_first(gm: fx.GraphModule, seconds: Mapping[fx.Node, float], memory: Memory) -> None:
    """Put what a graph's first gather is not needed for before its wait: nothing else can hide it.

    That is what comes before the next wait and before what is copied for a later collective: masks and positions, which
    need no parameter. Its bytes fit under the peak, which they may raise by as little as ``_TINY``: gathered parameters
    are often all that a peak has.
    """
    first = next(ir.collectives(gm), None)
    if first is None or MEMORY_KIND.get(first) != "gathered":
        return
    hidden = sum(seconds[node] for node in _between(first, wait_of(first)) if not ir.is_started(node))
    raised = replace(memory, peak=int((1 + _TINY) * memory.peak))
    _bring_forward(first, seconds[first] - hidden, seconds, raised, _waits_or_copies)


def _waits_or_copies(node: fx.Node) -> bool:
    return ir.is_wait(node) or node.target in (pack, pad_shard)


def _is_of_operators(start: fx.Node) -> bool:
    return start not in REDUCES and MEMORY_KIND.get(start) != "gathered"


def _await_at_use(start: fx.Node) -> None:
    wait = wait_of(start)
    if wait.users:
        min(wait.users).prepend(wait)


_EARLIER_COLLECTIVES = 2
"""What is put behind a collective may come before so many others, unless it is behind those."""

_ENOUGH = 0.9
"""The part of a collective that is worth hiding: what would hide the rest is better put behind another one."""


def _move_behind(start: fx.Node, seconds: Mapping[fx.Node, float], memory: Memory) -> float:
    """Put what precedes the start before the wait; returns the seconds of the collective that nothing hides yet."""
    wait = wait_of(start)
    passed = [start, *_between(start, wait)]  # what operands of what is moved are held for longer beside
    left = seconds[start] - sum(seconds[node] for node in passed[1:])
    most = max(memory.live[each] for each in passed)
    needed, moved, held = {start, *start.all_input_nodes}, set[fx.Node](), dict[Any, int]()
    tied: dict[fx.Node, list[fx.Node]] = {}  # to their operand, which nothing else needs: moved with it
    node, earlier, within = start.prev, 0, 0
    while left > (1 - _ENOUGH) * seconds[start] and node.op == "call_function":
        if ir.is_wait(node) and _is_of_operators(node.args[0]):
            earlier += 1
            if earlier > _EARLIER_COLLECTIVES:
                break
            hidden = [node.args[0], *_between(node.args[0], node), node]
            most = max(most, *(memory.live[each] for each in hidden))
            needed |= {*hidden, *chain.from_iterable(each.all_input_nodes for each in hidden)}
            passed += hidden
            node = hidden[0].prev
            continue
        most = max(most, memory.live[node])
        unit = [node, *tied.pop(node, [])]
        if node in needed or not _may_move(node, {*moved, *unit}, wait):
            needed |= {node, *node.all_input_nodes}
        elif (operand := _own_operand(node)) is not None and operand not in needed:
            tied[operand] = unit
        else:
            more = {key: n for each in node.all_input_nodes for key, n in _held_until(wait, each).items()}
            between = max(within, sum(sum(_storages(each).values()) for each in unit[:-1]))
            if most + sum((held | more).values()) + between > memory.peak:
                break
            held, within = held | more, between
            moved.update(unit)
            left -= sum(seconds[each] for each in unit)
        passed.append(node)
        node = node.prev
    for each in sorted(moved):
        wait.prepend(each)
    for each in passed if moved else ():
        memory.live[each] += sum(held.values())
    return left


def _own_operand(node: fx.Node) -> fx.Node | None:
    """The only operation that a node needs, if nothing else needs it: a product that is cast."""
    operands = [each for each in node.all_input_nodes if each.op == "call_function"]
    return operands[0] if len(operands) == 1 and len(operands[0].users) == 1 and _is_ordinary(operands[0]) else None


def _starts_of_operators(node: fx.Node) -> bool:
    return ir.is_collective(node) and _is_of_operators(node)


def _bring_forward(
    start: fx.Node,
    left: float,
    seconds: Mapping[fx.Node, float],
    memory: Memory,
    ends: Callable[[fx.Node], bool],
) -> None:
    """Put what comes after the wait and does not need it before it, up to the first node that ``ends`` the search."""
    wait = wait_of(start)
    passed = [start, *_between(start, wait), wait]
    most, held = max(memory.live[each] for each in passed), 0
    late = {wait}  # what must come after the wait
    earlier = list[fx.Node]()
    node = wait.next
    while left > 0 and node.op == "call_function" and not ends(node):
        most = max(most, memory.live[node])
        results = sum(_storages(node).values())
        if (
            not late.isdisjoint(node.all_input_nodes)
            or not _is_ordinary(node)
            or ir.is_started(node)
            or ir.is_wait(node)
        ):
            late.add(node)
        elif most + held + results > memory.peak:
            break
        else:
            earlier.append(node)
            held += results
            left -= seconds[node]
        passed.append(node)
        node = node.next
    for node in earlier:
        wait.prepend(node)
    for node in passed if earlier else ():
        memory.live[node] += held


def _held_until(wait: fx.Node, operand: fx.Node) -> dict[Any, int]:
    """The storages of an operand, with their bytes, that something behind ``wait`` does not hold anyway."""
    if any(user > wait for user in operand.users) or isinstance(ROLE.get(operand), (ir.Parameter, ir.Input, ir.Buffer)):
        return {}
    return _storages(operand)


def _storages(node: fx.Node) -> dict[Any, int]:
    tensors = (leaf for leaf in tree_leaves(node.meta["val"]) if isinstance(leaf, torch.Tensor))
    return {tensor.untyped_storage(): tensor.untyped_storage().nbytes() for tensor in tensors}


def _between(start: fx.Node, wait: fx.Node) -> Iterator[fx.Node]:
    node = start.next
    while node is not wait:
        yield node
        node = node.next


def _may_move(node: fx.Node, moved: Collection[fx.Node], wait: fx.Node) -> bool:
    """Whether a node may come right before ``wait``: what uses it comes later, and it is an ordinary operation."""
    return _is_ordinary(node) and all(user in moved or user > wait for user in node.users)


def _is_ordinary(node: fx.Node) -> bool:
    """Whether when a node is computed makes no difference to what it computes, nor to others."""
    schema = getattr(node.target, "_schema", None)
    mutates = schema is not None and schema.is_mutable
    return not draws(node) and not mutates
