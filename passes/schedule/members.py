"""Which parameters share a bucket: decided by their names and sizes, so that all graphs of a plan have the same."""

from __future__ import annotations

import math
from collections import Counter

import torch

from shardgraph.passes.analysis.names import layer_of
from shardgraph.passes.base import Context
from shardgraph.passes.builder import padded_rows
from shardgraph.plans.precision import dtype_of

ALONE = 8
"""A tensor of more than this fraction of a bucket has a collective of its own: a bucket is as large as makes its
latency a small part of its time, so for such a tensor the copies into and out of a bucket take as long as they save."""


def bucket_of(context: Context) -> dict[str, int]:
    """The number of the bucket of each parameter that has one, by name.

    Buckets are filled in the order in which the model registers its parameters, with at most ``plan.bucket`` bytes of
    gradients each. They do not cross the boundary of a layer that is larger than a bucket: its collectives take so long
    that the latency of one more is a small part of it, and equal layers keep equal buckets.
    """
    most = context.plan.bucket
    sizes = {fqn: _nbytes(context, fqn) for fqn in context.shapes} if most else {}
    layers: Counter[str] = Counter()
    for fqn, nbytes in sizes.items():
        layers[_layer(fqn)] += nbytes
    buckets: dict[str, int] = {}
    number = filled = 0
    before = ""
    for fqn, nbytes in sizes.items():
        if not 0 < nbytes * ALONE <= most:
            continue
        layer = _layer(fqn)
        bounded = layer != before and max(layers[layer], layers[before]) > most
        if bounded or filled + nbytes > most:
            number, filled = number + 1, 0
        buckets[fqn] = number
        filled, before = filled + nbytes, layer
    return buckets


def _layer(fqn: str) -> str:
    """That of a parameter, whose own name may be a number."""
    return layer_of(fqn.rpartition(".")[0])


def _nbytes(context: Context, fqn: str) -> int:
    """The bytes of a parameter's gradient as it is reduced, with the padding that makes its shards equal."""
    shape, entry = context.shapes[fqn], context.parameters[fqn]
    if not shape:
        elements = 1
    else:
        ranks = context.plan.mesh[entry.shard_axis][1] if entry.shard_axis is not None else 1
        elements = padded_rows(shape[0], ranks) * math.prod(shape[1:])
    dtypes = [context.stored.get(fqn, torch.get_default_dtype())]
    if context.plan.precision.reduce is not None:
        dtypes.append(dtype_of(context.plan.precision.reduce))
    return elements * max(dtype.itemsize for dtype in dtypes)
