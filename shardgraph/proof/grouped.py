"""Grouped products: of rows in as many groups as there are matrices, each group with its matrix.

Where the groups end is data, so that rows and groups are needed whole. The inner dimension and the columns run through
as in any product.
"""

from __future__ import annotations

import torch

from shardgraph.proof.held import Held, UntypedError
from shardgraph.proof.labels import Rule, linear
from shardgraph.proof.rules import Ruled, rule


@rule(torch.ops.aten._grouped_mm.default, "transformers.grouped_mm_fallback.default")
def _product(left: Held, right: Held, ends: Held, *_: None) -> Ruled:
    """``[rows, k] x [groups, k, n]``, or for gradients of matrices ``[k, rows] x [rows, n] -> [groups, k, n]``."""
    if len(left.dims) == 2 and len(right.dims) == 3:
        made = Rule([[None, "k"], [None, "k", "n"], [None]], [[left.shape[0], "n"]], {"k": "sum"}, linear(0, 1))
    elif len(left.dims) == len(right.dims) == 2:
        made = Rule([["k", None], [None, "n"], [None]], [[ends.shape[0], "k", "n"]], linear=linear(0, 1))
    else:
        raise UntypedError(f"a grouped product of {len(left.dims)} and {len(right.dims)} dimensions")
    return [left, right, ends], None, made


@rule("transformers.grouped_mm_fallback_backward.default")
def _gradients(rows: Held, matrices: Held, ends: Held, gradient: Held) -> Ruled:
    """Of rows, which is a sum over columns, and of matrices."""
    operands = [[None, "k"], [None, "k", "n"], [None], [None, "n"]]
    results = [[rows.shape[0], "k"], [ends.shape[0], "k", "n"]]
    return [rows, matrices, ends, gradient], None, Rule(operands, results, {"n": "sum"}, linear(3))
