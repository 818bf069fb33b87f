"""Rows of a parameter that forward shortens in place before it reads them, as embeddings with ``max_norm`` do."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from shardgraph.ir.attributes import ROLE
from shardgraph.ir.roles import Role

_EPS = 1e-7
"""What ``torch.embedding_renorm_`` adds to a norm before it divides by it (aten/src/ATen/native/Embedding.cpp)."""


@dataclass(frozen=True)
class ShortenedRows:
    """Before a call, rows of the parameter ``fqn`` of a ``norm_type``-norm above ``max_norm`` are shortened to it, in
    place: those that the call looks up.

    ``indices`` is the graph that computes these rows' numbers, of inputs and buffers alone. The captured graph itself
    only reads the parameter. So which rows these are can be agreed on by all ranks, and be of all microbatches, before
    any of them reads one.
    """

    fqn: str
    max_norm: float
    norm_type: float
    indices: fx.GraphModule

    def rows_of(self, value: Callable[[Role], Any]) -> torch.Tensor:
        """The numbers of the rows that a call looks up, whose inputs and buffers have these values."""
        inputs = [value(ROLE.of(node)) for node in self.indices.graph.find_nodes(op="placeholder")]
        with torch.no_grad():
            (rows,) = self.indices.forward(*inputs)
        return rows.reshape(-1)

    def powers(self, rows: torch.Tensor) -> torch.Tensor:
        """Of each row, or part of one, what is added up (for an infinite norm, of what the largest is taken) to get
        its norm: ``[rows, columns]`` to ``[rows]``, in single precision at least."""
        sizes = rows.to(torch.promote_types(rows.dtype, torch.float32)).abs()
        if self.norm_type == float("inf"):
            return sizes.amax(1) if sizes.shape[1] else sizes.new_zeros(len(sizes))
        return sizes.pow(self.norm_type).sum(1)

    def factors(self, powers: torch.Tensor) -> torch.Tensor:
        """What rows with these :meth:`powers`, of whole rows, are multiplied by."""
        norms = powers if self.norm_type == float("inf") else powers.pow(1 / self.norm_type)
        return torch.where(norms > self.max_norm, self.max_norm / (norms + _EPS), 1.0)
