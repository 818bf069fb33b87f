"""Annotated activations: a placement that a value of the captured graph, and its gradient, must have.

In the graph such a value goes through one operation, ``shardgraph::constrain``, an identity. What finds placements for
operators honours it (:mod:`shardgraph.passes.sharding.problem`); then
:mod:`shardgraph.passes.rewrite.remove_constraints` takes it out. Annotations of outputs and inputs of modules become
that operation by hooks that are there while the model is traced, so they see what the module really takes and gives,
however often it is called.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import fx, nn
from torch.utils import _pytree as pytree

from shardgraph.annotations.kinds import Placement, input, output, replicate, shard
from shardgraph.annotations.match import Annotated, said_of, written
from shardgraph.errors import PlanError


def constrain(tensor: torch.Tensor, placement: Placement) -> torch.Tensor:
    """``tensor``, which under a plan that divides operators lies as ``placement`` says, and its gradient equally.

    For use inside of a forward: ``hidden = shardgraph.constrain(hidden, shard(1, "tp"))``. Without a plan, or under one
    whose mesh has no such axis of operators, it does nothing.
    """
    if not torch.compiler.is_compiling():
        return tensor
    return _constrain(tensor, placement, "")


def _constrain(tensor: torch.Tensor, placement: Placement, of: str) -> torch.Tensor:
    if isinstance(placement, shard):
        return _operation(tensor, placement.dim, placement.blocks, placement.mesh_dim, of)
    return _operation(tensor, None, 1, placement.mesh_dim, of)


@torch.library.custom_op("shardgraph::constrain", mutates_args=())
def _operation(tensor: torch.Tensor, dim: int | None, blocks: int, mesh_dim: str | None, of: str) -> torch.Tensor:
    return tensor.clone()


@_operation.register_fake
def _(tensor: torch.Tensor, *placement: Any) -> torch.Tensor:
    return torch.empty_like(tensor)


def _keep_placement(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
    ctx.placement = inputs[1:]


def _constrain_gradient(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
    return _operation(gradient, *ctx.placement), None, None, None, None


_operation.register_autograd(_constrain_gradient, setup_context=_keep_placement)

CONSTRAIN = torch.ops.shardgraph.constrain.default


# -- in a captured graph -----------------------------------------------------------------------------------


def placement_of(node: fx.Node) -> Placement:
    """The placement that a node of the operation demands."""
    _, dim, blocks, mesh_dim, _ = node.args
    return replicate(mesh_dim) if dim is None else shard(dim, mesh_dim, blocks)


def describe(node: fx.Node) -> str:
    """Which annotation a node of the operation is from."""
    return str(node.args[-1]) or f"constrain(..., {placement_of(node)}) at {node.meta.get('source', '')}"


# -- annotations of modules as the operation ---------------------------------------------------------------


@contextmanager
def constrained(model: nn.Module, annotations: Sequence[Annotated]) -> Iterator[None]:
    """Within, outputs and inputs of modules that are annotated go through the operation.

    Raises:
        PlanError: an argument that an annotation names is none of the module's.
    """
    modules = dict(model.named_modules())
    hooks = []
    try:
        for kind in (output, input):
            for name, said in said_of(annotations, kind, modules, "modules").items():
                hooks += [_hook(modules[name], annotated) for annotated in said]
        yield
    finally:
        for hook in hooks:
            hook.remove()


def check_met(gm: fx.GraphModule, annotations: Sequence[Annotated]) -> None:
    """Every annotation of an output or input constrains something in the captured graph.

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
        return module.register_forward_hook(lambda _, given, made: _nth(made, int(at), placement, of))
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
    leaves[tensors[number]] = _constrain(leaves[tensors[number]], placement, of)
    return pytree.tree_unflatten(leaves, spec)
