"""A candidate plan and its predicted cost."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any

from shardgraph.mesh import Mesh


@dataclass(frozen=True)
class Candidate:
    """A candidate of ``"auto"``: predicted peak ``memory`` of a rank in bytes and ``seconds`` of a step.

    ``fits``: whether the memory is within the device's, or the budget. ``batches``: number of batches per step, over
    all data ranks and their microbatches, with ``samples`` samples together. Of the seconds, ``compute`` are those of
    the busiest rank's computation, ``exposed`` those of communication that it does not hide, ``bubble`` those in which
    a rank of a pipeline is idle; of the computation, in ``calls`` the device waits for Python to call its operations,
    if there is no pipeline and it is known what that takes, and in ``again`` backward recomputes. ``over`` are the
    exposed seconds by what they are spent on: a mesh axis and where its ranks are, or a direction of copies.
    ``recompute`` is what backward recomputes. ``plan`` is the candidate as a :class:`shardgraph.Plan`, for the best of
    them.
    """

    name: str
    mesh: Mesh
    memory: int
    seconds: float
    fits: bool
    batches: int = 1
    samples: int = 0
    compute: float = 0.0
    exposed: float = 0.0
    bubble: float = 0.0
    calls: float = 0.0
    again: float = 0.0
    over: tuple[tuple[str, float], ...] = ()
    recompute: str = "none"
    plan: Any = field(default=None, repr=False)

    @property
    def devices(self) -> int:
        """Number of ranks."""
        return math.prod(size for _, size in self.mesh)

    @property
    def microbatches(self) -> int:
        """Batches of a data rank in a step; the names of axes say which ranks share a batch."""
        return self.batches // max(1, math.prod(size for axis, size in self.mesh if axis not in ("pp", "tp", "cp")))

    @property
    def reduces_once(self) -> bool:
        """Whether the gradients of several calls are added up before they are reduced, as its plan says, if it has
        one."""
        return self.plan is not None and self.plan.reduces_once

    @property
    def per_sample(self) -> float:
        """Seconds per sample, by which candidates are compared; per batch if samples are not known."""
        return self.seconds / (self.samples or self.batches)
