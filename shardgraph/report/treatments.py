"""What a plan does with each of a model's equal layers."""

from __future__ import annotations

import fnmatch
import glob
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial

from torch import nn

from shardgraph.capture.stacks import Stack, layer_of
from shardgraph.plans.annotations.kinds import recompute, save
from shardgraph.plans.annotations.match import Annotated, matches
from shardgraph.plans.plan import Plan

_OF_A_LAYER = (recompute, save)
"""Annotations that change nothing in other layers than their own."""

Treatment = tuple[Annotated, ...]
"""Annotations of a layer that others of its kind do not have, each with the name of its module within the layer."""


@dataclass(frozen=True)
class Treatments:
    """What the annotations of a plan do with the layers of a stack."""

    stack: Stack
    shared: tuple[Annotated, ...]
    """The annotations that do the same with all layers of a kind."""
    layers: tuple[Treatment, ...]
    """What the others do with each layer."""

    def annotations(self, layers: Sequence[Treatment]) -> tuple[Annotated, ...]:
        """The annotations of a copy of the model whose stack has ``layers`` that are treated so."""
        path = glob.escape(self.stack.prefix)
        of_layers = [
            (f"{path}{number}{'.' if rest else ''}{glob.escape(rest)}", annotation)
            for number, treatment in enumerate(layers)
            for rest, annotation in treatment
        ]
        return (*self.shared, *of_layers)


def treats_alike(plan: Plan, model: nn.Module, stack: Stack) -> bool:
    """Whether ``plan`` treats all layers of a kind of a stack of ``model`` equally."""
    rules = plan.recompute if not isinstance(plan.recompute, str) else ()
    constraints: tuple[tuple[str, object], ...] = (*plan.annotations, *rules)
    patterns = [pattern for pattern, _ in plan.parameters if pattern != "*"]
    if patterns and plan.activations is not None:
        return False  # its rules may name operations of layers that a copy with fewer does not have
    tests: list[Callable[[str], bool]] = [partial(matches, pattern) for pattern, _ in constraints]
    tests += [partial(fnmatch.fnmatch, pat=pattern) for pattern in patterns]
    return all(_alike(each, stack) for each in _passing(tests, model, stack))


def treatments(plan: Plan, model: nn.Module, stack: Stack) -> Treatments | None:
    """What the annotations of ``plan`` do with each layer of a stack of ``model``; None if anything but annotations of
    recomputation tells equal layers apart."""
    if not treats_alike(replace(plan, annotations=()), model, stack):
        return None
    shared: list[Annotated] = []
    layers: list[list[Annotated]] = [[] for _ in range(stack.layers)]
    found = _passing([partial(matches, pattern) for pattern, _ in plan.annotations], model, stack)
    for (pattern, annotation), matched in zip(plan.annotations, found, strict=True):
        if _alike(matched, stack):
            shared.append((pattern, annotation))
        elif not isinstance(annotation, _OF_A_LAYER):
            return None
        else:
            for layer, names in zip(layers, matched, strict=True):
                layer += [(name, annotation) for name in names]
    return Treatments(stack, tuple(shared), tuple(map(tuple, layers)))


def _passing(tests: Sequence[Callable[[str], bool]], model: nn.Module, stack: Stack) -> Iterator[list[tuple[str, ...]]]:
    """For each test of whole names, the names in each layer that pass it."""
    names = list(_inside(model, stack)) if tests else []
    for test in tests:
        layers: list[list[str]] = [[] for _ in range(stack.layers)]
        for number, rest, name in names:
            if test(name):
                layers[number].append(rest)
        yield list(map(tuple, layers))


def _inside(model: nn.Module, stack: Stack) -> Iterator[tuple[int, str, str]]:
    """The layer, the name in it and the whole name of each parameter and module in a stack of ``model``."""
    for name, _ in (*model.named_parameters(), *model.named_modules()):
        if (place := layer_of(name, [stack])) is not None:
            yield place[1], place[2], name


def _alike(layers: Sequence[Hashable], stack: Stack) -> bool:
    of_kinds = (layers[stack.head + kind :: stack.period] for kind in range(stack.period))
    return all(layer == first for first, *others in of_kinds for layer in others)
