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
a value for it. An all-reduce uses the better of a ring and a double binary tree, whose steps grow with the logarithm
of the ranks (P. Sanders, J. Speck, J. L. Traeff, "Two-tree algorithms for full bandwidth broadcast, reduction and
scan", Parallel Computing 35(12), 2009).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from shardgraph.cost_models.arithmetic import NUMBERS, Arithmetic
from shardgraph.cost_models.device import Link
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
    return on.ceiling(on.ratio(WIRE_RULES[operation](operand, result, ranks), ranks))


def collective_seconds(
    operation: str,
    operand: int,
    result: int,
    ranks: int,
    link: Link,
    efficiency: Mapping[str, float],
    on: Arithmetic = NUMBERS,
) -> float:
    """Seconds of one ``operation`` among ``ranks`` joined by ``link``; 0 for a group of one.

    ``efficiency`` is the fraction of the bandwidth that each operation attains, by default 1. The other arguments and
    errors are those of :func:`wire_bytes`.
    """
    sent = wire_bytes(operation, operand, result, ranks, on)
    if ranks == 1:
        return 0.0
    transfer = sent / (link.bandwidth * efficiency.get(operation, 1.0))
    steps: float = 1 if operation == "send" else ranks - 1
    if operation == "all_reduce":
        steps = on.minimum(2 * steps, 2 * on.log2(ranks))
    return steps * link.latencies.get(operation, link.latency) + transfer
