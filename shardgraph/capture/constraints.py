"""Turns annotated outputs and inputs of modules into constraints in the captured graph, by hooks during tracing."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from shardgraph.errors import PlanError
from shardgraph.plans.annotations.constrain import CONSTRAIN, constrain_to
from shardgraph.plans.annotations.kinds import Placement, input, output
from shardgraph.plans.annotations.match import Annotated, annotations_by_name, written


@contextmanager
def constrained(model: nn.Module, annotations: Sequence[Annotated]) -> Iterator[None]:
    """Inside, annotated outputs and inputs of modules pass through the constraint operation.

    Raises:
        PlanError: an annotation names an argument that the module does not have.
    """
    modules = dict(model.named_modules())
    with ExitStack() as hooks:
        for kind in (output, input):
            for name, together in annotations_by_name(annotations, kind, modules, "modules").items():
                for annotated in together:
                    hooks.enter_context(_hook(modules[name], annotated))
        yield


def check_met(gm: fx.GraphModule, annotations: Sequence[Annotated]) -> None:
    """Check that every annotation of an output or input constrains something in the captured graph.

    Raises:
        PlanError: one does not.
    """
    met = {node.args[-1] for node in gm.graph.nodes if node.target is CONSTRAIN}
    for pattern, annotation in annotations:
        if isinstance(annotation, (output, input)) and written((pattern, annotation)) not in met:
            raise PlanError(
                f"{written((pattern, annotation))} constrains nothing: in this call none of these modules has a tensor "
                f"number {annotation.at!r} there that what the model returns depends on"
            )


def _hook(module: nn.Module, annotated: Annotated) -> Any:
    annotation, of = annotated[1], written(annotated)
    assert isinstance(annotation, (output, input))
    placement, at = annotation.placement, annotation.at
    if isinstance(annotation, output):
        return module.register_forward_hook(lambda _, inputs, result: _nth(result, int(at), placement, of))
    if isinstance(at, int):
        return module.register_forward_pre_hook(
            lambda _, args, kwargs: _nth((args, kwargs), at, placement, of), with_kwargs=True
        )
    arguments = list(inspect.signature(module.forward).parameters)
    if at not in arguments:
        raise PlanError(
            f"{of}: the forward of {type(module).__name__} has no argument {at!r}; it has {', '.join(arguments)}"
        )
    return module.register_forward_pre_hook(_of_argument(at, arguments.index(at), placement, of), with_kwargs=True)


def _of_argument(name: str, position: int, placement: Placement, of: str) -> Callable[..., Any]:
    def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if name in kwargs:
            return args, {**kwargs, name: _nth(kwargs[name], 0, placement, of)}
        if position < len(args):
            args = (*args[:position], _nth(args[position], 0, placement, of), *args[position + 1 :])
        return args, kwargs

    return hook


def _nth(value: Any, number: int, placement: Placement, of: str) -> Any:
    """``value`` with its tensor of that number, counted from 0, constrained."""
    leaves, spec = pytree.tree_flatten(value)
    tensors = [i for i, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)]
    if number >= len(tensors):
        return value
    leaves[tensors[number]] = constrain_to(leaves[tensors[number]], placement, of)
    return pytree.tree_unflatten(leaves, spec)
