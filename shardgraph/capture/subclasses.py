"""Tensors with a behaviour of their own, which a program of plain tensors and shards would lose: refused by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from shardgraph.errors import CaptureError
from shardgraph.torch_api import Elsewhere, FakeTensor, FunctionalTensor, is_transformed

_OURS = (DTensor, Elsewhere, FakeTensor, FunctionalTensor)  # told elsewhere, or of tracing itself


def check_tensors(model: nn.Module) -> None:
    """Raise CaptureError if a parameter or buffer has operations of its own.

    A subclass without any is computed with as the tensor that it is.
    """
    for kind, named in (("parameter", model.named_parameters()), ("buffer", model.named_buffers())):
        for name, tensor in named:
            if has_operations(tensor):
                raise CaptureError(
                    f"the {kind} {name!r} is a {type(tensor).__name__}, a tensor with operations of its own, and "
                    "programs compute with plain tensors and shards of them, which would lose these: make it a plain "
                    f"tensor, as by {name}.as_subclass(torch.Tensor), and put what it does into the forward of the "
                    "module that has it"
                )


def check_inputs(leaves: Sequence[Any]) -> None:
    """Raise CaptureError if one of the flattened inputs of a call has operations of its own."""
    for i, leaf in enumerate(leaves):
        if has_operations(leaf):
            raise CaptureError(
                f"input {i} of the call is a {type(leaf).__name__}, a tensor with operations of its own, and programs "
                "compute with plain tensors, which would lose these: give its as_subclass(torch.Tensor), and put what "
                "it does into forward"
            )


def check_transforms() -> None:
    """Raise CaptureError inside of a transformation of ``torch.func``, whose tensors a program would not see."""
    if is_transformed():
        raise CaptureError(
            "a compiled module is called inside of a transformation of torch.func (vmap, grad, jvp and the like), of "
            "which its program knows nothing: call the original there, which in `with sharded.unsharded():` has whole "
            "parameters, as in functional_call(sharded.original, values, inputs)"
        )


def has_operations(value: Any) -> bool:
    """Whether a value is a tensor of a class that says what operations on it do."""
    kind = type(value)
    if (
        kind is torch.Tensor
        or not isinstance(value, torch.Tensor)
        or isinstance(value, _OURS)
        or nn.parameter.is_lazy(value)
    ):
        return False
    own = _of_class(kind.__torch_function__), _of_class(kind.__torch_dispatch__)
    return own[0] not in _FUNCTIONS or own[1] is not _DISPATCH


def _of_class(method: Any) -> Any:
    """A class method as all classes that inherit it have it."""
    return getattr(method, "__func__", method)


_FUNCTIONS = {_of_class(torch.Tensor.__torch_function__), _of_class(nn.Parameter.__torch_function__)}
_DISPATCH = _of_class(torch.Tensor.__torch_dispatch__)
