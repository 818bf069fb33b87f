"""Rules for activations that DTensor does not know, for what only joins or parts tensors, and for random numbers."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch.distributed.tensor import Shard
from torch.distributed.tensor.placement_types import Placement

from shardgraph.passes.sharding.options import Operation, Option, results
from shardgraph.passes.sharding.placements import PARTIAL, REPLICATE
from shardgraph.passes.sharding.rules import rule

aten = torch.ops.aten


@rule(
    aten.elu.default,
    aten.hardsigmoid.default,
    aten.hardtanh.default,
    aten.leaky_relu.default,
    aten.mish.default,
    aten.softplus.default,
    aten.elu_backward.default,
    aten.hardsigmoid_backward.default,
    aten.hardswish.default,
    aten.hardswish_backward.default,
    aten.hardtanh_backward.default,
    aten.leaky_relu_backward.default,
    aten.log_sigmoid_backward.default,
    aten.mish_backward.default,
    aten.rrelu_with_noise_backward.default,
    aten.softplus_backward.default,
    aten.view.dtype,  # of as many bytes
    aten._prelu_kernel.default,
    aten._prelu_kernel_backward.default,
    aten.copy.default,
    aten.fill.Tensor,
)
def elementwise(operation: Operation) -> Iterator[Option]:
    """Each element from those at its place; smaller operands are broadcast, and replicated where they are."""
    size = operation.result
    for dim in range(len(size)):
        before = []
        for tensor in operation.tensors:
            own = dim - len(size) + tensor.dim()
            before.append(Shard(own) if own >= 0 and tensor.shape[own] == size[dim] else REPLICATE)
        yield Option(tuple(before), (Shard(dim),) * len(results(operation.node)))


@rule(aten.glu.default, aten.glu_backward.default)
def gated(operation: Operation) -> Iterator[Option]:
    """Element by element but for the dimension whose second half gates the first."""
    args, rank = operation.node.args, len(operation.result)
    place = 2 if operation.node.target is aten.glu_backward.default else 1
    halved = (args[place] if len(args) > place else -1) % rank
    for dim in range(rank):
        if dim != halved:
            yield Option((Shard(dim),) * len(operation.tensors), (Shard(dim),))


@rule(aten.stack.default, replaces=True)
def stacked(operation: Operation) -> Iterator[Option]:
    """Operands alike, beside a new dimension; DTensor's strategy (torch 2.13) does not take a list of operands."""
    args, count = operation.node.args, len(operation.tensors)
    new = (args[1] if len(args) > 1 else 0) % len(operation.result)
    for dim in range(operation.tensors[0].dim()):
        yield Option((Shard(dim),) * count, (Shard(dim + (dim >= new)),))
    if all(tensor.is_floating_point() for tensor in operation.tensors):
        yield Option((PARTIAL,) * count, (PARTIAL,))


@rule(aten.unbind.int, replaces=True)
def unbound(operation: Operation) -> Iterator[Option]:
    """The parts along a dimension, which are sharded along another one as the whole."""
    args, (whole,) = operation.node.args, operation.tensors
    gone, count = (args[1] if len(args) > 1 else 0) % whole.dim(), len(results(operation.node))
    for dim in range(whole.dim()):
        if dim != gone:
            yield Option((Shard(dim),), (Shard(dim - (dim > gone)),) * count)
    if whole.is_floating_point():
        yield Option((PARTIAL,), (PARTIAL,) * count)


@rule(aten.index_add.default, replaces=True)
def index_add(operation: Operation) -> Iterator[Option]:
    """Rows of a graph's nodes from its edges: edges are sharded with a partial sum, or what nodes hold is."""
    whole, args = operation.tensors[0], operation.node.args
    rows = args[1] % max(whole.dim(), 1)
    for dim in range(whole.dim()):
        if dim != rows:
            yield Option((Shard(dim), REPLICATE, Shard(dim)), (Shard(dim),))
    if whole.is_floating_point() and whole.dim():
        yield Option((PARTIAL, REPLICATE, PARTIAL), (PARTIAL,))
        yield Option((PARTIAL, Shard(0), Shard(rows)), (PARTIAL,))


@rule(
    aten.rand.default, aten.randn.default, aten.randint.low, aten.randint.default, aten.randperm.default, replaces=True
)
def drawn(operation: Operation) -> Iterator[Option]:
    """Every rank draws the whole tensor, and takes its shard."""
    yield Option((), (REPLICATE,))


@rule(aten.eye.default, aten.eye.m)
def identity(operation: Operation) -> Iterator[Option]:
    """Small enough to be made on every rank, which then takes its shard."""
    yield Option((), (REPLICATE,))


@rule(
    aten.rand_like.default, aten.randn_like.default, aten.randint_like.low_dtype, aten.randint_like.default,
    aten.bernoulli.p,
    replaces=True,
)  # fmt: skip
def drawn_like(operation: Operation) -> Iterator[Option]:
    """In the shape of an operand, of which nothing else is read: drawn for the whole tensor, as for dropout."""
    for dim in range(len(operation.result)):
        cut: Placement = Shard(dim)
        yield Option((cut,), (cut,), "drawn")
