"""Masks of attention by their values: one that hides the keys after each query is what causal kernels do by themselves.

Models of libraries write it out, since a mask has to serve padding, windows and caches too. Attention with such a mask
reads all of its square and computes all scores; a causal kernel skips the half that the mask hides. A mask that hides
nothing is dropped. A mask that depends on the call (padding), or shows other keys (windows shorter than the sequence,
packed documents), stays.
"""

from __future__ import annotations

import torch
from torch import fx

from shardgraph.capture.known_values import Known, known
from shardgraph.ir.fused import ATTENTION, ATTENTION_BACKWARD
from shardgraph.torch_api import unset_fake_temporarily

_HIDDEN = -1e30
"""What is added to hidden scores, or less: no other score makes their weight differ from 0."""


def drop_known_masks(gm: fx.GraphModule) -> None:
    """Make attention causal, or without a mask, where the values of its mask say the same."""
    with torch.device("cpu"), torch.no_grad(), unset_fake_temporarily():
        dropped = _dropped(gm)
    _erase(gm, dropped)


def _dropped(gm: fx.GraphModule) -> dict[fx.Node, None]:
    """The masks that attention does not take any more."""
    values: dict[fx.Node, Known | None] = {}
    dropped: dict[fx.Node, None] = {}
    for node in gm.graph.nodes:
        if node.target not in (ATTENTION, ATTENTION_BACKWARD) or node.args[-3] is None:
            continue
        *operands, mask, _, scale = node.args
        query, key = operands[:2] if node.target is ATTENTION else operands[1:3]
        seen = _seen(known(mask, values), (query.meta["val"].shape[2], key.meta["val"].shape[2]))
        if seen:
            node.args = (*operands, None, seen == "earlier", scale)
            dropped[mask] = None
    return dropped


def _seen(mask: Known | None, pairs: tuple[int, int]) -> str:
    """Which keys queries see: ``"all"``, the ``"earlier"`` with their own, or something else, ``""``, ``pairs`` being
    the numbers of queries and keys."""
    if mask is None:
        return ""
    if not mask.held.count_nonzero():
        return "all"
    if tuple(mask.shape[-2:]) != pairs or pairs[0] != pairs[1]:
        return ""
    if mask.diagonals == (-2, -1):
        later = torch.arange(1 - pairs[0], pairs[1], device="cpu") > 0
    elif tuple(mask.held.shape[-2:]) == pairs:
        later = torch.ones(pairs, dtype=torch.bool, device="cpu").triu(1)
    else:
        return ""
    causal = torch.where(later, mask.held <= _HIDDEN, mask.held == 0).all()
    return "earlier" if causal else ""


def _erase(gm: fx.GraphModule, unread: dict[fx.Node, None]) -> None:
    """Remove what nothing reads any more, and what only that has read."""
    erased: set[fx.Node] = set()
    pending = [*unread]
    while pending:
        node = pending.pop()
        if node.users or node in erased or node.op != "call_function" or node.is_impure():
            continue
        pending += node.all_input_nodes
        gm.graph.erase_node(node)
        erased.add(node)
