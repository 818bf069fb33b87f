"""Recomputation: which values are not saved for backward but recomputed there."""

from __future__ import annotations

from dataclasses import dataclass

from torch import fx

from shardgraph.errors import PlanError
from shardgraph.ir import Tangent, placeholders
from shardgraph.ir.attributes import CHUNK, MODULES, RECOMPUTE
from shardgraph.passes.analysis.names import names_of
from shardgraph.passes.base import Context, Pass
from shardgraph.passes.partition.split import forward_nodes
from shardgraph.passes.recompute.modes import operations_of
from shardgraph.passes.recompute.names import chosen_by
from shardgraph.passes.recompute.values import computed_once, draws, values_of
from shardgraph.plans.annotations.kinds import recompute, save
from shardgraph.plans.annotations.match import Annotated, matches


@dataclass(frozen=True)
class Recompute(Pass):
    """Takes a joint graph; marks with ``RECOMPUTE`` the nodes that backward recomputes.

    These are the operations that the plan's ``recompute`` names, and those of modules annotated ``recompute()``. As in
    activation checkpointing (Chen et al., 2016, https://arxiv.org/abs/1604.06174) each call of such a module is
    recomputed from its inputs, and its outputs are saved if others need them. The innermost annotation around an
    operation wins, also over the plan; everything under ``save()`` is saved. Random numbers are saved, never drawn
    twice, and so are results computed from buffers that forward writes, whose values differ by the time of backward.
    Operations computed in chunks are marked already.

    Must not change: the computation.

    Raises:
        PlanError: the plan's ``recompute`` is ``"budget"``, or names operations that the model does not have.
    """

    name = "recompute"
    provides = frozenset({"recomputed"})
    excludes = frozenset({"sharded-parameters", "split"})

    def run(self, gm: fx.GraphModule, context: Context) -> None:
        if context.plan.recompute == "budget":
            raise PlanError(
                "recompute='budget' is found before a program is made, by shardgraph.compile with example inputs, by "
                "analyze or by verify: use one of them, or say what is computed again"
            )
        if context.plan.recompute != "none" and any(isinstance(role, Tangent) for role in placeholders(gm)):
            _mark_planned(gm, context)
        annotations = [each for each in context.plan.annotations if isinstance(each[1], (recompute, save))]
        if annotations:
            _mark_annotated(gm, annotations)


def _mark_planned(gm: fx.GraphModule, context: Context) -> None:
    values, rules = values_of(gm), context.plan.recompute
    names = names_of(values.makes)
    chosen = operations_of(rules, gm, values) if isinstance(rules, str) else chosen_by(rules, names)
    chosen = {node for node in chosen if node not in CHUNK}
    for node in sorted(chosen & values.once, key=lambda node: names[node]):
        why = "draws random numbers" if draws(node) else "reads what forward writes"
        context.notes.append(f"{names[node][1]} of {names[node][0]!r} {why}: it is kept, not computed again")
    for node in values.together_with(chosen - values.once):
        RECOMPUTE.set(node, True)
    for node in values.makes:
        # A cast that the plan does not name is treated like its operand.
        if node not in chosen and any(RECOMPUTE.get(operand) for operand in node.all_input_nodes):
            RECOMPUTE.set(node, RECOMPUTE.get(node, False))


def _mark_annotated(gm: fx.GraphModule, annotations: list[Annotated]) -> None:
    once = computed_once(gm)
    regions = {node: _region(node, annotations) for node in forward_nodes(gm)}
    for node in gm.graph.nodes:
        if node.op == "call_function" and node not in CHUNK and (region := regions.get(node)):
            alone = all(regions.get(user, region) == region for user in node.users)
            RECOMPUTE.set(node, region != _SAVED and node not in once and alone)


_SAVED = "save()"


def _region(node: fx.Node, annotations: list[Annotated]) -> str:
    """The module call that is recomputed as one region around ``node``: the outermost one inside the last ``save()``.

    ``_SAVED`` if ``save()`` is the innermost annotation; empty if there is no annotation.
    """
    region = ""
    calls = {"the model": ("", None), **MODULES.get(node, {})}
    for call, (path, _) in calls.items():
        for pattern, annotation in annotations:
            if matches(pattern, path):
                outer = region if region != _SAVED else ""
                region = _SAVED if isinstance(annotation, save) else outer or call
    return region
