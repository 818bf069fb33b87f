"""Recomputation by module: what is not kept from forward but computed again in backward."""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import fx

from shardgraph.annotations.kinds import recompute, save
from shardgraph.annotations.match import Annotated, matches
from shardgraph.ir import Mutation, local_part, outputs, placeholders
from shardgraph.passes.base import Context
from shardgraph.passes.rewrite.split import forward_nodes


@dataclass(frozen=True)
class Recompute:
    """Takes a joint graph; marks with ``meta["again"]`` what modules annotated ``recompute()`` compute.

    As in activation checkpointing (Chen et al., 2016, https://arxiv.org/abs/1604.06174) each call of such a module is
    computed again from its inputs, and what it gives to others is kept if they need it. Of annotations around an
    operation the innermost counts; what is under ``save()`` is kept. Random numbers are kept, never drawn twice, and
    so is what is computed from buffers that forward writes: by backward they have other values.

    Must not change: the computation.
    """

    name: ClassVar[str] = "recompute"
    requires: ClassVar[frozenset[str]] = frozenset()
    provides: ClassVar[frozenset[str]] = frozenset({"recomputed"})
    excludes: ClassVar[frozenset[str]] = frozenset({"sharded-parameters", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        said = [each for each in context.plan.annotations if isinstance(each[1], (recompute, save))]
        if not said:
            return
        inside = forward_nodes(gm)
        regions = {node: _region(node, said) for node in gm.graph.nodes if node in inside}
        once = computed_once(gm)
        for node in gm.graph.nodes:
            if node.op == "call_function" and node in inside and (region := regions[node]):
                alone = all(regions.get(user, region) == region for user in node.users)
                node.meta["again"] = region != _SAVED and node not in once and alone


def computed_once(gm: fx.GraphModule) -> set[fx.Node]:
    """What backward cannot compute a second time: random numbers, and what reads buffers that forward writes."""
    inside = forward_nodes(gm)
    written = {placeholders(gm)[role.of] for role, _ in outputs(gm) if isinstance(role, Mutation)}
    once: set[fx.Node] = set()
    for node in gm.graph.nodes:
        if node.op != "call_function" or node not in inside:
            continue
        if getattr(node.target, "is_view", False) and node.args[0] in written:
            written.add(node)
        elif _draws(node, once) or not written.isdisjoint(node.all_input_nodes):
            once.add(node)
    return once


_SAVED = "save()"


def _region(node: fx.Node, said: list[Annotated]) -> str:
    """Which call of a module is computed again with ``node`` in it: the outermost inside of the last ``save()``.

    ``_SAVED`` where that is the innermost; empty where nothing is said.
    """
    region = ""
    stack = node.meta.get("nn_module_stack") or {}
    for call, path in [("the model", ""), *((call, path) for call, (path, _) in stack.items())]:
        for pattern, annotation in said:
            if matches(pattern, path):
                outer = region if region != _SAVED else ""
                region = _SAVED if isinstance(annotation, save) else outer or call
    return region


def _draws(node: fx.Node, once: set[fx.Node]) -> bool:
    """Whether the value is random numbers, or a piece of what is computed only once."""
    if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()):
        return True
    return node.target in (operator.getitem, local_part) and node.args[0] in once
