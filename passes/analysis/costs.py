"""The work of each node of a program: FLOPs, bytes read and written, and the kind of work.

Independent of any device; :mod:`shardgraph.cost_models.compute` turns a cost into seconds.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_backward_flop_count, sdpa_flop_count

from shardgraph import ir
from shardgraph.cost_models.compute import ALIGNED, causal_part
from shardgraph.cost_models.device import VIEW
from shardgraph.ir.operations import makes_view

aten = torch.ops.aten

# As torch's counter counts the kernels of attention.
_ATTENTION_FLOPS: dict[Any, Callable[..., int]] = {
    ir.fused.ATTENTION: lambda *operands: sdpa_flop_count(*_equal_heads(operands[:3])),
    ir.fused.ATTENTION_BACKWARD: lambda *operands: sdpa_backward_flop_count(*_equal_heads(operands[:4])),
}

# Operations by kind of work, where tags do not determine it; a name covers its backward and in-place forms too.
_NAMES = {
    "pointwise": """
        cat stack constant_pad_nd full full_like zeros zeros_like ones ones_like empty empty_like arange scalar_tensor
        copy fill repeat lift_fresh_copy new_zeros new_ones new_full new_empty new_empty_strided tril triu roll flip eye
        linspace upsample_nearest2d upsample_bilinear2d reflection_pad2d pad_shard masked_fill to_copy contiguous
        as_strided_scatter native_dropout_backward pack unpack_parts
    """,
    "transcendental": """
        acos asin atan atan2 cos cosh erf erfc exp exp2 expm1 lgamma log log10 log1p log2 logit pow rsqrt sin sinh
        sqrt tan tanh sigmoid gelu silu mish elu selu celu softplus hardswish log_sigmoid softmax safe_softmax
        log_softmax logsumexp
    """,
    "random": "native_dropout bernoulli rand rand_like randn randn_like normal uniform exponential multinomial",
    "reduction": """
        native_layer_norm native_group_norm native_batch_norm cudnn_batch_norm rms_norm sum mean var
        var_mean std amax amin argmax argmin prod norm cumsum cumprod sort topk avg_pool2d max_pool2d_with_indices
        adaptive_avg_pool2d mean_dim batch_norm_elemt batch_norm_gather_stats native_batch_norm_legit
        native_batch_norm_legit_no_training native_batch_norm_legit_functional linalg_vector_norm squared_norm
    """,
    "gather": """
        embedding embedding_dense index index_add index_select index_put gather scatter scatter_add scatter_reduce take
        nll_loss_forward nll_loss nll_loss2d_forward nll_loss2d masked_select nonzero one_hot slice select
        slice_scatter select_scatter embedding_bag local_part
    """,
}
# Kernels of norms that read what they normalize once for its statistics, or for gradients of weights, and once more.
_READ_TWICE = """
    native_batch_norm cudnn_batch_norm _native_batch_norm_legit _native_batch_norm_legit_functional native_group_norm
    native_batch_norm_backward cudnn_batch_norm_backward native_group_norm_backward native_layer_norm_backward
    _fused_rms_norm_backward
"""
_KIND = {name: kind for kind, names in _NAMES.items() for name in names.split()}


class NodeCost(NamedTuple):
    """The work of one node on one rank.

    ``kind`` is one of those of :mod:`shardgraph.cost_models.device`, ``"collective"``, ``"copy"`` (between host and
    device), or ``"free"`` for waits and nodes that call no operator; ``dtype`` is that of the first floating-point
    result, or operand of work counted in FLOPs. ``read`` and ``written`` are bytes.
    ``causal`` is the sequence length of causal attention that skips masked blocks, whose FLOPs are counted in full;
    otherwise 0. ``known`` is False for an operation without a formula, which is priced by its bytes. ``alignment`` is
    that of the rows of a product's matrices, in bytes.
    """

    kind: str
    dtype: str
    flops: int = 0
    read: int = 0
    written: int = 0
    causal: int = 0
    known: bool = True
    alignment: int = ALIGNED

    @property
    def moved(self) -> int:
        """Bytes read and written."""
        return self.read + self.written

    def executed(self, on_cpu: bool) -> float:
        """FLOPs that are executed: a flash kernel, the CPU's or a GPU's, skips blocks that a causal mask hides."""
        return self.flops * (causal_part(self.causal, on_cpu) if self.causal else 1.0)


def node_costs(gm: fx.GraphModule, fused: bool = False) -> dict[fx.Node, NodeCost]:
    """The cost of every node of a graph, from its ``meta["val"]``.

    With ``fused``, chains of pointwise operations are assumed to be fused into one kernel, as by inductor: values
    between them cost no bytes.
    """
    costs = {node: node_cost(node) for node in gm.graph.nodes}
    return {node: _fuse(node, cost, costs) for node, cost in costs.items()} if fused else costs


def node_cost(node: fx.Node) -> NodeCost:
    """The cost of one node, where nothing is fused."""
    value, operands = node.meta.get("val"), [n.meta.get("val") for n in node.all_input_nodes]
    dtype = _dtype(value) or _dtype(operands)
    if node.op != "call_function":
        return NodeCost("free", dtype)
    operation = _operation(node.target)
    if _is_view(node, operation):
        return NodeCost(VIEW, dtype)
    if operation.free or not _has_tensors(value):
        return NodeCost("free", dtype)
    read, written = _bytes(operands), _bytes(value)
    if operation.started:
        return NodeCost(operation.started, dtype, 0, read, written)
    name = operation.name
    if (formula := _formula(node)) is not None:
        kind = "attention" if "attention" in name else "convolution" if "conv" in name else "matmul"
        args, kwargs = fx.map_arg((node.args, node.kwargs), lambda n: n.meta.get("val"))
        causal = _causal_length(node) if kind == "attention" else 0
        dtype = _dtype(operands) or dtype  # a product in 8 bits has a result of more
        alignment = _alignment([*operands, value]) if kind == "matmul" else ALIGNED
        return NodeCost(kind, dtype, formula(args, kwargs, value), read, written, causal, alignment=alignment)
    known = operation.kind
    if name == "_safe_softmax":  # a softmax, a comparison of its input, and a choice between its output and 0
        read, written = 3 * read, 2 * written
    elif operation.twice:
        read = 2 * read
    if known == "gather" and "backward" not in name:  # reads as much of its table as it writes
        read = written + _bytes(operands[1:])
    return NodeCost(known or "pointwise", dtype, 0, read, written, known=known is not None)


def _alignment(values: list[Any]) -> int:
    """The largest number of bytes, up to ``ALIGNED``, at multiples of which all rows of these matrices begin."""
    matrices = [value for value in values if isinstance(value, torch.Tensor) and value.dim() > 1]
    steps = (
        value.itemsize * stride
        for value in matrices
        for size, stride in zip(value.shape, value.stride(), strict=True)
        if size > 1 and stride > 1
    )
    return math.gcd(ALIGNED, *steps)


def _causal_length(node: fx.Node) -> int:
    names = [argument.name for argument in node.target._schema.arguments]
    arguments = dict(zip(names, node.args, strict=False)) | dict(node.kwargs)
    return arguments["query"].meta["val"].shape[-2] if arguments.get("is_causal") else 0


def _formula(node: fx.Node) -> Callable[[Any, Any, Any], int] | None:
    """A function of the node's (fake) arguments and result, or None."""
    if node.target in _ATTENTION_FLOPS:
        return lambda args, kwargs, value: _ATTENTION_FLOPS[node.target](*args)
    packet = getattr(node.target, "overloadpacket", None)
    if packet in flop_registry:
        return lambda args, kwargs, value: flop_registry[packet](*args, **kwargs, out_val=value)
    return None


def _equal_heads(operands: Any) -> list[tuple[int, ...]]:
    """Shapes of attention's operands, with as many heads of keys and values as of queries, as the kernel computes.

    The counter of torch 2.11 refuses fewer.
    """
    heads = operands[0].shape[1]  # of the queries, or of the gradient of their attention
    return [(batch, heads, *rest) for batch, _, *rest in (operand.shape for operand in operands)]


class _Operation(NamedTuple):
    """What the cost of a node needs to know of its target alone.

    ``started`` is the kind of what runs beside the computation; ``free``: a wait, or an element of a result. ``kind``
    is that of work counted in bytes, None if it is not known. ``twice``: operands are read two times.
    """

    name: str
    view: bool
    free: bool
    started: str
    kind: str | None
    twice: bool


@lru_cache(4096)
def _operation(target: Any) -> _Operation:
    name = str(getattr(target, "__name__", target)).split(".")[0]
    started = "collective" if target in ir.COLLECTIVES else "copy" if target in ir.DIRECTIONS else ""
    free = target is operator.getitem or target in (ir.WAIT, ir.WAIT_COPY)
    views = (ir.trim_shard, ir.local_chunk, ir.buckets.unpack, aten._unsafe_view.default)
    view = target in views or makes_view(target)
    return _Operation(name, view, free, started, _kind_by_bytes(target, name), name in _READ_TWICE.split())


def _is_view(node: fx.Node, operation: _Operation) -> bool:
    if node.target is ir.buckets.pack and ir.buckets.stored(node):
        return True  # of shards that lie side by side
    return operation.view


def _kind_by_bytes(target: Any, name: str) -> str | None:
    name = name.strip("_")
    for each in (name, name.removesuffix("_backward_data").removesuffix("_backward")):
        if each in _KIND:
            return _KIND[each]
    tags = getattr(target, "tags", ())
    return "reduction" if torch.Tag.reduction in tags else "pointwise" if torch.Tag.pointwise in tags else None


def _tensors(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    return [] if value is None else [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _has_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor) or bool(_tensors(value))


def _bytes(value: Any) -> int:
    if isinstance(value, torch.Tensor):
        return value.nbytes
    if isinstance(value, list):
        return sum(map(_bytes, value))
    return sum(tensor.nbytes for tensor in _tensors(value))


def _dtype(value: Any) -> str:
    tensors = [tensor for each in value for tensor in _tensors(each)] if isinstance(value, list) else _tensors(value)
    if not tensors:
        return ""
    return _name(next((tensor.dtype for tensor in tensors if tensor.dtype.is_floating_point), tensors[0].dtype))


@cache
def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


_FUSIBLE = ("pointwise", "transcendental")


def _fuse(node: fx.Node, cost: NodeCost, costs: Mapping[fx.Node, NodeCost]) -> NodeCost:
    """The cost without the bytes of values that a fused kernel keeps in registers."""
    if cost.kind not in _FUSIBLE:
        return cost
    read = sum(_bytes(n.meta.get("val")) for n in node.all_input_nodes if costs[n].kind not in _FUSIBLE)
    inside = bool(node.users) and all(costs[user].kind in _FUSIBLE for user in node.users)
    return cost._replace(read=read, written=0 if inside else cost.written)
