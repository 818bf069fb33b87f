"""Captured graphs of a model with other numbers of equal layers, or of units of them, all from one trace of two.

A trace takes most of the time of an analysis, and assigning placements along operator axes most of the rest. Two layers
are traced, and placements are assigned for four; graphs with more are made by repeating a layer
(:mod:`shardgraph.capture.repeat`), which refuses layers that are not alike. Such a graph is traced, and its placements
are assigned, by itself.
"""

from __future__ import annotations

import copy
import fnmatch
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import fx, nn

from shardgraph.capture.captures import Call, Captures
from shardgraph.capture.repeat import repeat, repeat_joint
from shardgraph.capture.stacks import Stack, UnequalLayersError, layer_of
from shardgraph.errors import CaptureError
from shardgraph.ir import JointGraph, copy_graph
from shardgraph.ir.attributes import (
    AVERAGES,
    CAST_OF,
    EQUALS,
    GIVEN_BY,
    MEAN_OF,
    PADDED,
    PADDED_SHARD,
    PART_OF,
    REDUCES,
    REGISTRY,
    SHARD_OF,
    SUBJECT,
)
from shardgraph.passes.placing import Placed, placed, placement_key, placing_passes
from shardgraph.plans.plan import Plan
from shardgraph.plans.shards import named_shapes
from shardgraph.report.folding import shortened, unlike

_TRACED = 2
"""Layers of the model that is traced, which say what a layer in between reads, if a record of forward, which takes a
small part of the time, says that all layers do alike."""

PLACED = 4
"""Units of the model whose placements are assigned: the first, which also brings to their placements what all layers
read, two alike, and the last."""


Units = tuple[int, ...]
"""Numbers of units, stack by stack."""


class Depths:
    """Copies of ``model`` with some of the units of ``stack``, and the graphs of calls of them.

    Such a copy has all units of the ``others``, further stacks of the model; :meth:`within` has copies with some. With
    ``counted`` its configuration has their numbers.
    """

    def __init__(self, model: nn.Module, stack: Stack, others: Sequence[Stack] = (), counted: bool = False) -> None:
        self._copies, self._given = _Copies(model, (stack, *others), counted), Units()

    @property
    def stack(self) -> Stack:
        """The stack."""
        return self._copies.stacks[len(self._given)]

    @property
    def others(self) -> Sequence[Stack]:
        """The further stacks."""
        return self._copies.stacks[len(self._given) + 1 :]

    def within(self, units: int) -> Depths | None:
        """Copies of the copy with so many units, with some of those of the next stack; None if there is no other."""
        if not self.others:
            return None
        inner = copy.copy(self)
        inner._given = (*self._given, units)
        return inner

    def model(self, units: int) -> nn.Module:
        """A copy of the model with the same tensors and so many units."""
        return self._copies.model(self._all(units))

    def captures(self, units: int) -> Captures:
        """The graphs of calls of :meth:`model`."""
        return self._copies.captures(self._all(units))

    def repeats(self, call: Call, plan: Plan, units: int) -> bool:
        """Whether the graph of a call with so many units is one of fewer in which equal ones are repeated."""
        joint = self.captures(units).joint(replace(call, model=self.model(units)), plan)
        return _is_repeated(joint)

    def _all(self, units: int) -> Units:
        return (*self._given, units, *(other.units for other in self.others))


class _Copies:
    """Copies of ``model`` with some of the units of each of ``stacks``, and the graphs of calls of them."""

    def __init__(self, model: nn.Module, stacks: Sequence[Stack], counted: bool) -> None:
        self.stacks, self._counted = stacks, counted
        self._model, self._models, self._captures = model, dict[Units, nn.Module](), dict[Units, Captures]()

    def model(self, units: Units) -> nn.Module:
        """A copy of the model with the same tensors and so many units of each stack."""
        if units not in self._models:
            few = zip(self.stacks, units, strict=True)
            self._models[units] = shortened(self._model, *few, counted=self._counted)
        return self._models[units]

    def captures(self, units: Units) -> Captures:
        """The graphs of calls of :meth:`model`."""
        if units not in self._captures:
            repeated = self._repeated_for(units)
            self._captures[units] = _Kept() if repeated is None else _Repeated(self, units, *repeated)
        return self._captures[units]

    def _repeated_for(self, units: Units) -> tuple[int, Stack] | None:
        """The position of a stack with the stack, some of whose units are repeated to get so many; None if all are
        traced.

        The first unit may do something else than the others, which the graph of two layers tells.
        """
        few = [replace(stack, layers=stack.up_to(number)) for stack, number in zip(self.stacks, units, strict=True)]
        for position, (stack, number) in enumerate(zip(few, units, strict=True)):
            if number > PLACED:
                return position, replace(stack, head=stack.up_to(1), repeats=number - PLACED)
        for position, (stack, number) in enumerate(zip(few, units, strict=True)):
            if number > _TRACED and (stack.head, stack.period) == (0, 1) and not self._unlike[position]:
                return position, replace(stack, repeats=number - _TRACED)
        return None

    @cached_property
    def _unlike(self) -> list[str]:
        return [unlike(self._model, stack) for stack in self.stacks]


class _Kept(Captures):
    """Graphs that programs of all plans and depths are made of, so that none is taken out of the cache."""

    def take(self, call: Call, plan: Plan) -> JointGraph:
        return self.joint(call, plan)


class _Repeated(_Kept):
    """Graphs with all ``units`` of the stacks of a model from those with few of one of them, if these are alike."""

    def __init__(self, copies: _Copies, units: Units, position: int, stack: Stack) -> None:
        super().__init__()
        self._copies, self._stack, self._units = copies, stack, units
        self._few = (*units[:position], units[position] - stack.repeats, *units[position + 1 :])
        self._of_placed = self._few[position] == PLACED

    def joint(self, call: Call, plan: Plan) -> JointGraph:
        joint = super().joint(call, plan)
        if self._of_placed and placing_passes(plan, repeated_heads=False) and _is_repeated(joint):
            self._take_placements(self._with_few(call, plan), joint, plan)
        return joint

    def _traced(self, call: Call, plan: Plan) -> JointGraph:
        made = None
        if self._of_placed:
            made = self._repeated(self._with_few(call, plan))
        elif self.does_alike(call, plan, self._stack):
            with suppress(CaptureError):  # a model of two layers may not run
                made = self._repeated(self._with_few(call, plan))
        return made or super()._traced(call, plan)

    def _with_few(self, call: Call, plan: Plan) -> JointGraph:
        model = self._copies.model(self._few)
        return self._copies.captures(self._few).joint(replace(call, model=model), plan)

    def _repeated(self, few: JointGraph) -> JointGraph | None:
        if few.replaced or few.shortened:
            return None  # of any layer
        model = self._copies.model(self._units)
        stored = {name: parameter.dtype for name, parameter in model.named_parameters()}
        with suppress(UnequalLayersError):
            # For analysis alone: such a graph is not run, so it has no guards.
            return replace(repeat_joint(few, self._stack), stored=stored, guards=None, origin=None, placed={})
        return None

    def _take_placements(self, few: JointGraph, joint: JointGraph, plan: Plan) -> None:
        """Give the graph the placements under a plan of that with few layers, if those that are repeated have equal
        ones."""
        shapes, more = (named_shapes(self._copies.model(each)) for each in (self._few, self._units))
        key = placement_key(plan, plan.resolve(more))
        if key in joint.placed:
            return
        # How parameters of further layers are stored over data ranks is nothing to their placements.
        known = tuple(rule for rule in plan.parameters if fnmatch.filter(shapes, rule[0]))
        plan = replace(plan, parameters=known)
        placed(few, plan, shapes)
        found = few.placed[placement_key(plan, plan.resolve(shapes))]
        with suppress(UnequalLayersError):
            module, context = repeat(_without_names(found.module), self._stack), found.context
            names = "parameters", "shapes", "sums"
            records = {name: _of_more(getattr(context, name), more, self._stack) for name in names}
            joint.placed[key] = Placed(module, replace(context.copy(), stored=joint.stored, **records), found.axes)


def _is_repeated(joint: JointGraph) -> bool:
    return joint.guards is None


_NAMES = (EQUALS, PART_OF, SHARD_OF, PADDED, PADDED_SHARD, GIVEN_BY, MEAN_OF, CAST_OF, REDUCES, AVERAGES)
"""Attributes that name nodes or parameters, which comparisons of values need, and prices do not."""


def _without_names(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy in which nodes of equal layers have equal attributes, but for the numbers of the layers."""
    copied = copy_graph(gm)
    for node in copied.graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if REGISTRY[key] not in _NAMES}
        if node in SUBJECT:  # "add_3 of model.layers.0"
            SUBJECT.set(node, SUBJECT.of(node).split(" ")[-1])
    return copied


def _of_more(records: Mapping[str, Any], names: Mapping[str, torch.Size], stack: Stack) -> dict[str, Any]:
    """Records of parameters by name, for the parameters of the model with more layers."""
    found = {}
    for name in names:
        few = name
        if (place := layer_of(name, [stack])) is not None:
            _, number, rest = place
            few = f"{stack.prefix}{_traced_for(number, stack)}.{rest}"
        if few in records:
            found[name] = records[few]
    return found


def _traced_for(number: int, stack: Stack) -> int:
    """The layer of the traced model that stands for one of the model with more."""
    return next(few for few in range(stack.few) if number in stack.stands_for(few))
