"""Captured graphs of a model with other numbers of equal layers, all from one trace of four.

A trace takes most of the time of an analysis, and assigning placements along operator axes most of the rest. Both are
done for four layers; graphs with more are made by repeating a layer (:mod:`shardgraph.capture.repeat`), which refuses
layers that are not alike. Such a graph is traced, and its placements are assigned, by itself.
"""

from __future__ import annotations

import fnmatch
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import fx, nn

from shardgraph.capture import stacks
from shardgraph.capture.captures import Call, Captures
from shardgraph.capture.record import UnequalLayersError
from shardgraph.capture.repeat import repeat
from shardgraph.ir import JointGraph, copy_graph
from shardgraph.ir.attributes import (
    AVERAGES,
    CAST_OF,
    EQUALS,
    GIVEN_BY,
    MEAN_OF,
    PART_OF,
    REDUCES,
    REGISTRY,
    SHARD_OF,
    SUBJECT,
)
from shardgraph.passes.placing import Placed, placed, placement_key, placing_passes
from shardgraph.plans.plan import Plan
from shardgraph.plans.shards import named_shapes
from shardgraph.report.folding import Stack, shortened

TRACED = 4
"""Layers of the model that is traced: the first, two alike, which say what a layer in between reads, and the last. The
first one also brings to their placements what all layers read."""


class Depths:
    """Copies of ``model`` with some of the layers of ``stack``, and the graphs of calls of them."""

    def __init__(self, model: nn.Module, stack: Stack) -> None:
        self._model, self.stack = model, stack
        self._models: dict[int, nn.Module] = {}
        self._captures: dict[int, Captures] = {}

    def model(self, layers: int) -> nn.Module:
        """A copy of the model with the same tensors and so many layers."""
        if layers not in self._models:
            self._models[layers] = shortened(self._model, self.stack, layers)
        return self._models[layers]

    def captures(self, layers: int) -> Captures:
        """The graphs of calls of :meth:`model`."""
        if layers not in self._captures:
            self._captures[layers] = _Kept() if layers <= TRACED else _Repeated(self, layers)
        return self._captures[layers]

    def repeats(self, call: Call, plan: Plan, layers: int) -> bool:
        """Whether the graph of a call with so many layers is the traced one in which equal layers are repeated."""
        joint = self.captures(layers).joint(replace(call, model=self.model(layers)), plan)
        return _is_repeated(joint)

    def more(self, layers: int) -> stacks.Stack:
        """The stack with ``layers`` layers, of which the traced model has four."""
        return stacks.Stack(self.stack.path, layers, head=1, repeats=layers - TRACED)


class _Kept(Captures):
    """Graphs that programs of all plans and depths are made of, so that none is taken out of the cache."""

    def take(self, call: Call, plan: Plan) -> JointGraph:
        return self.joint(call, plan)


class _Repeated(_Kept):
    """Graphs with ``layers`` layers from those of the traced model."""

    def __init__(self, depths: Depths, layers: int) -> None:
        super().__init__()
        self._depths, self._layers = depths, layers
        self._made: dict[int, JointGraph] = {}
        self._traced: list[JointGraph] = []  # kept alive, since their ids are keys

    def joint(self, call: Call, plan: Plan) -> JointGraph:
        few = self._depths.model(TRACED)
        traced = self._depths.captures(TRACED).joint(replace(call, model=few), plan)
        if id(traced) not in self._made:
            self._traced.append(traced)
            self._made[id(traced)] = self._repeated(traced) or super().joint(call, plan)
        joint = self._made[id(traced)]
        if placing_passes(plan) and _is_repeated(joint):
            self._take_placements(traced, joint, plan)
        return joint

    def _repeated(self, traced: JointGraph) -> JointGraph | None:
        if traced.attributes or traced.results or traced.replaced or traced.shortened:
            return None  # what forward leaves behind may be of any layer
        stored = {name: parameter.dtype for name, parameter in self._depths.model(self._layers).named_parameters()}
        with suppress(UnequalLayersError):
            module = repeat(traced.module, self._depths.more(self._layers))
            # For analysis alone: such a graph is not run, so it has no guards.
            return replace(traced, module=module, stored=stored, guards=None, origin=None, placed={})
        return None

    def _take_placements(self, traced: JointGraph, joint: JointGraph, plan: Plan) -> None:
        """Give the graph the traced one's placements under a plan, if the layers that it repeats have equal ones."""
        few, more = (named_shapes(self._depths.model(layers)) for layers in (TRACED, self._layers))
        key = placement_key(plan, plan.resolve(more))
        if key in joint.placed:
            return
        # How parameters of further layers are stored over data ranks is nothing to their placements.
        known = tuple(rule for rule in plan.parameters if fnmatch.filter(few, rule[0]))
        plan = replace(plan, parameters=known)
        placed(traced, plan, few)
        found = traced.placed[placement_key(plan, plan.resolve(few))]
        stack = self._depths.more(self._layers)
        with suppress(UnequalLayersError):
            module, context = repeat(_without_names(found.module), stack), found.context
            records = {name: _of_more(getattr(context, name), more, stack) for name in ("parameters", "shapes", "sums")}
            joint.placed[key] = Placed(module, replace(context.copy(), stored=joint.stored, **records), found.axes)


def _is_repeated(joint: JointGraph) -> bool:
    return joint.guards is None


_NAMES = (EQUALS, PART_OF, SHARD_OF, GIVEN_BY, MEAN_OF, CAST_OF, REDUCES, AVERAGES)
"""Attributes that name nodes or parameters, which comparisons of values need, and prices do not."""


def _without_names(gm: fx.GraphModule) -> fx.GraphModule:
    """A copy in which nodes of equal layers have equal attributes, but for the numbers of the layers."""
    copied = copy_graph(gm)
    for node in copied.graph.nodes:
        node.meta = {key: value for key, value in node.meta.items() if REGISTRY[key] not in _NAMES}
        if node in SUBJECT:  # "add_3 of model.layers.0"
            SUBJECT.set(node, SUBJECT.of(node).split(" ")[-1])
    return copied


def _of_more(records: Mapping[str, Any], names: Mapping[str, torch.Size], stack: stacks.Stack) -> dict[str, Any]:
    """Records of parameters by name, for the parameters of the model with more layers."""
    found = {}
    for name in names:
        few = name
        if (place := stacks.layer_of(name, [stack])) is not None:
            _, number, rest = place
            few = f"{stack.prefix}{_traced_for(number, stack)}.{rest}"
        if few in records:
            found[name] = records[few]
    return found


def _traced_for(number: int, stack: stacks.Stack) -> int:
    """The layer of the traced model that stands for one of the model with more."""
    return next(few for few in range(stack.few) if number in stack.stands_for(few))
