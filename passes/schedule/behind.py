"""Computes behind collectives that would be awaited at once what does not depend on them, such as weight gradients.

Between a tensor-parallel layer's gradient and its sum over ranks nothing is left to compute that depends on it, but the
gradients of weights do not: computed behind the start of the collective, they hide it. As the backward of weights fills
a pipeline's bubbles (P. Qi et al., "Zero Bubble Pipeline Parallelism", arXiv:2401.10241).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from shardgraph import ir
from shardgraph.ir.attributes import MEMORY_KIND, REDUCES, ROLE
from shardgraph.passes.analysis.random_state import draws
from shardgraph.passes.base import Context
from shardgraph.passes.schedule.memory import Memory, memory_of
from shardgraph.passes.schedule.times import Times
from shardgraph.passes.schedule.transfers import wait_of


def compute_behind(step: Sequence[fx.GraphModule], times: Times, context: Context) -> None:
    """Move computation behind the collectives of a step's graphs that are neither gathers nor reductions.

    Their waits come before the first node that uses them. What precedes a start, and is not needed for it, is put
    before its wait, from the last such node on, until it takes as long as the collective; where it holds operands for
    longer, their bytes fit under the peak that the step has without that.
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
            _move_behind(start, seconds, memory)


def _is_of_operators(start: fx.Node) -> bool:
    return start not in REDUCES and MEMORY_KIND.get(start) != "gathered"


def _await_at_use(start: fx.Node) -> None:
    wait = wait_of(start)
    if wait.users:
        min(wait.users).prepend(wait)


def _move_behind(start: fx.Node, seconds: Mapping[fx.Node, float], memory: Memory) -> None:
    wait = wait_of(start)
    beside = list(_between(start, wait))
    left = seconds[start] - sum(seconds[node] for node in beside)
    most = max(memory.live[each] for each in (start, *beside))
    needed, moved, held = {start, *start.all_input_nodes}, dict[fx.Node, None](), dict[Any, int]()
    node = start.prev
    while left > 0 and node.op == "call_function" and not (ir.is_wait(node) and _is_of_operators(node.args[0])):
        most = max(most, memory.live[node])
        if node in needed or not _may_move(node, moved, wait):
            needed |= {node, *node.all_input_nodes}
        else:
            for operand in node.all_input_nodes:
                held |= _held_until(wait, operand)
            if most + sum(held.values()) > memory.peak:
                break
            moved[node] = None
            left -= seconds[node]
        node = node.prev
    for node in reversed(moved):
        wait.prepend(node)


def _held_until(wait: fx.Node, operand: fx.Node) -> dict[Any, int]:
    """The storages of an operand, with their bytes, that something behind ``wait`` does not hold anyway."""
    if any(user > wait for user in operand.users) or isinstance(ROLE.get(operand), (ir.Parameter, ir.Input, ir.Buffer)):
        return {}
    tensors = (leaf for leaf in tree_leaves(operand.meta["val"]) if isinstance(leaf, torch.Tensor))
    return {tensor.untyped_storage(): tensor.untyped_storage().nbytes() for tensor in tensors}


def _between(start: fx.Node, wait: fx.Node) -> Iterator[fx.Node]:
    node = start.next
    while node is not wait:
        yield node
        node = node.next


def _may_move(node: fx.Node, moved: Mapping[fx.Node, None], wait: fx.Node) -> bool:
    """Whether a node may come right before ``wait``: what uses it comes later, and it is an ordinary operation."""
    schema = getattr(node.target, "_schema", None)
    mutates = schema is not None and schema.is_mutable
    return not draws(node) and not mutates and all(user in moved or user > wait for user in node.users)
