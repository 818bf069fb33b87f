"""``shardgraph.annotate``: annotations that a model remembers, for every plan that it is compiled under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from torch import nn

from shardgraph.annotations.kinds import (
    Annotation,
    ModuleAnnotation,
    ParameterAnnotation,
    Placement,
    offload,
    output,
    precision,
)
from shardgraph.annotations.match import Annotated, matches, said_of
from shardgraph.errors import PlanError
from shardgraph.module import ShardedModule
from shardgraph.plan import Plan

_REMEMBERED = "_shardgraph_annotations"


def annotate(model: nn.Module, annotations: Mapping[str, Annotation | Sequence[Annotation]]) -> None:
    """Constrain every plan that ``model`` is compiled, analysed, verified or drawn under from now on.

    ::

        shardgraph.annotate(model, {
            "model.layers.*.mlp.up_proj.weight": shard(0, "tp"),
            "model.layers.*": [recompute(), output(shard(1, "tp"))],
            "re:.*norm.*": replicate("tp"),
        })

    Nothing of the model changes. Several calls add up. A bare placement is of the parameters that the pattern matches,
    or, where it matches none, of the first output of the modules that it does.

    Args:
        model: any module, before it is compiled.
        annotations: by a pattern of fully qualified names of parameters or modules, in which ``*`` is any part of one
            name and ``**`` any number of names, or a regular expression after ``re:``; what is said of them.

    Raises:
        PlanError: a pattern matches nothing (the message has the nearest names), or two annotations, of this call or an
            earlier one, contradict each other (it names both).
    """
    if isinstance(model, ShardedModule):
        raise PlanError(
            "this model is compiled already: annotate it before shardgraph.compile, which shards parameters"
        )
    parameters = [name for name, _ in model.named_parameters()]
    given: list[Annotated] = []
    for pattern, several in annotations.items():
        for annotation in [several] if isinstance(several, Annotation) else several:
            if not isinstance(annotation, Annotation):
                raise PlanError(f"{pattern!r} is annotated {annotation!r}, which is no annotation: use shard(0, 'tp')")
            if isinstance(annotation, Placement) and not any(matches(pattern, name) for name in parameters):
                annotation = _of_output(model, pattern, annotation)
            given.append((pattern, annotation))
    together = tuple(dict.fromkeys((*remembered(model), *given)))
    _check(model, together)
    vars(model)[_REMEMBERED] = together


def remembered(model: nn.Module) -> tuple[Annotated, ...]:
    """What :func:`annotate` has been told of a model."""
    return vars(model).get(_REMEMBERED, ())


def annotated(plan: Plan, model: nn.Module) -> Plan:
    """``plan`` with the annotations that ``model`` remembers beside its own.

    Raises:
        PlanError: they contradict each other, or match nothing in the model.
    """
    together = tuple(dict.fromkeys((*plan.annotations, *remembered(model))))
    _check(model, together)
    return replace(plan, annotations=together)


def _of_output(model: nn.Module, pattern: str, placement: Placement) -> Annotation:
    """A bare placement as one of outputs, where the pattern matches no parameter but a module."""
    if any(matches(pattern, name) for name, _ in model.named_modules()):
        return output(placement)
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if matches(pattern, name):
            raise PlanError(f"{name!r} is tied to {first[id(parameter)]!r}: annotate it under that name")
    return placement


def _check(model: nn.Module, annotations: Sequence[Annotated]) -> None:
    said_of(annotations, ParameterAnnotation, (name for name, _ in model.named_parameters()), "parameters")
    said_of(annotations, ModuleAnnotation, (name for name, _ in model.named_modules()), "modules")
    named = [name for name, _ in (*model.named_parameters(), *model.named_modules())]
    for kind in (precision, offload):
        said_of(annotations, kind, named, "parameters or modules")
