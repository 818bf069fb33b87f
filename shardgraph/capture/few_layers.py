"""Capture of a model with many equal layers, from a trace of few of them.

It is the graph that tracing the whole model gives, and that is checked rather than assumed:

* The forward of the whole model runs, on fake tensors, and so does that of the model with few layers: operation for
  operation they must be the same, but for the repetitions of what each layer does (:mod:`.record`).
* What tracing reads of a layer, by the tracer's own guards, must be equal in the layers that it stands for.
* In the joint graph, the nodes of two units of layers must be alike, and one must follow on the other
  (:mod:`.repeat`).

Where any of that does not hold, the whole model is traced.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from functools import partial
from typing import Any

from torch import nn

from shardgraph import ir
from shardgraph.capture.record import Record, check_same, repeated_layers
from shardgraph.capture.repeat import repeat_joint
from shardgraph.capture.returned import orders
from shardgraph.capture.side_effects import same_constants
from shardgraph.capture.stacks import Stack, UnequalLayersError, layer_of, stacks_of, with_few_layers
from shardgraph.errors import ShardGraphError


def from_few_layers(
    model: nn.Module,
    traced: Callable[[nn.Module], tuple[ir.JointGraph, Callable[..., str]]],
    recorded: Callable[[nn.Module, Sequence[Stack]], Record],
) -> ir.JointGraph | None:
    """The joint graph of ``model`` from that of fewer of its layers; None if it has not enough equal ones.

    ``traced(model)`` is the joint graph of a model, and what tells which layers were not read alike
    (:class:`shardgraph.torch_api.Trace`). ``recorded(model, stacks)`` is the record of the same call.
    """
    try:
        if stacks := stacks_of(model):
            return _from_few_layers(model, stacks, traced, recorded)
    except (UnequalLayersError, ShardGraphError):  # whatever it is, tracing the whole model tells it
        pass
    return None


def _from_few_layers(
    model: nn.Module,
    stacks: Sequence[Stack],
    traced: Callable[[nn.Module], tuple[ir.JointGraph, Callable[..., str]]],
    recorded: Callable[[nn.Module, Sequence[Stack]], Record],
) -> ir.JointGraph | None:
    whole = recorded(model, stacks)
    if alike := {position for position in range(len(stacks)) if whole.alike(position)}:
        with suppress(UnequalLayersError, ShardGraphError):  # a model of two layers may not run
            return _repeated(model, whole, alike, traced, recorded)
    return _repeated(model, whole, set(), traced, recorded)


def _repeated(
    model: nn.Module,
    whole: Record,
    alike: Set[int],
    traced: Callable[[nn.Module], tuple[ir.JointGraph, Callable[..., str]]],
    recorded: Callable[[nn.Module, Sequence[Stack]], Record],
) -> ir.JointGraph | None:
    """The graph from few layers of each stack, from two of those whose layers are all ``alike``."""
    kinds: dict[Any, int] = {}
    repeated, heads = repeated_layers(whole, kinds, alike)
    if not repeated:
        return None
    few = with_few_layers(model, repeated)
    by_path = {stack.path: stack for stack in repeated}
    remaining = [replace(each, layers=by_path.get(each.path, each).few) for each in whole.stacks]
    try:
        of_few = recorded(few, remaining)
    except UnequalLayersError:  # it may take the number of layers from its configuration
        few = with_few_layers(model, repeated, counted=True)
        of_few = recorded(few, remaining)
    check_same(whole, of_few, repeated, heads, kinds)
    joint, unequal = traced(few)
    if joint.replaced or joint.shortened:
        raise UnequalLayersError("forward replaces buffers, or writes parameters")
    results = [(each.path, each.keys) for each in joint.results]
    constants = {place: value for place, value in whole.left.items() if place not in results}
    inside = [each for each in (*joint.attributes, *joint.results) if layer_of(each.path, repeated)]
    if inside or not same_constants(joint.attributes, constants):
        raise UnequalLayersError("forward sets attributes of layers, or others with few layers")
    returned = orders(_with_kept(whole, results), _with_kept(of_few, results), repeated)
    numbers = [(stack.path, {few: stack.stands_for(few) for few in range(stack.few)}) for stack in repeated]
    if difference := unequal(model, numbers):
        raise UnequalLayersError(difference)
    if (joint.out_spec.child(0) if results else joint.out_spec) != of_few.out_spec:
        raise UnequalLayersError("the output is put together in another way than that of the call that was recorded")
    assert joint.guards is not None
    origin = joint.origin and replace(joint.origin, guards=partial(joint.origin.guards, repeated=numbers))
    spec = whole.out_spec
    if results:
        spec = type(spec)(joint.out_spec.type, joint.out_spec.context, [spec, joint.out_spec.child(1)])
    for stack, order in zip(repeated, returned, strict=True):
        joint = repeat_joint(joint, stack, order)
    return replace(joint, out_spec=spec, guards=partial(joint.guards, repeated=numbers), origin=origin)


def _with_kept(recorded: Record, results: Sequence[tuple[str, tuple[str, ...]]]) -> Record:
    """A record in which tensors that forward sets attributes to, outside of layers, are returned last."""
    kept = [value for place in results if (value := recorded.kept.get(place)) is not None and value.stack < 0]
    if len(kept) < len(results):
        raise UnequalLayersError("forward sets attributes to what layers compute")
    return replace(recorded, returned=[*recorded.returned, *kept])
