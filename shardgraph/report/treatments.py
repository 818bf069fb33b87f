"""What a plan does with each of a model's equal layers."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Hashable, Iterator, Sequence
from dataclasses import replace

from torch import nn

from shardgraph.capture.stacks import Stack, layer_of
from shardgraph.plans.annotations.kinds import Annotation, recompute, save
from shardgraph.plans.annotations.match import Annotated, matches
from shardgraph.plans.plan import Plan

_OF_A_LAYER = (recompute, save)
"""Annotations that change nothing in other layers than their own."""

Treatment = tuple[tuple[str, Annotation], ...]
"""Annotations of a layer that others of its kind do not have, each with the name of its module within the layer."""


def treats_alike(plan: Plan, model: nn.Module, stack: Stack) -> bool:
    """Whether ``plan`` treats all layers of a kind of a stack of ``model`` equally."""
    rules = plan.recompute if not isinstance(plan.recompute, str) else ()
    constraints: tuple[tuple[str, object], ...] = (*plan.annotations, *rules)
    patterns = [pattern for pattern, _ in plan.parameters if pattern != "*"]
    if patterns and plan.activations is not None:
        return False  # its rules may name operations of layers that a copy with fewer does not have
    layers: list[set[Hashable]] = [set() for _ in range(stack.layers)]
    for number, rest, name in _inside(model, stack) if constraints or patterns else ():
        layers[number] |= {(rest, *each) for each in constraints if matches(each[0], name)}
        layers[number] |= {(rest, pattern) for pattern in patterns if fnmatch.fnmatch(name, pattern)}
    return _alike(layers, stack)


def treatments(plan: Plan, model: nn.Module, stack: Stack) -> list[Treatment] | None:
    """The treatment of each layer of a stack of ``model``, where nothing but annotations of recomputation tells equal
    ones apart; else None."""
    names = list(_inside(model, stack))
    found: list[list[tuple[str, Annotation]]] = [[] for _ in range(stack.layers)]
    for pattern, annotation in _own(plan.annotations, model, stack):
        if not isinstance(annotation, _OF_A_LAYER):
            return None
        for number, rest, name in names:
            if matches(pattern, name):
                found[number].append((rest, annotation))
    return [tuple(each) for each in found] if treats_alike(replace(plan, annotations=()), model, stack) else None


def annotated(plan: Plan, model: nn.Module, stack: Stack, layers: Sequence[Treatment]) -> tuple[Annotated, ...]:
    """The annotations of ``plan`` for a copy of ``model`` whose stack has ``layers`` that are treated so."""
    own = _own(plan.annotations, model, stack)
    shared = [each for each in plan.annotations if each not in own]
    path = glob.escape(stack.prefix)
    of_layers = [
        (f"{path}{number}{'.' if rest else ''}{glob.escape(rest)}", annotation)
        for number, treatment in enumerate(layers)
        for rest, annotation in treatment
    ]
    return (*shared, *of_layers)


def _own(annotations: Sequence[Annotated], model: nn.Module, stack: Stack) -> list[Annotated]:
    """The annotations that tell equal layers apart."""
    names = list(_inside(model, stack)) if annotations else []
    own = []
    for pattern, annotation in annotations:
        layers: list[set[Hashable]] = [set() for _ in range(stack.layers)]
        for number, rest, name in names:
            if matches(pattern, name):
                layers[number].add(rest)
        if not _alike(layers, stack):
            own.append((pattern, annotation))
    return own


def _inside(model: nn.Module, stack: Stack) -> Iterator[tuple[int, str, str]]:
    """The layer, the name in it and the whole name of each parameter and module in a stack of ``model``."""
    for name, _ in (*model.named_parameters(), *model.named_modules()):
        if (place := layer_of(name, [stack])) is not None:
            yield place[1], place[2], name


def _alike(layers: Sequence[Hashable | set[Hashable]], stack: Stack) -> bool:
    of_kinds = (layers[stack.head + kind :: stack.period] for kind in range(stack.period))
    return all(layer == first for first, *others in of_kinds for layer in others)
