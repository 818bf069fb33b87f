"""The source of an analysis: a model, a call of it, a plan and a cluster; it can be resized and analysed again."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from shardgraph.capture.capture import capture
from shardgraph.cost_models.cluster import Cluster
from shardgraph.ir import JointGraph
from shardgraph.passes.lowering import lower
from shardgraph.passes.program import Program
from shardgraph.plans.plan import ParameterPlan, Plan
from shardgraph.plans.shards import named_shapes
from shardgraph.report.folding import Stack, find_stack, treats_alike


@dataclass(frozen=True)
class Source:
    """The arguments of an analysis; see :func:`shardgraph.analyze` for its fields."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    plan: Plan
    cluster: Cluster
    loss_fn: Callable[..., torch.Tensor] | None = None
    optimizer: str = "adamw"
    training: bool = True
    fused: bool = False
    fold: bool = True

    def joint(self) -> JointGraph:
        """The captured call.

        Raises:
            CaptureError: the model cannot be traced into one graph.
        """
        with torch.set_grad_enabled(self.training):
            return capture(
                self.model,
                self.args,
                dict(self.kwargs),
                device=torch.device("cpu"),
                loss_fn=self.loss_fn,
                annotations=self.plan.annotations,
                precision=self.plan.precision,
            )

    def program(self) -> Program:
        """The captured call under the plan."""
        return lower(self.joint(), self.plan, named_shapes(self.model))

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """The unsharded shapes of the model's parameters by name."""
        return named_shapes(self.model)

    @cached_property
    def parameters(self) -> dict[str, ParameterPlan]:
        """The plan of each parameter by name.

        Raises:
            PlanError: the plan does not fit the model.
        """
        return self.plan.resolve(self.shapes)

    @cached_property
    def stack(self) -> Stack | None:
        """The stack of equal layers of which only a few need to be analysed; None without one that the plan treats
        uniformly."""
        stack = find_stack(self.model) if self.fold else None
        return stack if stack is not None and treats_alike(self.plan, self.model, stack) else None

    # -- sizes of the call -------------------------------------------------------------------------

    @property
    def batch(self) -> int:
        """Rows of the first input tensor; 0 without one."""
        return next((tensor.shape[0] for tensor in self._tensors() if tensor.dim()), 0)

    @property
    def sequence(self) -> int:
        """Length of the sequences in the first input tensor, if it holds token ids or vectors; else 0."""
        first = next((tensor for tensor in self._tensors() if tensor.dim()), None)
        if first is None:
            return 0
        tokens = first.dim() == 2 and not first.is_floating_point()
        return first.shape[1] if tokens or first.dim() == 3 else 0

    def resized(self, batch: int, sequence: int = 0) -> Source:
        """The same source with a call of other sizes: inputs with as many rows as the first one get ``batch`` rows,
        and those with as many columns ``sequence`` columns."""
        now = (self.batch, self.sequence)

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            shape = list(tensor.shape)
            if shape and shape[0] == now[0]:
                shape[0] = batch
            if sequence and len(shape) > 1 and shape[1] == now[1]:
                shape[1] = sequence
            resized = torch.empty(shape, dtype=tensor.dtype, device="meta")
            return resized.requires_grad_(tensor.requires_grad)

        args, kwargs = pytree.tree_map_only(torch.Tensor, resize, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    def _tensors(self) -> Iterator[torch.Tensor]:
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return (leaf for leaf in leaves if isinstance(leaf, torch.Tensor))
