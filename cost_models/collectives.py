"""Bytes that a collective puts on the wire, and the seconds that it takes.

Bytes sent per rank (as many are received) by the ring algorithms, which are optimal in bandwidth, in a group of ``n``
ranks, where ``B`` is the larger of one rank's input and output in bytes:

* all-gather and reduce-scatter ``(n - 1) / n * B`` and all-reduce, one after the other, ``2 (n - 1) / n * B``:
  R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
  Int. J. of High Performance Computing Applications 19(1), 2005; that no algorithm sends less in an all-reduce:
  P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
  J. of Parallel and Distributed Computing 69(2), 2009.
* all-to-all ``(n - 1) / n * B``: a rank sends all but its own part (Thakur et al., pairwise exchange).
* send ``B``, to one other rank.

Time follows the alpha-beta model: one latency per step of the algorithm, plus bytes over bandwidth (R. Hockney, "The
communication challenge for MPP", Parallel Computing 20(3), 1994), both per operation where the link or the cluster has
a value for it. Steps are counted inside a node and between nodes apart, each at the latency of its link. In a group of
``n`` a ring takes ``n - 1`` steps, an all-reduce twice as many; of more ranks, trees and their like take a number that
grows with the logarithm: a double binary tree for an all-reduce (P. Sanders, J. Speck, J. L. Traeff, "Two-tree
algorithms for full bandwidth broadcast, reduction and scan", Parallel Computing 35(12), 2009; NCCL since 2.4), and for
all-gather and reduce-scatter NCCL's PAT (S. Jeaugey, "PAT: a new algorithm for all-gather and reduce-scatter operations
at scale", arXiv:2506.20252). So a collective is never cheaper than one that it contains.

Bandwidth inside a node is the link's. A collective between nodes has as many rings, or trees, through the network as it
has ranks in a node, so the bandwidth of as many shares of the network, at most that inside a node (how NCCL builds its
rings: https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/). In an all-to-all each rank
sends what leaves the node through its own share. A switch that reduces (NVLink SHARP, an efficiency above 1) does so
inside a node only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from shardgraph.cost_models.arithmetic import NUMBERS, Arithmetic
from shardgraph.cost_models.group import Group
from shardgraph.errors import ShardGraphError, nearest

WIRE_RULES: dict[str, Callable[[int, int, int], int]] = {
    "all_gather_into_tensor": lambda operand, result, ranks: (ranks - 1) * result,
    "reduce_scatter_tensor": lambda operand, result, ranks: (ranks - 1) * operand,
    "all_reduce": lambda operand, result, ranks: 2 * (ranks - 1) * operand,
    "all_to_all_single": lambda operand, result, ranks: (ranks - 1) * operand,
    "send": lambda operand, result, ranks: ranks * operand,
}
"""``(input bytes of a rank, output bytes of a rank, ranks)`` -> bytes on the wire of all ranks together."""


def wire_bytes(operation: str, operand: int, result: int, ranks: int, on: Arithmetic = NUMBERS) -> int:
    """Bytes that each of ``ranks`` sends in one ``operation``, rounded up.

    ``operand`` and ``result`` are the bytes of one rank's input and output; ``on`` is the arithmetic of their type,
    numbers or expressions.

    Raises:
        ShardGraphError: no rule is registered for the operation.
    """
    if operation not in WIRE_RULES:
        raise ShardGraphError(
            f"there is no formula for the bytes that {operation!r} sends: add a line for it to WIRE_RULES, which has "
            f"{', '.join(WIRE_RULES)}{nearest(operation, WIRE_RULES)}"
        )
    return on.ratio_up(WIRE_RULES[operation](operand, result, ranks), ranks)


def collective_seconds(
    operation: str,
    operand: int,
    result: int,
    group: Group,
    efficiency: Mapping[str, float],
    on: Arithmetic = NUMBERS,
) -> float:
    """Seconds of one ``operation`` of a ``group``; 0 for a group of one.

    ``efficiency`` is the fraction of the bandwidth that each operation attains, by default 1; a link may have its
    own. The other arguments and errors are those of :func:`wire_bytes`.
    """
    sent = wire_bytes(operation, operand, result, group.ranks, on)
    if group.ranks == 1:
        return 0.0
    intra, inter = group.intra, group.inter
    attained = (intra if inter is None else inter).efficiency.get(operation, efficiency.get(operation, 1.0))
    steps = _STEPS[operation]
    if inter is None:
        return steps(group.ranks, on) * intra.latency_of(operation) + sent / (intra.bandwidth * attained)
    attained = min(attained, 1.0)  # what a switch gains, it does inside a node
    between = steps(group.nodes, on) * inter.latency_of(operation)
    if operation in ("send", "all_to_all_single"):  # each rank's bytes take its own share of the network
        outside = 1 if operation == "send" else (group.ranks - group.inside) / (group.ranks - 1)
        return between + sent * outside / (on.minimum(intra.bandwidth, inter.bandwidth) * attained)
    bandwidth = on.minimum(intra.bandwidth, inter.bandwidth * group.inside) * attained
    return steps(group.inside, on) * intra.latency_of(operation) + between + sent / bandwidth


def _ring_or_tree(rounds: int) -> Callable[[Any, Arithmetic], Any]:
    """The steps of ``rounds`` rings over ``n`` ranks, or of trees if those are fewer."""
    return lambda n, on: on.minimum(rounds * (n - 1), 2 * on.log2(n))


_STEPS: dict[str, Callable[[Any, Arithmetic], Any]] = {
    "all_gather_into_tensor": _ring_or_tree(1),
    "reduce_scatter_tensor": _ring_or_tree(1),
    "all_to_all_single": _ring_or_tree(1),
    "all_reduce": _ring_or_tree(2),
    "send": lambda n, on: 1,
}
