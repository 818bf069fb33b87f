"""Whether the strides of a traced value are those that it has when the model runs.

Fake tensors and kernels disagree on the strides of elementwise results of operands that are laid out differently. Only
``as_strided`` reads other elements then.
"""

from __future__ import annotations

from collections import defaultdict

import torch
from torch import fx

from shardgraph.ir.operations import is_view


def uncertain(node: fx.Node, known: dict[fx.Node, bool]) -> bool:
    """Whether a value may have other strides than were traced. ``known`` is what was found before, and is added to."""
    pending = [node]
    while pending:
        last = pending[-1]
        operands = [each for each in last.all_input_nodes if each.meta.get("val") is not None]
        depends = is_view(last) or torch.Tag.pointwise in getattr(last.target, "tags", ())
        missing = [each for each in operands if each not in known] if depends else []
        if missing:
            pending += missing
            continue
        pending.pop()
        if last not in known:
            known[last] = depends and (any(known[each] for each in operands) or _mixed(last, operands))
    return known[node]


def _mixed(node: fx.Node, operands: list[fx.Node]) -> bool:
    """Whether an elementwise operation has operands of one shape that are laid out differently."""
    if is_view(node):
        return False
    values = [each.meta["val"] for each in operands if isinstance(each.meta["val"], torch.Tensor)]
    strides: dict[torch.Size, set[tuple[int, ...]]] = defaultdict(set)
    for value in values:
        pairs = zip(value.stride(), value.shape, strict=True)
        strides[value.shape].add(tuple(stride for stride, size in pairs if size > 1))
    return any(len(each) > 1 for each in strides.values())
