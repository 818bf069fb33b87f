"""The stages of a model that is a sequence, which are known before a call of it is captured."""

from __future__ import annotations

import itertools
from dataclasses import replace

from torch import nn

from shardgraph.errors import PlanError
from shardgraph.plans.pipeline_plan import Pipeline


def declared_stages(model: nn.Module, pipeline: Pipeline) -> Pipeline | None:
    """``pipeline`` with its stages by name, if ``model`` is an ``nn.Sequential`` and they begin with its children.

    None if that is known only from a call: the model is no sequence, or neither stages nor their lengths are given.

    Raises:
        PlanError: the lengths are not those of the sequence.
    """
    if not isinstance(model, nn.Sequential) or not (pipeline.stages or pipeline.balance):
        return None
    children = [name for name, _ in model.named_children()]
    if pipeline.stages:
        places = [children.index(name) for name in pipeline.stages if name in children]
        return pipeline if len(places) == len(pipeline.stages) and sorted({*places, 0}) == [0, *places] else None
    if sum(pipeline.balance) != len(children) or min(pipeline.balance) < 1:
        raise PlanError(
            f"stages of {list(pipeline.balance)} layers are of {sum(pipeline.balance)} in all, and the model is a "
            f"sequence of {len(children)}: give each stage at least one, and all of them the {len(children)}"
        )
    begins = tuple(children[at] for at in itertools.accumulate(pipeline.balance[:-1]))
    return replace(pipeline, stages=begins, balance=())


def declared_owners(model: nn.Module, pipeline: Pipeline) -> dict[str, tuple[int, ...]]:
    """The stages that have each parameter, by its first name, of a pipeline of :func:`declared_stages`."""
    children = [name for name, _ in model.named_children()]
    begins = [0, *(children.index(name) for name in pipeline.stages)]
    stage = {name: sum(begin <= at for begin in begins) - 1 for at, name in enumerate(children)}
    users: dict[nn.Parameter, set[int]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, set()).add(stage[name.partition(".")[0]])
    return {name: tuple(sorted(users[parameter])) for name, parameter in model.named_parameters()}
