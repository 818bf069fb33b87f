"""A candidate plan and its predicted cost."""

from __future__ import annotations

from dataclasses import dataclass

from shardgraph.mesh import Mesh


@dataclass(frozen=True)
class Candidate:
    """A candidate of ``"auto"``: predicted peak ``memory`` of a rank in bytes and ``seconds`` of a step.

    ``fits``: whether the memory is within the device's, or the budget. ``batches``: number of batches per step, each
    of the given inputs.
    """

    name: str
    mesh: Mesh
    memory: int
    seconds: float
    fits: bool
    batches: int = 1
