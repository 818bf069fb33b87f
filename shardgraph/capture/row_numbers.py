"""Numbers that forward computes from the length of the batch, such as the one of ``loss.sum() / len(batch)``.

A graph has them as constants like any other. They are found by calling the model on two batches, one a row longer, on
fake tensors: what differs comes from the rows.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from shardgraph.ir import RowNumber
from shardgraph.torch_api import FakeTensorMode, pytree, unset_fake_temporarily

_FILLED = {"full", "new_full", "full_like", "scalar_tensor", "fill"}


class _Arithmetic(TorchDispatchMode):
    """Records the numbers that operations on elements compute with, in order."""

    def __init__(self) -> None:
        super().__init__()
        self.numbers: list[tuple[str, float]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        function = func.overloadpacket.__name__.rstrip("_")
        if torch.Tag.pointwise in func.tags or function in _FILLED:
            self.numbers += [(function, each) for each in map(_number, args) if each is not None]
        return func(*args, **(kwargs or {}))


def _number(value: Any) -> float | None:
    """A number, or that in a constant tensor, which a fake tensor keeps."""
    constant = getattr(value, "constant", value)
    if isinstance(constant, torch.Tensor):
        with unset_fake_temporarily():
            return float(constant) if type(constant) is torch.Tensor and constant.numel() == 1 else None
    return float(value) if isinstance(value, (int, float)) and not isinstance(value, bool) else None


def row_numbers(run: Callable[[Any], Any], inputs: Any, rows: int, mode: FakeTensorMode) -> list[RowNumber] | None:
    """The numbers of ``run(inputs)`` that come from the ``rows`` of these fake tensors; None if that cannot be told.

    It cannot if ``run`` fails for another number of rows, or computes with other operations then.
    """

    def numbers(more: int) -> list[tuple[str, float]]:
        def resized(tensor: torch.Tensor) -> torch.Tensor:
            if not tensor.dim() or tensor.shape[0] != rows:
                return tensor.detach()  # forward may have it require a gradient
            return tensor.new_empty((rows + more, *tensor.shape[1:]))

        with _Arithmetic() as arithmetic:
            run(pytree.tree_map_only(torch.Tensor, resized, inputs))
        return arithmetic.numbers

    with mode, torch.enable_grad():  # for derivatives that forward computes
        try:
            now, longer = numbers(0), numbers(1)
        except Exception:  # the model's own, for a length that it does not take
            return None
    if [function for function, _ in now] != [function for function, _ in longer]:
        return None
    alike = Counter(entry for entry, other in zip(now, longer, strict=True) if entry == other)
    differing = ((*entry, other) for entry, (_, other) in zip(now, longer, strict=True) if entry[1] != other)
    return [RowNumber(function, a, b, also_constant=(function, a) in alike) for function, a, b in differing]
