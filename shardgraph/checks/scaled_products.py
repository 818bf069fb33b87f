"""Products of float8 values in eager execution: what a program of them is compared with.

The same rule says which products these are (:mod:`shardgraph.capture.scaled_products`), of which this computes no
kernel but the definition: values rounded to 8 bits, multiplied in single precision or more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardgraph.capture.scaled_products import GRADIENTS, LEAST, VALUES, reason_not_to
from shardgraph.plans.annotations.match import Annotated
from shardgraph.plans.precision import Precision
from shardgraph.torch_api import differentiated, next_operation

aten = torch.ops.aten


@contextmanager
def scaled_products(
    parameters: Mapping[str, torch.Tensor], precision: Precision, annotations: Sequence[Annotated]
) -> Iterator[None]:
    """Inside, products with ``parameters``, and those of their derivatives, are as ``precision`` says."""
    if precision.products is None:
        yield
        return
    with _Scaled(parameters, annotations):
        yield


class _Scaled(TorchDispatchMode):
    def __init__(self, parameters: Mapping[str, torch.Tensor], annotations: Sequence[Annotated]) -> None:
        super().__init__()
        self._names = {_memory(tensor): name for name, tensor in parameters.items()}
        self._sizes = {name: tensor.numel() for name, tensor in parameters.items()}
        self._annotations = annotations
        self._products: set[int] = set()  # of forward, by the numbers that autograd gives them
        self._factors: dict[int, torch.Tensor] = {}  # theirs, by their memory, which nothing else has while they live

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func not in (aten.mm.default, aten.addmm.default) or kwargs:
            return func(*args, **(kwargs or {}))
        *bias, left, right = args
        formats = [VALUES if _memory(factor) in self._factors else GRADIENTS for factor in (left, right)]
        if differentiated() in self._products and VALUES in formats:
            product = _product(left, formats[0], right, formats[1])
        elif self._is_scaled(left, right):
            if torch.is_grad_enabled():
                self._products.add(next_operation() - 1)
                self._factors |= {_memory(factor): factor for factor in (left, right)}
            product = _product(left, VALUES, right, VALUES)
        else:
            return func(*args)
        return product + bias[0] if bias else product

    def _is_scaled(self, left: torch.Tensor, right: torch.Tensor) -> bool:
        found = [(self._names.get(_memory(factor)), factor) for factor in (left, right)]
        names = [name for name, factor in found if name is not None and factor.numel() == self._sizes[name]]
        sizes = (*left.shape, right.shape[1])
        return len(names) == 1 and reason_not_to(names[0], sizes, self._annotations) is None


def _product(left: torch.Tensor, of_left: torch.dtype, right: torch.Tensor, of_right: torch.dtype) -> torch.Tensor:
    (one, unit), (other, other_unit) = _rounded(left, of_left), _rounded(right, of_right)
    return ((one @ other) * (unit * other_unit)).to(left.dtype)


def _rounded(tensor: torch.Tensor, to: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    wide = tensor.to(torch.promote_types(tensor.dtype, torch.float32))
    unit = wide.abs().amax().clamp_min(LEAST) / torch.finfo(to).max
    return (wide / unit).to(to).to(wide.dtype), unit


def _memory(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata
