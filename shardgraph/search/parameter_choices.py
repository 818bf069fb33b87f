"""Other choices for some parameters of a plan than for the rest, in the memory that it leaves."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import replace

from torch import nn

from shardgraph.plans.parameter_plan import ParameterPlan, in_patterns, unsharded
from shardgraph.plans.plan import Plan
from shardgraph.plans.shards import named_shapes


def with_kept(plan: Plan, model: nn.Module, room: int) -> Plan | None:
    """``plan`` with parameters kept gathered for backward that it gathers again: those of the last layers, which are
    needed again soonest, as many as take ``room`` bytes. None if these are all or none of them."""
    entries, units = plan.resolve(named_shapes(model)), dict[str, int]()
    sizes = {name: parameter.itemsize for name, parameter in model.named_parameters()}
    for fqn, entry in entries.items():
        if entry.shard_axis is not None and entry.reshard_after_forward:
            units[_unit(fqn)] = units.get(_unit(fqn), 0) + _gathered(entry, plan, model, fqn) * sizes[fqn]
    kept = set[str]()
    for unit, nbytes in reversed(units.items()):
        if nbytes > room:
            break
        room -= nbytes
        kept.add(unit)
    if not kept or len(kept) == len(units):
        return None
    changed = {
        fqn: replace(entry, reshard_after_forward=False)
        if _unit(fqn) in kept and entry.shard_axis is not None
        else entry
        for fqn, entry in entries.items()
    }
    return _with(plan, changed)


def with_vectors_replicated(plan: Plan, model: nn.Module) -> Plan | None:
    """``plan`` with parameters of less than two dimensions whole on every rank, which takes one collective less for
    each bucket of them; None if none of them is sharded."""
    shapes = named_shapes(model)
    entries = plan.resolve(shapes)
    small = {fqn for fqn, entry in entries.items() if entry.shard_axis is not None and len(shapes[fqn]) < 2}
    if not small or len(small) == len(entries):
        return None
    return _with(plan, {fqn: unsharded(entry) if fqn in small else entry for fqn, entry in entries.items()})


def _with(plan: Plan, entries: Mapping[str, ParameterPlan]) -> Plan:
    return replace(plan, parameters=in_patterns(entries))


def _unit(fqn: str) -> str:
    """The layer of a parameter, or its module if it is in none: what is gathered together."""
    layer = re.match(r"(?:.*?\.)?\d+(?=\.)", fqn)
    return layer[0] if layer else fqn.rpartition(".")[0]


def _gathered(entry: ParameterPlan, plan: Plan, model: nn.Module, fqn: str) -> int:
    """Elements that a rank holds more of a parameter that is gathered."""
    assert entry.shard_axis is not None
    ranks = plan.mesh[entry.shard_axis][1]
    return math.ceil(math.prod(entry.local_shape(model.get_parameter(fqn).shape, plan.mesh)) * (1 - 1 / ranks))
