"""The squared norms of gradients, over all ranks: what is needed to estimate the variance of a gradient."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from shardgraph import torch_api
from shardgraph.plans.parameter_plan import REPLICATE, ParameterPlan
from shardgraph.plans.plan import Plan


@dataclass(frozen=True, eq=False)
class Measured:
    """Squared norms of the gradient of one parameter, the same on every rank.

    ``parts`` is the sum of those of all data-parallel ranks' own gradients in each of ``backwards`` backward passes,
    ``mean`` that of the reduced gradient: of the sum over these passes of the mean over ranks.
    """

    parts: torch.Tensor
    mean: torch.Tensor
    backwards: int


class GradientStatistics:
    """What has been measured of gradients since they were last cleared, by parameter.

    ``own`` are the squared norms of this rank's gradients that are not reduced yet, one for each backward pass;
    ``measured`` has an entry for each reduction.
    """

    def __init__(self) -> None:
        self.own: dict[str, list[torch.Tensor]] = {}
        self.measured: dict[str, list[Measured]] = {}

    def add(self, own: Mapping[str, torch.Tensor]) -> None:
        """Note this rank's squared norms in a backward pass."""
        for fqn, value in own.items():
            self.own.setdefault(fqn, []).append(value)

    def reduce(
        self, reduced: Mapping[str, torch.Tensor], entries: Mapping[str, ParameterPlan], plan: Plan, mesh: DeviceMesh
    ) -> None:
        """Add up what ranks have of the squared norms, of their own gradients and of the ``reduced`` ones: one
        all-reduce of two numbers for each parameter.

        All ranks of the mesh must call it, with the same parameters in the same order.
        """
        if not reduced:
            return
        own = {fqn: self.own.pop(fqn, [torch.zeros_like(value)]) for fqn, value in reduced.items()}
        self.own.clear()  # of parameters that no rank's loss reaches
        squares = torch.stack([*(functools.reduce(torch.add, each) for each in own.values()), *reduced.values()])
        copies = [_copies(entries[fqn], plan, among) for among in (plan.operators, plan.mesh) for fqn in reduced]
        squares /= squares.new_tensor(copies)
        dist.all_reduce(squares, group=torch_api.group_along(mesh, plan.axes))
        parts, means = squares.chunk(2)
        for fqn, part, mean in zip(reduced, parts.unbind(), means.unbind(), strict=True):
            self.measured.setdefault(fqn, []).append(Measured(part, mean, len(own[fqn])))


def _copies(entry: ParameterPlan, plan: Plan, among: tuple[tuple[str, int | str], ...]) -> int:
    """On how many ranks along the axes ``among`` each element is."""
    axes = dict(among)
    placed = zip(plan.mesh, entry.placements, strict=True)
    return math.prod(size for (axis, size), placement in placed if axis in axes and placement == REPLICATE)
