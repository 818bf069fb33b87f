"""``shardgraph.annotate``: annotations that a model remembers, for every plan that it is compiled under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from shardgraph.errors import PlanError
from shardgraph.module.sharded import ShardedModule
from shardgraph.plans.annotations.kinds import (
    Annotation,
    Placement,
    output,
)
from shardgraph.plans.annotations.match import Annotated, matches
from shardgraph.plans.remembered import check_annotations, remember, remembered


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
    check_annotations(model, together)
    remember(model, together)


def _of_output(model: nn.Module, pattern: str, placement: Placement) -> Annotation:
    """A bare placement as one of outputs, where the pattern matches no parameter but a module."""
    if any(matches(pattern, name) for name, _ in model.named_modules()):
        return output(placement)
    first = {id(parameter): name for name, parameter in model.named_parameters()}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if matches(pattern, name):
            raise PlanError(f"{name!r} is tied to {first[id(parameter)]!r}: annotate it under that name")
    return placement
