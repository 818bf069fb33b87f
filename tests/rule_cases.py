"""One line for each operation of which the proof has a rule, with which ``tests/test_proof_rules.py`` tests it.

A case is the operation, its operands, and a function from these to its arguments if there are others. A function must
take sizes from the operands, which are smaller on ranks. Dimensions that must be divided alike have one size, others
another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import transformers.integrations.moe  # noqa: F401  (it defines the operations)
from torch import Tensor

from shardgraph import ir
from shardgraph.ir import fused
from shardgraph.plans.annotations.constrain import CONSTRAIN

aten = torch.ops.aten
grouped_mm_fallback = torch.ops.transformers.grouped_mm_fallback
grouped_mm_fallback_backward = torch.ops.transformers.grouped_mm_fallback_backward

Arguments = Callable[..., tuple[Any, ...]]


@dataclass(frozen=True)
class Operand:
    """A random tensor: numbers, positive ones, indices below a number, or flags; or the numbers 0, 1, 2, ...; or the
    ends of groups of a number of rows."""

    kind: str
    shape: tuple[int, ...]
    below: int = 0

    def value(self, seed: int, shape: Sequence[int]) -> Tensor:
        generator = torch.Generator().manual_seed(seed)
        if self.kind == "index":
            return torch.randint(self.below, tuple(shape), generator=generator)
        if self.kind == "count":
            return torch.arange(shape[0])
        if self.kind == "ends":
            return (torch.arange(shape[0]) + 1) * self.below
        if self.kind == "flag":
            return torch.rand(tuple(shape), generator=generator) < 0.5
        value = torch.randn(tuple(shape), generator=generator, dtype=torch.float64)
        return value.abs() + 0.5 if self.kind == "positive" else value


def real(*shape: int) -> Operand:
    return Operand("real", shape)


def positive(*shape: int) -> Operand:
    return Operand("positive", shape)


def index(below: int, *shape: int) -> Operand:
    return Operand("index", shape, below)


def count(size: int) -> Operand:
    return Operand("count", (size,))


def ends(groups: int, rows: int) -> Operand:
    return Operand("ends", (groups,), rows)


def flag(*shape: int) -> Operand:
    return Operand("flag", shape)


@dataclass(frozen=True)
class Case:
    """One operation with operands, and its other arguments; ranks may share each dimension of the sizes ``shares``."""

    target: Any
    operands: tuple[Operand, ...]
    arguments: Arguments
    shares: tuple[int, ...] = ()

    def __str__(self) -> str:
        return str(self.target)


def case(
    target: Any, *operands: Operand, to: Arguments = lambda *tensors: tensors, shares: tuple[int, ...] = ()
) -> Case:
    return Case(target, operands, to, shares)


# -- the operations ----------------------------------------------------------------------------------------------

Q = real(4, 2, 6, 8)
ROWS = (real(4, 6, 10), real(10), real(10))
IMAGES, FILTERS = real(4, 6, 5, 5), real(8, 6, 3, 3)
CONVOLUTION = ([1, 1], [1, 1], [1, 1], False, [0, 0], 1)
GROUPED = ([1, 1], [1, 1], [1, 1], False, [0, 0], 2)
TRANSPOSED = ([1, 1], [1, 1], [1, 1], True, [0, 0], 1)


ONE = {  # of one operand, with the same argument or none
    **dict.fromkeys([aten.relu.default, aten.silu.default, aten.tanh.default, aten.cos.default, aten.sin.default], ()),
    **dict.fromkeys([aten.abs.default, aten.neg.default, aten.sigmoid.default, aten.exp.default], ()),
    aten.pow.Tensor_Scalar: (2,),
    aten.gelu.default: (),
    aten.clamp.default: (-0.5, 0.5),
    aten.add.Scalar: (1.5,),
    aten.rsub.Scalar: (1.5,),
    aten.ge.Scalar: (0,),
    aten.gt.Scalar: (0,),
    aten.lt.Scalar: (0,),
    aten.eq.Scalar: (0,),
    aten.alias.default: (),
    aten.detach.default: (),
    aten.clone.default: (),
    aten.lift_fresh_copy.default: (),
    aten.lift_fresh.default: (),
    aten.contiguous.default: (),
    ir.WAIT: (),
    aten.mul.Scalar: (-3.0,),
    aten.div.Scalar: (-4.0,),
    aten.mean.default: (),
    aten.sum.default: (),
    aten.full_like.default: (2.5,),
    aten.zeros_like.default: (),
    aten.ones_like.default: (),
}
TWO = {  # of two operands at the same place, the second of which may be positive
    **dict.fromkeys([aten.minimum.default, aten.maximum.default, aten.le.Tensor, aten.lt.Tensor, aten.eq.Tensor], real),
    **dict.fromkeys([aten.mul.Tensor, aten.add.Tensor, aten.sub.Tensor], real),
    **dict.fromkeys([aten.silu_backward.default, aten.gelu_backward.default, aten.tanh_backward.default], real),
    aten.sigmoid_backward.default: real,
    aten.div.Tensor: positive,
}

ALONG = {  # of one operand, along its dimension of 6 elements; the others, of 4 and 8, may be shared
    **dict.fromkeys([aten.cumsum.default, aten.cumprod.default, aten.logcumsumexp.default], (1,)),
    **dict.fromkeys([aten.cummax.default, aten.cummin.default, aten.sort.default, aten.median.dim], (1,)),
    **dict.fromkeys([aten.max.dim, aten.min.dim, aten.prod.dim_int, aten.glu.default], (-2,)),
    **dict.fromkeys([aten.var.correction, aten.std.correction, aten.var_mean.correction], ([1], {"correction": 1})),
    **dict.fromkeys([aten.flip.default, aten.logsumexp.default], ([1],)),
    aten.sort.stable: ({"stable": True, "dim": 1, "descending": True},),
    aten.roll.default: ([2], [1]),
    aten.topk.default: (3, 1),
    aten.kthvalue.default: (2, 1),
    aten.linalg_vector_norm.default: (3, [1]),
}

CASES = [
    *(case(target, real(4, 6), to=lambda x, rest=rest: (x, *rest)) for target, rest in ONE.items()),
    *(case(target, real(4, 6), second(4, 6)) for target, second in TWO.items()),
    *(case(target, real(4, 6), second(6)) for target, second in TWO.items() if "backward" not in str(target)),
    case(aten.rsqrt.default, positive(4, 6)),
    case(aten.log.default, positive(4, 6)),
    case(aten.mul.Tensor, real(4, 6), to=lambda x: (x, x)),
    case(aten.mul.Tensor, real(4, 6), to=lambda x: (x, -3.0)),
    case(aten.mul.Tensor, index(9, 4, 6), to=lambda x: (x, 3)),
    case(aten.add.Tensor, index(9, 4, 6), to=lambda x: (x, 3)),
    case(aten.add.Tensor, real(4, 6), to=lambda x: (x, 3)),
    case(aten.add.Tensor, real(4, 6), real(4, 6), to=lambda x, y: (x, y, {"alpha": -2})),
    case(aten.sub.Tensor, real(4, 6), to=lambda x: (x, x)),
    case(aten.bitwise_and.Tensor, flag(4, 6), flag(4, 6)),
    case(aten.where.self, flag(4, 6), real(4, 6), real(4, 6)),
    case(aten.threshold_backward.default, real(4, 6), real(4, 6), to=lambda g, x: (g, x, 0)),
    case(aten.native_dropout_backward.default, real(4, 6), flag(4, 6), to=lambda g, m: (g, m, 2.0)),
    case(aten.masked_fill.Scalar, real(4, 6), flag(4, 6), to=lambda x, m: (x, m, 7.0)),
    case(aten._to_copy.default, index(9, 4, 6), to=lambda x: (x, {"dtype": torch.float64})),
    case(aten._to_copy.default, real(4, 6), to=lambda x: (x, {"dtype": torch.int64})),
    # moves
    case(aten.view.default, real(4, 6, 2), to=lambda x: (x, [x.shape[0] * x.shape[1], x.shape[2]])),
    case(aten.view.default, real(4, 6, 2), to=lambda x: (x, [x.shape[0], x.shape[1] * x.shape[2]])),
    case(aten.view.default, real(12, 8), to=lambda x: (x, [2, x.shape[0] // 2, 2, x.shape[1] // 2])),
    case(aten.view.default, real(12, 8), to=lambda x: (x, [x.shape[0], x.shape[1] // 2, 2])),
    case(aten.reshape.default, real(4, 6, 8), to=lambda x: (x, [-1])),
    case(aten._unsafe_view.default, real(4, 6, 8), to=lambda x: (x, [-1, x.shape[2]])),
    case(aten.permute.default, real(4, 6, 8), to=lambda x: (x, [2, 0, -2])),
    case(CONSTRAIN, real(4, 6), to=lambda x: (x, 0, 1, None, "")),
    case(aten.transpose.int, real(4, 6, 8), to=lambda x: (x, 0, -1)),
    case(aten.t.default, real(4, 6)),
    case(aten.unsqueeze.default, real(4, 6), to=lambda x: (x, 1)),
    case(aten.unsqueeze.default, real(4, 6), to=lambda x: (x, -1)),
    case(aten.squeeze.default, real(4, 1, 6)),
    case(aten.squeeze.dim, real(4, 1, 6), to=lambda x: (x, -2)),
    case(aten.squeeze.dims, real(4, 1, 1, 6), to=lambda x: (x, [1, 2])),
    case(aten.squeeze.default, real(2, 6)),
    case(aten.expand.default, real(4, 1), to=lambda x: (x, [3, x.shape[0], 5])),
    case(aten.expand.default, real(2, 4), to=lambda x: (x, [6 if x.shape[0] == 1 else -1, -1])),
    # products and reductions
    case(aten.mm.default, real(4, 6), real(6, 8)),
    case(aten.bmm.default, real(2, 4, 6), real(2, 6, 8)),
    case(aten.addmm.default, real(8), real(4, 6), real(6, 8)),
    case(aten.addmm.default, real(4, 8), real(4, 6), real(6, 8), to=lambda *x: (*x, {"beta": 2, "alpha": -3})),
    *(
        case(target, real(4, 6, 8), to=lambda x, rest=rest: (x, *rest))
        for target in (aten.argmax.default, aten.argmin.default)
        for rest in [(1,), (-1, True)]
    ),
    *(case(target, real(4, 6, 8), to=lambda x: (x, [1])) for target in (aten.amax.default, aten.amin.default)),
    case(aten.amax.default, real(4, 6, 8), to=lambda x: (x, [0, -1], True)),
    case(aten.mean.dim, real(4, 6, 8), to=lambda x: (x, [1])),
    case(aten.mean.dim, real(4, 6, 8), to=lambda x: (x, [0, 2], True)),
    case(aten.sum.dim_IntList, real(4, 6, 8), to=lambda x: (x, [1])),
    case(aten.sum.dim_IntList, real(4, 6, 8), to=lambda x: (x, [0, -1], True)),
    *(
        case(target, real(4, 6, 8), to=lambda x, dim=dim: (x, dim, False))
        for target in (aten._softmax.default, aten._log_softmax.default)
        for dim in (1, -1)
    ),
    case(aten._safe_softmax.default, real(4, 6, 8), to=lambda x: (x, -1)),
    *(
        case(target, real(4, 6, 8), real(4, 6, 8), to=lambda g, y, dim=dim: (g, y, dim, torch.float64))
        for target in (aten._softmax_backward_data.default, aten._log_softmax_backward_data.default)
        for dim in (1, -1)
    ),
    # norms
    case(aten.native_layer_norm.default, *ROWS, to=lambda x, w, b: (x, [x.shape[-1]], w, b, 1e-5)),
    case(aten.native_layer_norm.default, real(4, 6, 10), to=lambda x: (x, [x.shape[-1]], None, None, 1e-5)),
    case(aten.native_layer_norm.default, real(4, 6, 10), to=lambda x: (x, list(x.shape[1:]), None, None, 1e-5)),
    case(
        aten.native_layer_norm_backward.default,
        *(real(4, 6, 10), real(4, 6, 10), real(4, 6, 1), positive(4, 6, 1), real(10), real(10)),
        to=lambda g, x, m, r, w, b: (g, x, [x.shape[-1]], m, r, w, b, [True, True, True]),
    ),
    case(fused.RMS_NORM, real(4, 6, 10), real(10), to=lambda x, w: (x, [x.shape[-1]], w, 1e-5)),
    case(fused.RMS_NORM, real(4, 6, 10), to=lambda x: (x, [x.shape[-1]], None, 1e-5)),
    case(fused.RMS_NORM, real(4, 6, 10), to=lambda x: (x, list(x.shape[1:]), None, 1e-5)),
    case(
        fused.RMS_NORM_BACKWARD,
        *(real(4, 6, 10), real(4, 6, 10), positive(4, 6, 1), real(10)),
        to=lambda g, x, r, w: (g, x, [x.shape[-1]], r, w),
    ),
    case(
        aten._native_batch_norm_legit_functional.default,
        *(IMAGES, real(6), real(6), real(6), positive(6)),
        to=lambda x, w, b, m, v: (x, w, b, m, v, True, 0.1, 1e-5),
    ),
    case(
        aten.native_batch_norm_backward.default,
        *(IMAGES, IMAGES, real(6), real(6), positive(6), real(6), positive(6)),
        to=lambda g, x, w, m, v, sm, sr: (g, x, w, m, v, sm, sr, True, 1e-5, [True, True, True]),
    ),
    # lookups and pieces
    case(aten.embedding.default, real(10, 8), index(10, 4, 6)),
    case(
        aten.embedding_dense_backward.default,
        *(real(4, 6, 8), index(10, 4, 6)),
        to=lambda g, i: (g, i, 10, -1, False),
    ),
    case(aten.embedding_dense_backward.default, real(4, 6, 8), index(10, 4, 6), to=lambda g, i: (g, i, 10, 3, False)),
    case(aten.gather.default, real(4, 6), index(6, 4, 3), to=lambda x, i: (x, 1, i)),
    case(aten.gather.default, real(4, 6), index(6, 4, 3), to=lambda x, i: (x, -1, i)),
    case(aten.index.Tensor, real(4, 10, 6), index(10, 8), to=lambda x, i: (x, [None, i])),
    case(aten.index.Tensor, real(10, 6), index(10, 4, 8), to=lambda x, i: (x, [i])),
    case(aten.index.Tensor, real(4, 10, 6), index(4, 8), index(10, 8), to=lambda x, i, j: (x, [i, j]), shares=(6, 8)),
    case(aten.index.Tensor, real(4, 10, 6), index(4, 8), index(6, 8), to=lambda x, i, j: (x, [i, None, j])),
    case(aten.index.Tensor, real(4, 10, 6), index(4, 8, 1), index(10, 2), to=lambda x, i, j: (x, [i, j])),
    case(
        aten.index.Tensor,
        *(real(4, 10, 6), count(4), index(10, 4)),
        to=lambda x, i, j: (x, [i, j]),
        shares=(6,),
    ),
    case(aten.index.Tensor, real(10, 4, 6), index(10, 4), count(4), to=lambda x, i, j: (x, [i, j]), shares=(6,)),
    case(
        aten.index_put.default, real(4, 10), count(4), index(10, 4), real(4), to=lambda x, i, j, y: (x, [i, j], y, True)
    ),
    case(
        aten.index_put.default,
        *(real(4, 10, 6), count(4), index(10, 4), real(4, 6)),
        to=lambda x, i, j, y: (x, [i, j], y, True),
        shares=(6,),
    ),
    case(aten.slice_backward.default, real(4, 6), to=lambda g: (g, [g.shape[0], 10], 1, 2, 8, 1)),
    case(aten.slice_backward.default, real(4, 6), to=lambda g: (g, [g.shape[0], 10], 1, 4, 10, 1)),
    case(aten.select_backward.default, real(4, 6), to=lambda g: (g, [g.shape[0], 10, g.shape[1]], 1, -3)),
    case(aten.slice.Tensor, real(4, 6), to=lambda x: (x, 1, 1, 4)),
    case(aten.slice.Tensor, real(4, 6), to=lambda x: (x, -1, 0, 6, 2)),
    case(aten.slice.Tensor, real(4, 8), to=lambda x: (x, 1, 0, x.shape[1] // 2)),
    case(aten.slice.Tensor, real(4, 8), to=lambda x: (x, 1, x.shape[1] // 2)),
    case(aten.select.int, real(4, 6), to=lambda x: (x, 0, -1)),
    case(aten.split.Tensor, real(4, 8), to=lambda x: (x, x.shape[1] // 2, 1)),
    case(aten.split.Tensor, real(4, 6), to=lambda x: (x, 4, -1)),
    case(aten.split_with_sizes.default, real(4, 6), to=lambda x: (x, [1, 5], 1)),
    case(aten.split_with_sizes.default, real(4, 8), to=lambda x: (x, [x.shape[1] // 2] * 2, 1)),
    case(aten.cat.default, real(4, 8), real(4, 8), to=lambda x, y: ([x, y], 1)),
    case(aten.cat.default, real(4, 8), real(4, 6), to=lambda x, y: ([x, y], -1)),
    case(aten.stack.default, real(4, 6), real(4, 6), to=lambda x, y: ([x, y], 1)),
    case(aten.copy.default, real(4, 6), real(4, 1)),
    case(aten.copy.default, real(4, 6), real(4, 6)),
    case(aten.constant_pad_nd.default, real(4, 6, 8), to=lambda x: (x, [1, 2])),
    case(aten.constant_pad_nd.default, real(4, 6, 8), to=lambda x: (x, [0, 0, -1, 2], 3.0)),
    case(aten.slice_scatter.default, real(4, 6), real(4, 2), to=lambda x, y: (x, y, 1, 2, 4)),
    case(aten.slice_scatter.default, real(4, 6), real(4, 2), to=lambda x, y: (x, y, -1, 0, 3, 2)),
    # along a dimension that is needed whole
    *(case(target, real(4, 6, 8), to=lambda x, rest=rest: (x, *rest), shares=(4, 8)) for target, rest in ALONG.items()),
    case(aten.sort.default, real(4, 6, 8), shares=(4, 6)),
    case(aten.sort.default, real(4, 6, 8), to=lambda x: (x, 1, True), shares=(4, 8)),
    case(aten.max.dim, real(4, 6, 8), to=lambda x: (x, 1, True), shares=(4, 8)),
    case(aten.logsumexp.default, real(4, 6, 8), to=lambda x: (x, [0, 2], True), shares=(6,)),
    case(
        aten.var.correction, real(4, 6, 8), to=lambda x: (x, [0, -1], {"correction": 0, "keepdim": True}), shares=(6,)
    ),
    case(aten.linalg_vector_norm.default, real(4, 6, 8), to=lambda x: (x, float("inf"), [1], True), shares=(4, 8)),
    case(aten.linalg_vector_norm.default, real(4, 6, 8), to=lambda x: (x, 2, [1]), shares=(4, 8)),
    case(aten.flip.default, real(4, 6, 8), to=lambda x: (x, [0, 2]), shares=(6,)),
    case(aten.roll.default, real(4, 6, 8), to=lambda x: (x, [1, -1], [0, 1]), shares=(8,)),
    case(aten.all.dim, flag(4, 6, 8), to=lambda x: (x, 1), shares=(4, 8)),
    case(aten.any.dim, flag(4, 6, 8), to=lambda x: (x, 1, True), shares=(4, 8)),
    case(aten.glu_backward.default, real(4, 3), real(4, 6), to=lambda g, x: (g, x, 1), shares=(4,)),
    case(aten.tril.default, real(4, 6, 8), shares=(4,)),
    case(aten.tril.default, real(4, 6, 8), to=lambda x: (x, 1), shares=(4,)),
    case(aten.triu.default, real(4, 6, 8), shares=(4,)),
    case(aten.scatter.src, real(4, 6), index(6, 4, 1), real(4, 1), to=lambda x, i, y: (x, 1, i, y), shares=(4,)),
    case(aten.scatter.value, real(4, 6), index(6, 4, 3), to=lambda x, i: (x, -1, i, 2.0), shares=(4,)),
    case(
        aten.scatter_add.default, real(4, 6), index(6, 4, 8), real(4, 8), to=lambda x, i, y: (x, 1, i, y), shares=(4,)
    ),
    case(aten.max_pool2d_with_indices.default, real(2, 4, 6, 6), to=lambda x: (x, [2, 2], [2, 2]), shares=(2, 4)),
    case(
        aten.max_pool2d_with_indices_backward.default,
        *(real(2, 4, 3, 3), real(2, 4, 6, 6), index(36, 2, 4, 3, 3)),
        to=lambda g, x, i: (g, x, [2, 2], [2, 2], [0, 0], [1, 1], False, i),
        shares=(2, 4),
    ),
    case(aten.avg_pool2d.default, real(2, 4, 6, 6), to=lambda x: (x, [2, 2]), shares=(2, 4)),
    case(
        aten.avg_pool2d_backward.default,
        *(real(2, 4, 3, 3), real(2, 4, 6, 6)),
        to=lambda g, x: (g, x, [2, 2], [], [0, 0], False, True, None),
        shares=(2, 4),
    ),
    case(aten._adaptive_avg_pool2d.default, real(2, 4, 6, 6), to=lambda x: (x, [3, 2]), shares=(2, 4)),
    case(aten._adaptive_avg_pool2d_backward.default, real(2, 4, 3, 3), real(2, 4, 6, 6), shares=(2, 4)),
    *(
        case(
            aten.native_group_norm.default,
            *(real(4, 6, 5), *parameters),
            to=lambda x, w=None, b=None: (x, w, b, x.shape[0], x.shape[1], 5, 3, 1e-5),
            shares=(4,),
        )
        for parameters in [(), (real(6), real(6))]
    ),
    case(
        aten.native_group_norm_backward.default,
        *(real(4, 6, 5), real(4, 6, 5), real(4, 3), positive(4, 3), real(6)),
        to=lambda g, x, m, r, w: (g, x, m, r, w, x.shape[0], x.shape[1], 5, 3, [True, True, True]),
        shares=(4,),
    ),
    # tokens of experts
    case(aten.baddbmm.default, real(2, 4, 8), real(2, 4, 6), real(2, 6, 8)),
    case(
        aten.baddbmm.default,
        *(real(2, 1, 8), real(2, 4, 6), real(2, 6, 8)),
        to=lambda *tensors: (*tensors, {"beta": 2, "alpha": -3}),
    ),
    case(grouped_mm_fallback.default, real(12, 4), real(3, 4, 8), ends(3, 4)),
    case(grouped_mm_fallback_backward.default, real(12, 4), real(3, 4, 8), ends(3, 4), real(12, 8)),
    case(aten.index_select.default, real(4, 10, 6), index(10, 8), to=lambda x, i: (x, 1, i)),
    case(aten.index_add.default, real(4, 10), index(10, 6), real(4, 6), to=lambda x, i, y: (x, -1, i, y)),
    case(
        aten.index_add.default,
        *(real(10, 4), index(10, 6), real(6, 4)),
        to=lambda x, i, y: (x, 0, i, y, {"alpha": -2}),
    ),
    case(aten.index_put.default, real(10, 4), index(10, 6), real(6, 4), to=lambda x, i, y: (x, [i], y, True)),
    case(
        aten.index_put.default,
        *(real(10, 4), index(10, 6, 2), real(6, 2, 4)),
        to=lambda x, i, y: (x, [i], y, True),
    ),
    # losses and attention
    *(
        case(
            aten.nll_loss_forward.default,
            real(4, 6),
            index(6, 4),
            to=lambda x, t, how=how, ignored=ignored: (x, t, None, how, ignored),
        )
        for how in (0, 1, 2)
        for ignored in (-100, 2)
    ),
    *(
        case(
            aten.nll_loss_forward.default,
            *(real(4, 6), index(6, 4), positive(6)),
            to=lambda x, t, w, how=how: (x, t, w, how, 2),
        )
        for how in (0, 1, 2)
    ),
    *(
        case(
            aten.nll_loss_backward.default,
            *(real(), real(4, 6), index(6, 4), positive()),
            to=lambda g, x, t, n, how=how: (g, x, t, None, how, 2, n),
        )
        for how in (1, 2)
    ),
    case(
        aten.nll_loss_backward.default,
        *(real(4), real(4, 6), index(6, 4), positive(6), positive()),
        to=lambda g, x, t, w, n: (g, x, t, w, 0, 2, n),
    ),
    case(
        aten.nll_loss_backward.default,
        *(real(), real(4, 6), index(6, 4), positive(6), positive()),
        to=lambda g, x, t, w, n: (g, x, t, w, 1, 2, n),
    ),
    case(fused.ATTENTION, Q, Q, Q, to=lambda q, k, v: (q, k, v, None, True, 0.3)),
    case(fused.ATTENTION, Q, Q, Q, real(4, 1, 6, 6), to=lambda q, k, v, m: (q, k, v, m, False, 0.3)),
    case(
        fused.ATTENTION_BACKWARD,
        *(Q, Q, Q, Q, Q, positive(4, 2, 6)),
        to=lambda g, q, k, v, o, s: (g, q, k, v, o, s, None, True, 0.3),
    ),
    # images
    case(aten.convolution.default, IMAGES, FILTERS, to=lambda x, w: (x, w, None, *CONVOLUTION)),
    case(aten.convolution.default, IMAGES, FILTERS, real(8), to=lambda x, w, b: (x, w, b, *CONVOLUTION)),
    case(aten.convolution.default, IMAGES, real(8, 3, 3, 3), to=lambda x, w: (x, w, None, *GROUPED)),
    case(aten.convolution.default, IMAGES, real(6, 8, 3, 3), to=lambda x, w: (x, w, None, *TRANSPOSED)),
    *(
        case(
            aten.convolution_backward.default,
            *(real(4, 8, 5, 5), IMAGES, filters),
            to=lambda g, x, w, options=options: (g, x, w, [8], *options, [True, True, True]),
        )
        for filters, options in [(FILTERS, CONVOLUTION), (real(8, 3, 3, 3), GROUPED), (real(6, 8, 3, 3), TRANSPOSED)]
    ),
]

WITHOUT: dict[Any, str] = {
    aten._grouped_mm.default: "has no double precision: tests/test_expert_parallel.py",
    **dict.fromkeys(
        ["transformers.grouped_mm_fallback.default", "transformers.grouped_mm_fallback_backward.default"],
        "is the name of an operation that has a case",
    ),
    aten.native_dropout.default: "draws random numbers, and is refused for what ranks do not have whole",
    ir.TO_HOST: "needs an accelerator; the elements are the same by definition",
    ir.TO_DEVICE: "needs an accelerator; the elements are the same by definition",
    ir.WAIT_COPY: "needs an accelerator; the elements are the same by definition",
    **dict.fromkeys(
        [aten.full.default, aten.scalar_tensor.default, aten.zeros.default, aten.ones.default],
        "has no operands that could be divided",
    ),
    **dict.fromkeys([aten.add_.Tensor, aten.addmm_.default], "writes an operand, and is typed as if it did not"),
    **dict.fromkeys([ir.first_row, ir.from_later], "is a number of the rank: tests/test_proof_vocabulary.py"),
    ir.SQUARED_NORM: "is of the elements that the rank has, whatever they are: tests/test_adascale.py",
    ir.update: "gives nothing: tests/test_proof_derived.py",
    **dict.fromkeys([aten.new_zeros.default, aten.new_ones.default], "has none of its operand's elements"),
}
