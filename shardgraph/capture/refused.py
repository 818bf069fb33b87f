"""What a forward does and no sharded program can: refused, with its line."""

from __future__ import annotations

import inspect
import types
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx, nn

from shardgraph.capture.layouts import uncertain
from shardgraph.errors import CaptureError

_UNSUPPORTED = {
    "InputMutationAOTOutput": "its forward writes in place to an input that no one can give back",
    "TangentAOTInput": "its forward writes in place to an input that requires a gradient",
    "SyntheticBaseAOTInput": "two of its inputs share memory and one is written in place",
    "ViewBaseAOTInput": "an input is a view whose base is written in place",
}

AS_A_CHECK = (
    "a check is part of the graph where it is written as `assert condition`, or as an `if` with nothing but a `raise` "
    "in it"
)
"""How forward checks values."""


def unsupported(desc: Any) -> CaptureError:
    """The error of an input or output of the tracer's that stands for something that cannot be sharded."""
    kind = type(desc).__name__
    return CaptureError(
        f"the model does something that shardgraph cannot train sharded: {_UNSUPPORTED.get(kind, kind)} ({desc})"
    )


def check_arguments(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Raise CaptureError if forward does not take such arguments, as far as its signature says."""
    if model._forward_pre_hooks or isinstance(model.forward, types.BuiltinMethodType):
        return  # hooks may change them
    signature = inspect.signature(model.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        parameters = ", ".join(map(str, signature.parameters.values()))
        raise CaptureError(
            f"{type(model).__name__} cannot be called like this: {error}; it is forward({parameters})"
        ) from None


def check_effects(gm: fx.GraphModule, results: list[tuple[Any, Any]], line: Callable[[fx.Node], str]) -> None:
    """Raise CaptureError if a lowered graph writes a parameter, or has an operation that does more than to compute.

    ``results`` are the tracer's descriptions of outputs with their nodes, ``line`` tells that of a node.
    """
    for node in gm.graph.nodes:
        if node.target is torch.ops.higher_order.with_effects:
            _refuse_effect(str(node.args[1]), line(node))
        if getattr(node.target, "__name__", "") == "control_deps":  # keeps the order of what has no result
            ordered: Any = gm.get_submodule(str(node.args[1]))
            inner = next(each for each in ordered.graph.nodes if each.op == "call_function")
            _refuse_effect(str(inner.target), line(inner))
        if node.target is torch.ops.aten._assert_scalar.default:
            raise CaptureError(
                f"forward checks a number that it reads of a tensor, at {line(node)}, as torch._check does: "
                f"{AS_A_CHECK}"
            )
    for desc, value in results:
        if type(desc).__name__ == "InputMutationAOTOutput" and type(desc.mutated_input).__name__ == "ParamAOTInput":
            _refuse_write(desc.mutated_input.target, line(value))


def check_shapes(gm: fx.GraphModule, line: Callable[[fx.Node], str]) -> None:
    """Raise CaptureError if the size of a value depends on what the graph computes."""
    for node in gm.graph.nodes:
        value = node.meta.get("val") if node.op == "call_function" else None
        if isinstance(value, torch.Tensor) and not all(isinstance(size, int) for size in value.shape):
            raise CaptureError(
                f"{getattr(node.target, '__name__', node.target)} gives a tensor whose shape depends on values, at "
                f"{line(node)}, and shapes of a captured graph are fixed: choose elements with torch.where or by "
                "multiplying with a mask, or a fixed number of them with topk"
            )


def check_strides(gm: fx.GraphModule, line: Callable[[fx.Node], str]) -> None:
    """Raise CaptureError if a view by strides is of a value whose strides may be others when the model runs."""
    known: dict[fx.Node, bool] = {}
    for node in gm.graph.find_nodes(op="call_function", target=torch.ops.aten.as_strided.default):
        if uncertain(node.args[0], known):
            raise CaptureError(
                f"as_strided at {line(node)} reads by the strides of a value computed from tensors that are laid out "
                "differently, which depend on the device: call it on value.contiguous()"
            )


def _refuse_effect(operator: str, at: str) -> None:
    raise CaptureError(
        f"forward has an effect beside its outputs, at {at} ({operator}), and a program has only operations with "
        "results: leave it out of forward"
    )


def _refuse_write(name: str, at: str) -> None:
    name = name.removeprefix("model.")
    raise CaptureError(
        f"forward writes the parameter {name!r} in place, at {at}: its shards would not be written. Write it after "
        "optimizer.step(), inside of `with sharded.unsharded():`, or keep the value in a buffer, which forward may "
        "write"
    )
