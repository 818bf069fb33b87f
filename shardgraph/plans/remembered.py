"""Annotations that a model remembers, and a plan with them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from shardgraph.plans.annotations.kinds import ModuleAnnotation, ParameterAnnotation, offload, precision
from shardgraph.plans.annotations.match import Annotated, said_of
from shardgraph.plans.plan import Plan

_REMEMBERED = "_shardgraph_annotations"


def remember(model: nn.Module, annotations: tuple[Annotated, ...]) -> None:
    """Have ``model`` remember these annotations and no others."""
    vars(model)[_REMEMBERED] = annotations


def remembered(model: nn.Module) -> tuple[Annotated, ...]:
    """What :func:`annotate` has been told of a model."""
    return vars(model).get(_REMEMBERED, ())


def annotated(plan: Plan, model: nn.Module) -> Plan:
    """``plan`` with the annotations that ``model`` remembers beside its own.

    Raises:
        PlanError: they contradict each other, or match nothing in the model.
    """
    together = tuple(dict.fromkeys((*plan.annotations, *remembered(model))))
    check_annotations(model, together)
    return replace(plan, annotations=together)


def check_annotations(model: nn.Module, annotations: Sequence[Annotated]) -> None:
    """Raise PlanError where annotations contradict each other, or match nothing in ``model``."""
    said_of(annotations, ParameterAnnotation, (name for name, _ in model.named_parameters()), "parameters")
    said_of(annotations, ModuleAnnotation, (name for name, _ in model.named_modules()), "modules")
    named = [name for name, _ in (*model.named_parameters(), *model.named_modules())]
    for kind in (precision, offload):
        said_of(annotations, kind, named, "parameters or modules")
