"""Computing in double precision what a model casts to a coarser one, so that rounding cannot be taken for a fault."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from shardgraph.torch_api import pytree

_COARSE = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = dict.fromkeys((torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half), torch.Tensor.double)


def in_double(wanted: bool) -> AbstractContextManager[Any]:
    """:class:`InDouble` if ``wanted``."""
    return InDouble() if wanted else nullcontext()


def is_coarse(gm: fx.GraphModule) -> bool:
    """Whether a graph computes something in a dtype coarser than double precision."""
    values = (node.meta.get("val") for node in gm.graph.nodes if node.op == "call_function")
    return any(isinstance(each, torch.Tensor) and each.dtype in _COARSE for each in values)


class InDouble(TorchFunctionMode):
    """Inside, a model in double precision remains in it where its code asks for a coarser dtype by name.

    Norms, softmaxes, and routers often compute in single precision, whatever the dtype of the model. The program that
    is traced inside has these in double precision too.
    """

    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.dtype, _widened, (args, kwargs or {}))
        return _CASTS.get(function, function)(*args, **kwargs)


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in _COARSE else dtype
