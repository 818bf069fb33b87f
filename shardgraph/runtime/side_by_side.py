"""Shards of a bucket's parameters that lie side by side in memory, so that a gather reads them where they are.

The first graph that gathers parameters together decides where their shards are: in one buffer, padded and in the order
of its bucket. The tensors stay the same objects, views of the buffer. Whoever gives one other memory later, or moves
it, is noticed at the next call, which packs copies of its bucket instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import fx

from shardgraph import ir, torch_api
from shardgraph.ir import buckets

_address, _is_contiguous = torch.Tensor.data_ptr, torch.Tensor.is_contiguous


def view_of(tensors: Sequence[torch.Tensor], elements: Sequence[int]) -> torch.Tensor | None:
    """All tensors as a flat view of their storage, in which each begins so many elements behind the one before it; None
    if they do not lie like that. Nothing is said of the elements between their ends and the next, nor behind the last.
    """
    first = next((i for i, tensor in enumerate(tensors) if tensor.numel()), None)  # empty ones have no address
    if first is None:
        return None
    anchor, ahead = tensors[first], sum(elements[:first])
    size, total = anchor.itemsize, sum(elements)
    begins = accumulate((count * size for count in elements), initial=_address(anchor) - ahead * size)
    for address, place in zip(map(_address, tensors), begins, strict=False):
        if address != place and address:
            return None
    start = anchor.storage_offset() - ahead
    if start < 0 or (start + total) * size > anchor.untyped_storage().nbytes():
        return None
    return anchor.as_strided((total,), (1,), start) if all(map(_is_contiguous, tensors)) else None


def together(tensors: Sequence[torch.Tensor], elements: Sequence[int]) -> torch.Tensor:
    """:func:`shardgraph.ir.buckets.pack` of shards that are padded to so many elements: a view, if they lie side by
    side like that, or else a copy."""
    flat = view_of(tensors, elements)
    return packed(tensors, elements) if flat is None else flat


def packed(tensors: Sequence[torch.Tensor], elements: Sequence[int]) -> torch.Tensor:
    """A copy of tensors side by side, each padded with zeros to so many elements."""
    pieces = []
    for tensor, count in zip(tensors, elements, strict=True):
        pieces.append(tensor.reshape(-1))
        if count > tensor.numel():
            pieces.append(tensor.new_zeros(count - tensor.numel()))
    return torch.cat(pieces)


def read_where_stored(gm: fx.GraphModule) -> None:
    """Let a bound graph gather shards from where they are stored, without packing them, if they lie side by side."""
    for pack in gm.graph.find_nodes(op="call_function", target=buckets.pack):
        if shards := buckets.stored(pack):
            padded = [each for each in pack.args[0] if each.target is ir.pad_shard]
            pack.target, pack.args = together, tuple(map(list, zip(*shards, strict=True)))
            for each in padded:
                if not each.users:
                    gm.graph.erase_node(each)


class Stored:
    """The parameters whose shards lie side by side: buckets, each with the elements of the padded shards in order."""

    def __init__(self) -> None:
        self.buckets: list[dict[str, int]] = []
        self.tried: set[str] = set()  # parameters that an optimizer's step would have beside others
        self._names: set[str] = set()

    def arrange(self, gm: fx.GraphModule, parameter: Callable[[str], torch.Tensor]) -> None:
        """Store the shards side by side that a graph packs, unless one of them already is, or has other readers."""
        for named in buckets.stored_parameters(gm):
            self.store(named, parameter)

    def has(self, fqn: str) -> bool:
        """Whether a parameter's shard is stored beside others."""
        return fqn in self._names

    def store(self, named: dict[str, int], parameter: Callable[[str], torch.Tensor]) -> None:
        """Store the shards of parameters side by side, each with so many elements, unless one already is, or has other
        readers. At most one bucket more than before is in memory meanwhile.
        """
        shards = [torch_api.local_tensor(parameter(fqn)) for fqn in named]
        if self._names & named.keys() or any(map(torch_api.is_viewed, shards)) or not all(map(_is_contiguous, shards)):
            return
        flat = shards[0].new_zeros(sum(named.values()))
        for place, shard in zip(flat.split(list(named.values())), shards, strict=True):
            own = place[: shard.numel()].view(shard.shape)
            shard.data = own.copy_(shard.detach())
        self.buckets.append(named)
        self._names |= named.keys()
