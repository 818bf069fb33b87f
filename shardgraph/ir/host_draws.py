"""``shardgraph::drawn_mask``: a mask that a function of Python draws on the host, by NumPy, whenever the graph runs."""

from __future__ import annotations

import importlib
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

torch.library.define(
    "shardgraph::drawn_mask",
    "(str function, SymInt[] shape, float probability, int length, Tensor? attention_mask, int least) -> Tensor",
    tags=(torch.Tag.pt2_compliant_tag, torch.Tag.nondeterministic_seeded),
)
DRAWN_MASK = torch.ops.shardgraph.drawn_mask.default


def drawing_function(name: str) -> Callable[..., Any]:
    """The function of this ``"module:name"`` as its package defines it."""
    module, _, name = name.partition(":")
    function: Callable[..., Any] = inspect.unwrap(getattr(importlib.import_module(module), name))
    return function


@torch.library.impl("shardgraph::drawn_mask", "CompositeExplicitAutograd")
def _(
    function: str, shape: Sequence[int], probability: float, length: int, attention_mask: Tensor | None, least: int
) -> Tensor:
    drawn = drawing_function(function)
    return torch.from_numpy(drawn(tuple(shape), probability, length, attention_mask, least))


@torch.library.register_fake("shardgraph::drawn_mask")
def _(
    function: str, shape: Sequence[int], probability: float, length: int, attention_mask: Tensor | None, least: int
) -> Tensor:
    return torch.empty(shape, dtype=torch.bool, device="cpu")
