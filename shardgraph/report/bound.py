"""The least exposed communication that any order of a program's operations could have: a bound that knows no order.

A step is a job shop: operations are jobs with precedences, one machine computes and each link is one. What must come
before an operation (its head) and after it (its tail) takes at least the longest path, and at least all computation in
it, since one machine computes. Of all orders of one machine's jobs, even if it may interrupt them, none ends before
``max over S of (least head in S + work of S + least tail in S)``, which J. R. Jackson's rule attains (J. Carlier, "The
one-machine sequencing problem", European J. of Operational Research 11(1), 1982). The largest of these is the bound. It
contains what a link alone tells: its bytes, less all computation that does not depend on them.

Where a collective slows the computation beside it, that time is work of the machine that computes, too. And what needs
a collective's result comes after it and all computation in between, which depends on it and is needed for the other.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
from torch import fx

from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.timeline import COMPUTE
from shardgraph.passes.analysis.rows import Prices, rows_of
from shardgraph.passes.program import Program
from shardgraph.report.step import program_halves, program_memory


class Job(NamedTuple):
    """``seconds`` of work, and the least time before it and after it."""

    head: float
    seconds: float
    tail: float


def least_exposed(program: Program, cluster: Cluster) -> float:
    """Seconds of communication in forward and backward that no order of a program's operations can hide.

    That it slows computation (``cluster.overlap``) counts as exposed.
    """
    halves, memory = program_halves(program), program_memory(program, "adamw")
    rows = list(rows_of(halves, memory, Prices(cluster, program.plan.mesh), fused=False))
    total = 0.0
    for half, gm in halves.items():
        own = {row.node: row for row in rows if row.half == half}
        work = {node: own[node.name] for node in gm.graph.nodes if node.name in own}
        machines = {node: row.link or row.stream or COMPUTE for node, row in work.items()}
        seconds = {node: row.seconds for node, row in work.items()}
        slowed = {node: (1 - cluster.overlap_on(row.link)) * row.seconds for node, row in work.items() if row.link}
        computed = sum(row.seconds for node, row in work.items() if machines[node] == COMPUTE)
        total += max(0.0, least_seconds(gm, seconds, machines, slowed) - computed)
    return total


def least_seconds(
    gm: fx.GraphModule,
    seconds: Mapping[fx.Node, float],
    machines: Mapping[fx.Node, str],
    slowed: Mapping[fx.Node, float] = MappingProxyType({}),
) -> float:
    """The least seconds in which a graph runs, given those of its nodes and on which machine each runs.

    Other nodes take no time. ``slowed`` is by how much a node on another machine slows the computation.
    """
    nodes = list(gm.graph.nodes)
    computed = {node: seconds[node] for node in nodes if machines.get(node) == COMPUTE} | dict(slowed)
    beside = {node: seconds[node] for node in nodes if machines.get(node, COMPUTE) != COMPUTE}
    heads = _paths(nodes, [node.all_input_nodes for node in nodes], computed, beside)
    tails = _paths(nodes[::-1], [list(node.users) for node in reversed(nodes)], computed, beside)
    jobs = {COMPUTE: [Job(heads[node], more, tails[node]) for node, more in computed.items()]}
    for node, took in beside.items():
        jobs.setdefault(machines[node], []).append(Job(heads[node], took, tails[node]))
    return max(map(one_machine, jobs.values()))


def _paths(
    nodes: Sequence[fx.Node],
    before: Sequence[Iterable[fx.Node]],
    computed: Mapping[fx.Node, float],
    beside: Mapping[fx.Node, float],
) -> dict[fx.Node, float]:
    """The least time before each of ``nodes``, which come after those that are ``before`` them."""
    index = {node: i for i, node in enumerate(nodes)}
    work = np.array([computed.get(node, 0.0) for node in nodes])
    reached = np.zeros((len(nodes), len(nodes) // 8 + 1), np.uint8)  # the nodes before each one, as bits
    found: dict[fx.Node, float] = {}
    # Of the nodes beside the computation that are before each one, the one that ends last, if any, and when.
    latest: list[tuple[float, int]] = []
    for i, (node, earlier) in enumerate(zip(nodes, before, strict=True)):
        longest, last = 0.0, (0.0, -1)
        for each in earlier:
            j = index[each]
            reached[i] |= reached[j]
            reached[i, j // 8] |= 1 << j % 8
            longest = max(longest, found[each] + (beside[each] if each in beside else computed.get(each, 0.0)))
            last = max(last, latest[j])
        end, c = last
        needed = np.unpackbits(reached[i], count=len(nodes), bitorder="little").astype(bool)
        longest = max(longest, float(needed @ work))
        if c >= 0:
            dependent = (reached[c:i, c // 8] >> c % 8 & 1).astype(bool)
            longest = max(longest, end + float((needed[c:i] & dependent) @ work[c:i]))
        found[node] = longest
        latest.append(max(last, (longest + beside[node], i)) if node in beside else last)
    return found


def one_machine(jobs: Iterable[Job]) -> float:
    """The end of the last tail if one machine may interrupt its jobs: it does what has the longest tail of what is
    there.
    """
    coming = sorted(jobs)
    waiting: list[list[float]] = []
    now = end = 0.0
    for i, job in enumerate(coming):
        now = max(now, job.head)
        heapq.heappush(waiting, [-job.tail, job.seconds])
        until = coming[i + 1].head if i + 1 < len(coming) else float("inf")
        while waiting and now < until:
            tail, left = waiting[0]
            done = min(left, until - now)
            now += done
            end = max(end, now - tail)
            if done == left:
                heapq.heappop(waiting)
            else:
                waiting[0][1] -= done
    return end
