"""Activation offloading: values saved for backward are in host memory between forward and backward."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from shardgraph.errors import PlanError
from shardgraph.ir import Forwarded, Saved, outputs, set_outputs
from shardgraph.ir.attributes import (
    EQUALS,
    GIVEN_BY,
    MADE_BY,
    MEMORY_KIND,
    ON_HOST,
    PLACEMENTS,
    ROW_ORDER,
    SOURCE,
    SUBJECT,
    captured_name,
)
from shardgraph.passes.analysis.names import module_of
from shardgraph.passes.base import Context, Graphs, GraphsPass, of_kind, sibling
from shardgraph.passes.builder import Builder
from shardgraph.passes.offload.kept import Kept, kept_values, window_of
from shardgraph.passes.offload.window import awaited, started, staying
from shardgraph.plans.annotations.kinds import offload
from shardgraph.plans.annotations.match import matches, written

_SMALL = 1 / 100  # of the window: below this, starting a copy costs more than its bytes are worth


@dataclass(frozen=True)
class OffloadActivations(GraphsPass):
    """Takes forward and backward graphs; keeps the saved activations that the plan offloads in host memory in between.

    Must not change: what each node computes, and the order of the others.

    Raises:
        PlanError: the plan or an annotation offloads activations, and there are none.
    """

    name = "offload-activations"
    requires = frozenset({"split", "marked-offloaded"})
    provides = frozenset({"offloaded-activations"})
    excludes = frozenset({"offloaded-activations"})

    def run_on(self, graphs: Graphs, context: Context) -> None:
        plan, backwards = context.plan, of_kind(graphs, "backward")
        if not backwards and plan.offload.activations and torch.is_grad_enabled():
            raise PlanError(
                f"plan {plan.name!r} offloads what is kept for backward, and nothing of the model "
                "requires a gradient: train a parameter, call it under torch.no_grad(), or compile it without offload"
            )
        kept: list[Kept] = []
        for name in backwards:
            forward = graphs[sibling(name, "forward")]
            last = not any(isinstance(role, Forwarded) for role, _ in outputs(forward))
            kept += _offload(forward, graphs[name], context, at_once=last)
        if backwards:
            _check_annotations(context, kept)


def _offload(forward: fx.GraphModule, backward: fx.GraphModule, context: Context, *, at_once: bool) -> list[Kept]:
    """Copies offloaded activations to the host, and back ahead of their first use in backward.

    A copy starts as soon as its value is computed, and is awaited as :mod:`shardgraph.passes.offload.window` decides.
    Small values stay on the device, and so do those that backward uses first if it follows ``at_once``. Returns all
    values that could be moved.
    """
    all_kept = kept_values(forward, backward)
    candidates = [each for each in all_kept if context.plan.offload.activations or each.marked]
    window = window_of(candidates)
    kept = [each for each in candidates if each.nbytes > _SMALL * window]
    by_use = sorted(kept, key=lambda each: each.first)
    stays = set(by_use[: staying([each.nbytes for each in by_use], window)]) if at_once else set()
    if candidates and len(stays) == len(kept):
        context.notes.append("no activations are offloaded: backward begins with all that are kept for it")
    _copy_away(forward, context, kept, stays, window)
    _copy_back(backward, context, by_use, stays, window)
    return all_kept


def _check_annotations(context: Context, kept: Sequence[Kept]) -> None:
    """Check that every ``offload()`` names parameters, or modules with values in ``kept``: all saved for backward."""
    marked: set[str] = set().union(*(each.marked for each in kept))
    for pattern, annotation in context.plan.annotations:
        of_parameters = any(matches(pattern, fqn) for fqn in context.shapes)
        if isinstance(annotation, offload) and pattern not in marked and not of_parameters:
            names = list(dict.fromkeys(repr(module_of(each.value)) for each in kept))
            raise PlanError(
                f"{written((pattern, annotation))} names modules of which nothing is kept for backward that could "
                f"leave the device; it keeps values of {', '.join(names[:4]) or 'none'}{', ...' if names[4:] else ''}"
            )


def _copy_away(
    gm: fx.GraphModule, context: Context, kept: Sequence[Kept], stays: Collection[Kept], window: int
) -> None:
    """Start each copy where its value is computed, await it a window of values later, and save the copy instead.

    ``kept`` is in the order of last use in forward.
    """
    inputs = gm.graph.find_nodes(op="placeholder")
    latest: dict[fx.Node, fx.Node] = {}  # the wait that was last put after a node
    copies: dict[fx.Node, fx.Node] = {}
    until = awaited([each.nbytes for each in kept], [each not in stays for each in kept], window)
    for each, at in zip(kept, until, strict=True):
        if each not in stays:
            value, after = each.value, kept[at].done
            MEMORY_KIND.set(value, "saved")
            wait = _builder(gm, context, latest.get(after, after), value).to_host(value)
            (inputs[-1] if value.op == "placeholder" else value).append(wait.args[0])
            _is_copy_of(value, wait)
            copies[value] = latest[after] = wait
            each.placeholder.meta["val"] = wait.meta["val"]
            ON_HOST.set(each.placeholder, True)
            GIVEN_BY.set(each.placeholder, wait.name)
    set_outputs(gm, [(role, copies.get(node, node) if isinstance(role, Saved) else node) for role, node in outputs(gm)])


def _copy_back(
    gm: fx.GraphModule, context: Context, by_use: Sequence[Kept], stays: Collection[Kept], window: int
) -> None:
    """Start the copy of each value a window ahead of its first use, and await it there.

    ``by_use`` is in the order of first use in backward.
    """
    arrivals = {-1: next(node for node in gm.graph.nodes if node.op != "placeholder")}
    starts = started([each.nbytes for each in by_use], window)
    for i, (each, at) in enumerate(zip(by_use, starts, strict=True)):
        arrivals[i] = each.first
        if each not in stays:
            users = list(each.placeholder.users)
            build = _builder(gm, context, each.first.prev, each.value)
            wait = build.to_device(each.placeholder, each.value.meta["val"].device)
            _is_copy_of(each.value, wait)
            if arrivals[at] is not each.first:
                arrivals[at].prepend(wait.args[0])
            for user in users:
                user.replace_input_with(each.placeholder, wait)
            arrivals[i] = wait


def _builder(gm: fx.GraphModule, context: Context, after: fx.Node, value: fx.Node) -> Builder:
    labels = {
        SUBJECT: ".".join(part for part in (module_of(value), value.name) if part),
        SOURCE: SOURCE.get(value, ""),
        MEMORY_KIND: "saved",
        MADE_BY: "offload-activations",
    }
    return Builder(gm.graph, context.values, labels, after=after)


def _is_copy_of(value: fx.Node, wait: fx.Node) -> None:
    """Record which value the copy must equal, for debugging."""
    equals = EQUALS.get(value) if value.op == "placeholder" else captured_name(value)
    if equals and not PLACEMENTS.get(value) and value not in ROW_ORDER:
        EQUALS.set(wait, equals)
