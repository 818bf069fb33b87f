"""Annotations stored with a model, and a plan that includes them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from torch import nn

from shardgraph.plans.annotations.kinds import ModuleAnnotation, ParameterAnnotation, offload, precision
from shardgraph.plans.annotations.match import Annotated, annotations_by_name, inside
from shardgraph.plans.plan import Plan

_REMEMBERED = "_shardgraph_annotations"


def remember(model: nn.Module, annotations: tuple[Annotated, ...]) -> None:
    """Store these annotations with ``model``, in place of any others."""
    vars(model)[_REMEMBERED] = annotations


def remembered(model: nn.Module) -> tuple[Annotated, ...]:
    """The annotations by :func:`shardgraph.annotate` of a model, and of modules inside under their names in it."""
    return tuple(
        (inside(name, pattern), annotation)
        for name, module in model.named_modules()
        for pattern, annotation in vars(module).get(_REMEMBERED, ())
    )


def annotated(plan: Plan, model: nn.Module) -> Plan:
    """``plan`` with its own annotations and those of ``model``.

    Raises:
        PlanError: they contradict each other, or match nothing in the model.
    """
    annotations = tuple(dict.fromkeys((*plan.annotations, *remembered(model))))
    check_annotations(model, annotations)
    return replace(plan, annotations=annotations)


def check_annotations(model: nn.Module, annotations: Sequence[Annotated]) -> None:
    """Check that annotations match something in ``model`` and do not contradict each other.

    Raises:
        PlanError: they do not; the message names the annotations.
    """
    annotations_by_name(annotations, ParameterAnnotation, (name for name, _ in model.named_parameters()), "parameters")
    annotations_by_name(annotations, ModuleAnnotation, (name for name, _ in model.named_modules()), "modules")
    named = [name for name, _ in (*model.named_parameters(), *model.named_modules())]
    for kind in (precision, offload):
        annotations_by_name(annotations, kind, named, "parameters or modules")
