"""The least exposed communication that any order of a program's operations could have: a bound that knows no order.

A step is a job shop: operations are jobs with precedences, one machine computes and each link is one. What must come
before an operation (its head) and after it (its tail) takes at least the longest path, and at least all computation in
it, since one machine computes. Of all orders of one machine's jobs, even if it may interrupt them, none ends before
``max over S of (least head in S + work of S + least tail in S)``, which J. R. Jackson's rule attains (J. Carlier, "The
one-machine sequencing problem", European J. of Operational Research 11(1), 1982). The largest of these is the bound. It
contains what a link alone tells: its bytes, less all computation that does not depend on them.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping, Sequence
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

    A collective slows the computation beside it (``cluster.overlap``), so a part of it is always exposed.
    """
    halves, memory = program_halves(program), program_memory(program, "adamw")
    rows = list(rows_of(halves, memory, Prices(cluster, program.plan.mesh), fused=False))
    total = 0.0
    for half, gm in halves.items():
        own = {row.node: row for row in rows if row.half == half}
        work = {node: own[node.name] for node in gm.graph.nodes if node.name in own}
        machines = {node: row.link or row.stream or COMPUTE for node, row in work.items()}
        seconds = {node: row.seconds for node, row in work.items()}
        computed, sent = (
            sum(row.seconds for row in work.values() if bool(row.link) is of_link and (row.link or not row.stream))
            for of_link in (False, True)
        )
        idle = least_seconds(gm, seconds, machines) - computed
        total += max(idle, (1 - cluster.overlap) * sent)
    return total


def least_seconds(gm: fx.GraphModule, seconds: Mapping[fx.Node, float], machines: Mapping[fx.Node, str]) -> float:
    """The least seconds in which a graph runs, given those of its nodes and on which machine each runs.

    Other nodes take no time.
    """
    nodes = list(gm.graph.nodes)
    heads = _paths(nodes, [node.all_input_nodes for node in nodes], seconds, machines)
    tails = _paths(nodes[::-1], [list(node.users) for node in reversed(nodes)], seconds, machines)
    jobs: dict[str, list[Job]] = {}
    for node, machine in machines.items():
        jobs.setdefault(machine, []).append(Job(heads[node], seconds[node], tails[node]))
    return max(map(one_machine, jobs.values()), default=0.0)


def _paths(
    nodes: Sequence[fx.Node],
    before: Sequence[Iterable[fx.Node]],
    seconds: Mapping[fx.Node, float],
    machines: Mapping[fx.Node, str],
) -> dict[fx.Node, float]:
    """The least time before each of ``nodes``, which come after those that are ``before`` them."""
    index = {node: i for i, node in enumerate(nodes)}
    computed = np.array([seconds[node] if machines.get(node) == COMPUTE else 0.0 for node in nodes])
    reached: list[int] = []  # the nodes before each one, as bits
    found: dict[fx.Node, float] = {}
    for node, earlier in zip(nodes, before, strict=True):
        bits = 0
        for each in earlier:
            bits |= reached[index[each]] | 1 << index[each]
        reached.append(bits)
        longest = max((found[each] + seconds.get(each, 0.0) for each in earlier), default=0.0)
        if machines.get(node, COMPUTE) != COMPUTE:
            packed = np.frombuffer(bits.to_bytes(len(nodes) // 8 + 1, "little"), np.uint8)
            longest = max(longest, float(np.unpackbits(packed, bitorder="little")[: len(nodes)] @ computed))
        found[node] = longest
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
