"""Operations as Python expressions of torch: in their well-known spelling where that computes the same bits."""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import fx

from shardgraph import ir
from shardgraph.emission import prelude
from shardgraph.emission.lines import quoted
from shardgraph.emission.sources import Copied
from shardgraph.errors import ShardGraphError
from shardgraph.ir import buckets
from shardgraph.ir.attributes import SOURCE
from shardgraph.runtime.layouts import contiguous_arguments

aten = torch.ops.aten

Text = Callable[[Any], str]
"""Any argument as an expression."""

_INFIX: dict[Any, str] = {
    aten.add.Tensor: "+",
    aten.sub.Tensor: "-",
    aten.mul.Tensor: "*",
    aten.div.Tensor: "/",
    operator.sub: "-",
    operator.add: "+",
    operator.mul: "*",
    operator.floordiv: "//",
}
_METHODS: dict[Any, str] = {  # of the first argument, with the others as they are
    aten.t.default: "t",
    aten.transpose.int: "transpose",
    aten.permute.default: "permute",
    aten.view.default: "reshape",  # which copies where strides that were traced are not those of a kernel
    aten._unsafe_view.default: "reshape",
    aten.unsqueeze.default: "unsqueeze",
    aten.squeeze.dim: "squeeze",
    aten.select.int: "select",
    aten.expand.default: "expand",
    aten.detach.default: "detach",
    aten.rsqrt.default: "rsqrt",
    aten.pow.Tensor_Scalar: "pow",
}
_FUNCTIONS: dict[Any, str] = {
    aten.mm.default: "torch.mm",
    aten.bmm.default: "torch.bmm",
    aten.addmm.default: "torch.addmm",
    aten.cat.default: "torch.cat",
    aten.neg.default: "torch.neg",
    aten.exp.default: "torch.exp",
    aten.sigmoid.default: "torch.sigmoid",
    aten.tanh.default: "torch.tanh",
    aten.relu.default: "torch.relu",
    aten.cos.default: "torch.cos",
    aten.sin.default: "torch.sin",
}
VIEWS = frozenset(_METHODS) - {aten.rsqrt.default, aten.pow.Tensor_Scalar, aten.detach.default}
"""What is written where it is read, if it is read once."""

_OF_RANKS: dict[Any, Any] = {
    ir.pad_shard: ir.pad_shard,
    ir.take_part: ir.take_part,
    ir.trim_shard: prelude.trim_shard,
    ir.local_chunk: prelude.local_chunk,
    ir.local_part: prelude.local_part,
    ir.first_only: prelude.first_only,
    ir.first_row: prelude.first_row,
    ir.from_later: prelude.from_later,
    ir.send: prelude.send_to_next,
    ir.TO_HOST: prelude.to_host,
    ir.GENERATOR_STATE: prelude.random_state,
    ir.SET_GENERATOR_STATE: prelude.go_back_if,
    buckets.pack: buckets.pack,
    buckets.unpack: buckets.unpack,
    buckets.unpack_parts: buckets.unpack_parts,
}
_END = 2**62

RESULTS: dict[Any, tuple[str, ...]] = {
    aten.native_layer_norm.default: ("", "mean", "rstd"),
    aten.native_layer_norm_backward.default: ("", "weight", "bias"),
    aten.native_dropout.default: ("", "mask"),
    aten.native_batch_norm.default: ("", "mean", "invstd"),
    aten._native_batch_norm_legit_functional.default: ("", "mean", "invstd", "running_mean", "running_var"),
    aten.native_batch_norm_backward.default: ("", "weight", "bias"),
    aten.convolution_backward.default: ("", "weight", "bias"),
    aten.nll_loss_forward.default: ("", "total_weight"),
    aten.max_pool2d_with_indices.default: ("", "indices"),
    aten.topk.default: ("", "indices"),
    aten.sort.default: ("", "indices"),
    ir.fused.ATTENTION: ("", "logsumexp"),
    ir.fused.ATTENTION_BACKWARD: ("query", "key", "value"),
    ir.fused.RMS_NORM: ("", "rstd"),
    ir.fused.RMS_NORM_BACKWARD: ("", "weight"),
}
"""What several results of an operation are called, ``""`` for the one that it is for."""


class Spelling:
    """Spells operations; ``copied`` collects the functions that they call."""

    def __init__(self, copied: Copied) -> None:
        self._copied = copied

    def operation(self, node: fx.Node, text: Text) -> str:
        """The call of a node, whose arguments ``text`` gives.

        Raises:
            ShardGraphError: it is an operation that only this package, or the user's own code, defines.
        """
        target, args = node.target, node.args
        if target in _OF_RANKS:
            return self._call(self._copied.add(_OF_RANKS[target]), args, node.kwargs, text)
        if target in ir.COLLECTIVES:
            return self._collective(node, text)
        if target in (ir.WAIT, ir.WAIT_COPY):
            return text(args[0])
        if target is ir.TO_DEVICE:
            return self._call(self._copied.add(prelude.to_device), args[:1], node.kwargs, text)
        if target is ir.DRAWN_MASK:
            function, shape, *others = args
            drawn = self._call(self._copied.add(ir.drawing_function(function)), [tuple(shape), *others], {}, text)
            return f"torch.from_numpy({drawn})"
        if target in ir.fused.OPERATORS:
            kernel = ir.fused.kernel_on(target, node.meta["val"][0].device.type)
            return self._call(self._copied.add(kernel), args, node.kwargs, text)
        if target is ir.SQUARED_NORM:
            return f"torch.linalg.vector_norm({text(args[0])}, dtype=torch.float32).double().square()"
        if target in _INFIX and not node.kwargs and len(args) == 2:
            return f"{text(args[0])} {_INFIX[target]} {text(args[1])}"
        if target is operator.getitem:
            return f"{text(args[0])}[{text(args[1])}]"
        if target in _METHODS and isinstance(args[0], fx.Node):
            return self._call(f"{text(args[0])}.{_METHODS[target]}", args[1:], node.kwargs, text)
        if target is aten.slice.Tensor and not node.kwargs and (cut := _slice(args, text)):
            return cut
        if target in (aten.sum.dim_IntList, aten.mean.dim) and len(args) in (2, 3):
            keep = ", keepdim=True" if len(args) == 3 and args[2] else ""
            dtype = f", dtype={text(node.kwargs['dtype'])}" if node.kwargs.get("dtype") is not None else ""
            return (
                f"{text(args[0])}.{'sum' if target is aten.sum.dim_IntList else 'mean'}({text(args[1])}{keep}{dtype})"
            )
        if target in _FUNCTIONS:
            return self._call(_FUNCTIONS[target], args, node.kwargs, text)
        if isinstance(target, torch._ops.OpOverload):
            if target.namespace not in ("aten", "prims", "_c10d_functional"):
                raise ShardGraphError(
                    f"{target} ({SOURCE.get(node) or 'no line known'}) is an operation that torch alone does not have, "
                    "so that a file without the package that defines it could not run: write the model without it, or "
                    "keep to the compiled module"
                )
            name = f"{target.namespace}.{str(target).partition('.')[2]}".removesuffix(".default")
            at = contiguous_arguments(target, tuple(fx.map_arg(args, lambda arg: arg.meta.get("val"))))
            called = name if target.namespace == "aten" else f"torch.ops.{name}"
            return self._call(called, args, node.kwargs, text, contiguous=at)
        where = SOURCE.get(node) or "no line known"
        raise ShardGraphError(
            f"{getattr(target, '__name__', target)} ({where}) has no form in plain torch yet: run it as the compiled "
            "module, or choose a plan without it"
        )

    def _collective(self, node: fx.Node, text: Text) -> str:
        args, axis = node.args, quoted(ir.group_of(node))
        tensor = text(args[0])
        if node.target in (ir.ALL_GATHER, ir.ALL_GATHER_OUT):
            return f"{self._copied.add(prelude.all_gather)}({tensor}, {axis})"
        if node.target is ir.REDUCE_SCATTER:
            return f"{self._copied.add(prelude.reduce_scatter)}({tensor}, {axis})"
        if node.target in (ir.ALL_REDUCE, ir.ALL_REDUCE_):
            operation = "" if args[1] == "sum" else f", {args[1]!r}"
            return f"{self._copied.add(prelude.all_reduce)}({tensor}, {axis}{operation})"
        return f"{self._copied.add(prelude.all_to_all)}({tensor}, {text(args[1])}, {text(args[2])}, {axis})"

    def _call(self, function: str, args: Sequence[Any], kwargs: Any, text: Text, contiguous: Sequence[int] = ()) -> str:
        given = [text(each) + (".contiguous()" if i in contiguous else "") for i, each in enumerate(args)]
        given += [f"{name}={text(each)}" for name, each in kwargs.items() if _is_meant(name, each)]
        return f"{function}({', '.join(given)})"


def _is_meant(name: str, value: Any) -> bool:
    """Whether a keyword argument says more than its default."""
    return not (value is None or (name in ("pin_memory", "non_blocking") and not value))


def _slice(args: Sequence[Any], text: Text) -> str:
    tensor, dim, start, end, step = (*args, *(0, 0, None, None, 1)[len(args) :])
    if not isinstance(dim, int) or not 0 <= dim <= 3 or step is None:
        return ""
    first = "" if start in (None, 0) else text(start)
    last = "" if end is None or (isinstance(end, int) and end >= _END) else text(end)
    stride = "" if step == 1 else f":{text(step)}"
    return f"{text(tensor)}[{':, ' * dim}{first}:{last}{stride}]"


def constant(value: Any) -> str:
    """A constant as an expression.

    Raises:
        ShardGraphError: it has none.
    """
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(map(constant, value))}]"
    if isinstance(value, torch.dtype | torch.memory_format | torch.layout):
        return str(value)
    if isinstance(value, torch.device):
        return "DEVICE"
    if isinstance(value, float) and not math.isfinite(value):
        return "math.nan" if math.isnan(value) else "math.inf" if value > 0 else "-math.inf"
    if isinstance(value, str):
        return quoted(value)
    if value is None or isinstance(value, (bool, int, float)):
        return repr(value)
    raise ShardGraphError(
        f"{value!r} is an argument of an operation that cannot be written in a file: keep to the compiled module"
    )
