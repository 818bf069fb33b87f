"""Squared norms of what ranks have of a gradient: results that say how long it is, of which nothing is computed."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardgraph.ir import SQUARED_NORM
from shardgraph.proof.definitions import Typing, define
from shardgraph.proof.held import Held
from shardgraph.proof.of_rank import OfRank


@dataclass(frozen=True)
class Squared(OfRank):
    """The squared norm of the elements that each rank has of a value, whatever they are; no operand of anything."""

    of: Held

    def __str__(self) -> str:
        return f"the squared norm of {self.of}"


@define(SQUARED_NORM)
def _squared_norm(typing: Typing, node: fx.Node, held: Held) -> Squared:
    return Squared(held)
