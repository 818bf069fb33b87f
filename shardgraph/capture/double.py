"""Computing in double precision what a model casts to a coarser one, so that rounding cannot be taken for a fault."""

from __future__ import annotations

import operator
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from contextvars import ContextVar
from typing import Any

import torch
from torch import fx
from torch.overrides import TorchFunctionMode

from shardgraph.torch_api import pytree

_COARSE = (torch.float32, torch.bfloat16, torch.float16)
_CASTS = dict.fromkeys((torch.Tensor.float, torch.Tensor.bfloat16, torch.Tensor.half), torch.Tensor.double)
_TRACED = ContextVar("traced in double precision", default=False)


class _Double(TorchFunctionMode):
    def __torch_function__(self, function: Any, _: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = pytree.tree_map_only(torch.dtype, _widened, (args, kwargs or {}))
        return _CASTS.get(function, function)(*args, **kwargs)


def in_double(wanted: bool = True) -> AbstractContextManager[Any]:
    """Inside, if ``wanted``, a model in double precision remains in it where its code asks for a coarser dtype by name.

    Norms, softmaxes and routers often compute in single precision, whatever the dtype of the model.
    """
    return _Double() if wanted else nullcontext()


@contextmanager
def traced_in_double(wanted: bool) -> Iterator[None]:
    """Inside, if ``wanted``, models are captured as they compute :func:`in_double`."""
    token = _TRACED.set(wanted)
    try:
        yield
    finally:
        _TRACED.reset(token)


def as_traced() -> AbstractContextManager[Any]:
    """What lowering runs in: :func:`in_double` if that is wanted. Dynamo itself cannot trace through every mode."""
    return in_double(_TRACED.get())


def is_coarse(gm: fx.GraphModule) -> bool:
    """Whether a graph computes something in a dtype coarser than double precision."""
    nodes = (node for node in gm.graph.nodes if node.op == "call_function" and not _is_sum_of_attention(node))
    values = (node.meta.get("val") for node in nodes)
    return any(isinstance(each, torch.Tensor) and each.dtype in _COARSE for each in values)


def _is_sum_of_attention(node: fx.Node) -> bool:
    """Whether it is what an attention leaves for its backward: as precise as its output, whatever torch 2.12 says."""
    if node.target is not operator.getitem or node.args[1] == 0:
        return False
    return node.all_input_nodes[0].target is torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default


def _widened(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in _COARSE else dtype
