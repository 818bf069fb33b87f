"""``shardgraph.annotate``: annotations stored with a model, applied to every plan that it is compiled under."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from torch import nn

from shardgraph.arguments import ANYTHING, MODEL, checked, mapping_of, of_plan
from shardgraph.errors import PlanError
from shardgraph.module.parameters import tied_names
from shardgraph.module.sharded import ShardedModule
from shardgraph.plans.annotations.kinds import Annotation, Placement, output
from shardgraph.plans.annotations.match import Annotated, matches
from shardgraph.plans.remembered import check_annotations, remember, remembered

_ANNOTATIONS = of_plan(mapping_of("annotations by pattern of names: {'*.weight': shard(0, 'tp')}", ANYTHING))


@checked(model=MODEL, annotations=_ANNOTATIONS)
def annotate(model: nn.Module, annotations: Mapping[str, Annotation | Sequence[Annotation]]) -> None:
    """Constrain every plan under which ``model`` is compiled, analysed, verified or drawn from now on.

    ::

        shardgraph.annotate(model, {
            "model.layers.*.mlp.up_proj.weight": shard(0, "tp"),
            "model.layers.*": [recompute(), output(shard(1, "tp"))],
            "re:.*norm.*": replicate("tp"),
        })

    The model itself is unchanged. Annotations of several calls accumulate. A bare placement applies to the parameters
    that the pattern matches; if it matches none, to the first output of the modules that it matches.

    Args:
        model: any module, before it is compiled.
        annotations: one annotation or several per pattern of fully qualified names of parameters or modules. ``*``
            matches any part of one name, ``**`` any number of names; a regular expression follows ``re:``.

    Raises:
        PlanError: a pattern matches nothing (the message lists the nearest names); two annotations, of this call or an
            earlier one, contradict each other (it names both); a value is not an annotation; or the model is already
            compiled.
    """
    if isinstance(model, ShardedModule):
        raise PlanError(
            "this model is compiled already: annotate it before shardgraph.compile, which shards parameters"
        )
    parameters = [name for name, _ in model.named_parameters()]
    annotated: list[Annotated] = []
    for pattern, values in annotations.items():
        for annotation in values if isinstance(values, (list, tuple)) else [values]:
            if not isinstance(annotation, Annotation):
                raise PlanError(f"{pattern!r} is annotated {annotation!r}, which is no annotation: use shard(0, 'tp')")
            if isinstance(annotation, Placement) and not any(matches(pattern, name) for name in parameters):
                annotation = _of_output(model, pattern, annotation)
            annotated.append((pattern, annotation))
    combined = tuple(dict.fromkeys((*remembered(model), *annotated)))
    check_annotations(model, combined)
    remember(model, combined)


def _of_output(model: nn.Module, pattern: str, placement: Placement) -> Annotation:
    """``output(placement)`` if ``pattern`` matches a module; the placement itself if it matches nothing."""
    if any(matches(pattern, name) for name, _ in model.named_modules()):
        return output(placement)
    for first, *others in tied_names(model):
        for name in others:
            if matches(pattern, name):
                raise PlanError(f"{name!r} is tied to {first!r}: annotate it under that name")
    return placement
