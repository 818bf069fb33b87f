"""Where the ranks of a collective are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from shardgraph.cost_models.device import Link

IN_A_NODE, BETWEEN_NODES = "in a node", "between nodes"


@dataclass(frozen=True)
class Group:
    """``ranks`` ranks, ``inside`` of them on each of ``nodes`` nodes.

    ``intra`` joins those of a node; ``inter``, one rank's share of the network, those of several nodes; None for a
    group inside a node. The numbers may be sympy expressions.
    """

    ranks: Any
    inside: Any
    nodes: Any
    intra: Link
    inter: Link | None = None

    @property
    def where(self) -> str:
        """The link that its collectives take turns on with those of other groups."""
        return IN_A_NODE if self.inter is None else BETWEEN_NODES

    @classmethod
    def of_node(cls, ranks: Any, link: Link) -> Group:
        """A group of ranks on one node, joined by ``link``."""
        return cls(ranks, ranks, 1, link)
