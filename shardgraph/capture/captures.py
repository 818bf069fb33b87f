"""Calls of a model, and a cache of their captured graphs."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from shardgraph.cache.made_once import Ranks
from shardgraph.capture.capture import Asked, does_alike
from shardgraph.capture.numbers import input_key
from shardgraph.capture.pytrees import flatten
from shardgraph.capture.remembered import remembered
from shardgraph.capture.stacks import Stack
from shardgraph.errors import CaptureError
from shardgraph.ir import JointGraph
from shardgraph.plans.annotations import kinds
from shardgraph.plans.plan import Plan
from shardgraph.torch_api import autocast_state, map_tensors, pytree


@dataclass(frozen=True)
class Call:
    """A call of ``model``, in the mode that it is in.

    ``loss_fn(output, target)`` is part of the call, as for :func:`shardgraph.capture.capture.capture`. With
    ``training`` gradients are computed.
    """

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any] = field(default_factory=dict)
    loss_fn: Callable[..., torch.Tensor] | None = None
    training: bool = True

    def __post_init__(self) -> None:
        flatten((self.args, dict(self.kwargs)))  # so that its types are known

    @property
    def batch(self) -> int:
        """Rows of the first input tensor; 0 without one."""
        return 0 if self._first is None else self._first.shape[0]

    def maybe_uncut(self, parts: int) -> list[list[int]]:
        """Shapes of inputs that may have all rows of a batch, as whole ones and those with rows elsewhere than in their
        first dimension, where this is the call of a microbatch, one of ``parts``; surer ones first."""
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        shapes = [list(leaf.shape) for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()]

        def off(shape: list[int]) -> int:  # a microbatch may have a row more or less than others
            return min((abs(size - self.batch * parts) for size in shape[1:]), default=parts)

        maybe = [shape for shape in shapes if parts > 1 and (off(shape) < parts or shape[0] != self.batch)]
        return sorted(maybe, key=lambda shape: (shape[0] == self.batch, off(shape)))

    @property
    def sequence(self) -> int:
        """Length of the sequences in the first input tensor, if it holds token ids or vectors; else 0."""
        if (first := self._first) is None:
            return 0
        tokens = first.dim() == 2 and not first.is_floating_point()
        return first.shape[1] if tokens or first.dim() == 3 else 0

    def resized(self, batch: int, sequence: int = 0) -> Call:
        """The call with other sizes: inputs with as many rows as the first one get ``batch`` rows, and those with as
        many columns ``sequence`` columns."""
        rows, columns = self.batch, self.sequence

        def resize(tensor: torch.Tensor) -> torch.Tensor:
            shape = list(tensor.shape)
            if shape and shape[0] == rows:
                shape[0] = batch
            if sequence and len(shape) > 1 and shape[1] == columns:
                shape[1] = sequence
            resized = torch.empty(shape, dtype=tensor.dtype, device="meta")
            return resized.requires_grad_(tensor.requires_grad)

        args, kwargs = map_tensors(resize, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    def repeated(self, batch: int) -> Call:
        """The call with ``batch`` rows, which are this one's, over and over."""
        rows = self.batch
        if batch == rows:
            return self

        def repeat(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.dim() or tensor.shape[0] != rows:
                return tensor
            again = tensor.detach()[torch.arange(batch, device=tensor.device) % rows]
            return again.requires_grad_(tensor.requires_grad)

        args, kwargs = map_tensors(repeat, (self.args, dict(self.kwargs)))
        return replace(self, args=args, kwargs=kwargs)

    @property
    def _first(self) -> torch.Tensor | None:
        leaves = pytree.tree_leaves((self.args, dict(self.kwargs)))
        return next((leaf for leaf in leaves if isinstance(leaf, torch.Tensor) and leaf.dim()), None)


class Captures:
    """The joint graphs of calls on ``device``. A call is traced when its graph is first needed, and not again.

    Of ``ranks`` that ask for the same graph, one traces it for all.
    """

    def __init__(self, device: torch.device | None = None, ranks: Ranks | None = None) -> None:
        self._device, self._ranks = device or torch.device("cpu"), ranks
        self._joints: defaultdict[Hashable, list[JointGraph]] = defaultdict(list)
        self._refused = dict[Hashable, CaptureError]()

    def joint(self, call: Call, plan: Plan) -> JointGraph:
        """The graph of ``call`` with the annotations and precision of ``plan``. It must not be modified: passes work on
        a copy.

        Raises:
            PlanError, CaptureError: as :func:`shardgraph.capture.capture.capture`.
        """
        key, leaves = self._key(call, plan), pytree.tree_leaves((call.args, dict(call.kwargs)))
        joints = self._joints[key]
        for joint in joints:
            if all(condition.of(leaves) == condition.value for condition in joint.conditions):
                return joint
        if key in self._refused:
            raise self._refused[key]
        try:
            joints.append(self._traced(call, plan))
        except CaptureError as error:
            if all(leaf.is_meta for leaf in leaves if isinstance(leaf, torch.Tensor)):  # no values make a difference
                self._refused[key] = error
            shapes = [] if plan.pipeline is None else call.maybe_uncut(plan.pipeline.parts)
            if not shapes or not re.search(r"\bsizes?\b|\bshapes?\b", str(error), re.IGNORECASE):
                raise
            raise CaptureError(
                f"{error}\n  it was called with a microbatch, of {call.batch} rows, and with the whole of inputs whose "
                f"first dimension has not the batch's rows, as one of shape {shapes[0]} may be: give that one rows "
                "first (for offsets of an EmbeddingBag give indices as a matrix, with a row for each bag), or train "
                "without a pipeline"
            ) from error
        return joints[-1]

    def _traced(self, call: Call, plan: Plan) -> JointGraph:
        options: Any = {"annotations": plan.annotations, "precision": plan.precision}
        with torch.set_grad_enabled(call.training):
            return remembered(call, self._device, self._ranks, **options)

    def does_alike(self, call: Call, plan: Plan, stack: Stack) -> bool:
        """Whether forward and backward of a call do the same in all layers of a stack but the first."""
        asked = Asked(call.args, dict(call.kwargs), self._device, call.loss_fn, plan.annotations, plan.precision)
        with torch.set_grad_enabled(call.training):
            return does_alike(call.model, stack, asked)

    def take(self, call: Call, plan: Plan) -> JointGraph:
        """:meth:`joint`, removed from this cache: for a caller that keeps the graph."""
        joint = self.joint(call, plan)
        self._joints[self._key(call, plan)].remove(joint)
        return joint

    def _key(self, call: Call, plan: Plan) -> Hashable:
        """All that a captured graph depends on."""
        leaves, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
        modes = tuple((id(module), module.training) for module in call.model.modules())
        trained = tuple(parameter.requires_grad for parameter in call.model.parameters())
        ambient = call.training, autocast_state(self._device.type)
        read = tuple(each for each in plan.annotations if isinstance(each[1], _READ))
        return spec, tuple(map(_kind, leaves)), call.loss_fn, modes, trained, ambient, read, plan.precision


_READ = (kinds.input, kinds.output, kinds.precision)
"""The annotations that change a captured graph; others are for passes."""


def _kind(leaf: Any) -> Hashable:
    try:
        hash(leaf)
    except TypeError:
        return id(leaf)
    return input_key(leaf)
