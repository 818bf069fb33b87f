"""How many bytes a collective puts on the wire.

Per rank, sent (as many are received), by the ring algorithms, which are optimal in bandwidth; in a group of
``n`` ranks, ``B`` the bytes of the larger of what one rank gives and gets:

* all-gather and reduce-scatter ``(n - 1) / n * B`` and all-reduce, one after the other, ``2 (n - 1) / n * B``:
  R. Thakur, R. Rabenseifner, W. Gropp, "Optimization of Collective Communication Operations in MPICH",
  Int. J. of High Performance Computing Applications 19(1), 2005; that no algorithm sends less in an all-reduce:
  P. Patarasuk, X. Yuan, "Bandwidth optimal all-reduce algorithms for clusters of workstations",
  J. of Parallel and Distributed Computing 69(2), 2009.
* all-to-all ``(n - 1) / n * B``: all but a rank's own part leaves it (Thakur et al., pairwise exchange).
"""

from __future__ import annotations

from collections.abc import Callable
from fractions import Fraction
from math import ceil

from shardgraph.errors import ShardGraphError, nearest

WireRule = Callable[[int, int, int], Fraction]
"""From the bytes of a rank's input, the bytes of its output and the number of ranks to bytes on the wire."""

WIRE_RULES: dict[str, WireRule] = {
    "all_gather_into_tensor": lambda given, gotten, ranks: Fraction(ranks - 1, ranks) * gotten,
    "reduce_scatter_tensor": lambda given, gotten, ranks: Fraction(ranks - 1, ranks) * given,
    "all_reduce": lambda given, gotten, ranks: 2 * Fraction(ranks - 1, ranks) * given,
    "all_to_all_single": lambda given, gotten, ranks: Fraction(ranks - 1, ranks) * given,
}


def wire_bytes(operation: str, given: int, gotten: int, ranks: int) -> int:
    """Bytes that each of ``ranks`` sends in one ``operation``, rounded up.

    ``given`` and ``gotten`` are the bytes of one rank's input and output.

    Raises:
        ShardGraphError: no rule is registered for the operation.
    """
    if operation not in WIRE_RULES:
        raise ShardGraphError(
            f"no formula says how many bytes {operation!r} sends: add a line for it to WIRE_RULES, which has "
            f"{', '.join(WIRE_RULES)}{nearest(operation, WIRE_RULES)}"
        )
    return ceil(WIRE_RULES[operation](given, gotten, ranks))
