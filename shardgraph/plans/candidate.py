"""A plan that was priced, and what it was predicted to cost."""

from __future__ import annotations

from dataclasses import dataclass

from shardgraph.mesh import Mesh


@dataclass(frozen=True)
class Candidate:
    """A plan that ``"auto"`` priced: predicted peak ``memory`` of a rank in bytes and ``seconds`` of a step.

    ``fits`` says whether the memory is within what the device has, or the budget; ``batches`` how many batches a step
    has, one of the given inputs each.
    """

    name: str
    mesh: Mesh
    memory: int
    seconds: float
    fits: bool
    batches: int = 1
