"""Gradients that backward hands over as soon as it has them: results in another way."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import fx

from shardgraph.ir import update
from shardgraph.proof.definitions import Typing, define


@dataclass
class Handed:
    """What the updater of a graph is given: gradients by the names of their parameters."""

    gradients: dict[str, Any] = field(default_factory=dict)


@define(update)
def _update(typing: Typing, node: fx.Node, updater: Handed, names: Sequence[str], gradients: Sequence[Any]) -> None:
    updater.gradients.update(zip(names, gradients, strict=True))
