"""``shardgraph::squared_norm``: the sum of the squares of a tensor's elements, without a copy of the tensor.

It reads elements of half precision in single precision, and gives a 0-dimensional tensor in double precision, in which
such sums of all ranks are added up and subtracted from each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

torch.library.define("shardgraph::squared_norm", "(Tensor x) -> Tensor", tags=(torch.Tag.pt2_compliant_tag,))
SQUARED_NORM = torch.ops.shardgraph.squared_norm.default


@torch.library.impl("shardgraph::squared_norm", "default")
def _(x: Tensor) -> Tensor:
    norm: Tensor = torch.linalg.vector_norm(x, dtype=torch.promote_types(x.dtype, torch.float32))
    return norm.double().square()


@torch.library.register_fake("shardgraph::squared_norm")
def _(x: Tensor) -> Tensor:
    return x.new_empty((), dtype=torch.float64)
