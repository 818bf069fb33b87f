"""Memory that CPU kernels take for themselves inside of an operation, beside its operands and results.

A convolution of oneDNN copies its operands and results to blocked layouts that depend on sizes, instruction set and
threads; dropout makes its mask in floating point; many kernels first copy operands that are not contiguous. No formula
of ours would follow the library's choices, so each different operation runs once, on zeros of its sizes, and the
allocator's events say what it took. Nothing is known here of operations on more than 256 MiB, which are not run since
an analysis must not need their memory, of cuDNN's workspaces, and of other devices' kernels: they count as none.
"""

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import fx
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from shardgraph import ir
from shardgraph.torch_api import allocations, undisturbed

# Whose CPU kernels allocate; others (matrix products, pointwise operations) work in their operands and results.
_NAMES = """
    convolution convolution_backward im2col col2im native_dropout native_dropout_backward roll cumsum
    _softmax _softmax_backward_data _log_softmax _log_softmax_backward_data _safe_softmax
    native_layer_norm native_layer_norm_backward native_group_norm native_group_norm_backward
    native_batch_norm_backward _native_batch_norm_legit_functional embedding embedding_dense_backward
    upsample_bilinear2d upsample_bilinear2d_backward max_pool2d_with_indices max_pool2d_with_indices_backward
    avg_pool2d avg_pool2d_backward topk sort
"""
_ALLOCATE = frozenset(_NAMES.split())
_LARGEST = 2**28
"""Bytes of an operation's operands and results up to which it is run."""


class _Operand(NamedTuple):
    """A tensor's sizes in elements, and its type."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype

    def zeros(self) -> torch.Tensor:
        if 0 in self.shape:
            return torch.zeros(self.shape, dtype=self.dtype, device="cpu")
        last = sum((size - 1) * stride for size, stride in zip(self.shape, self.stride, strict=True))
        return torch.zeros(last + 1, dtype=self.dtype, device="cpu").as_strided(self.shape, self.stride)


def workspace(node: fx.Node) -> int:
    """Bytes that the node's kernel has allocated at its peak in addition to its results; 0 if not on a CPU."""
    name = getattr(getattr(node.target, "overloadpacket", None), "__name__", "")
    fused = node.target in ir.fused.OPERATORS
    if not (fused or name in _ALLOCATE):
        return 0
    values = fx.map_arg((node.args, node.kwargs), lambda each: each.meta["val"])
    leaves, spec = tree_flatten(values)
    tensors = [leaf for leaf in leaves if isinstance(leaf, torch.Tensor)]
    if any(tensor.device.type != "cpu" for tensor in tensors):
        return 0
    returned = [leaf for leaf in tree_leaves(node.meta.get("val")) if isinstance(leaf, torch.Tensor)]
    if sum(tensor.nbytes for tensor in (*tensors, *returned)) > _LARGEST:
        return 0
    kernel = ir.fused.kernel_on(node.target, "cpu") if fused else node.target
    return _measured(kernel, tuple(_signature(leaf) for leaf in leaves), spec)


def _signature(leaf: Any) -> Any:
    return _Operand(tuple(leaf.shape), leaf.stride(), leaf.dtype) if isinstance(leaf, torch.Tensor) else leaf


@cache
def _measured(kernel: Any, leaves: tuple[Any, ...], spec: TreeSpec) -> int:
    def run() -> int:
        args, kwargs = tree_unflatten([leaf.zeros() if isinstance(leaf, _Operand) else leaf for leaf in leaves], spec)
        try:
            events, results = allocations(lambda: kernel(*args, **kwargs))
        except RuntimeError:  # it refuses such operands, and will say so to whoever runs the model
            return 0
        given = _storages((args, kwargs))
        returned = sum(storage.nbytes() for key, storage in _storages(results).items() if key not in given)
        return max(0, max(accumulate(events), default=0) - returned)

    return undisturbed(run)


def _storages(value: Any) -> dict[int, torch.UntypedStorage]:
    storages = (leaf.untyped_storage() for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor))
    return {storage.data_ptr(): storage for storage in storages}
