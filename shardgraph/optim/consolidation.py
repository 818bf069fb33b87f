"""The state of an optimizer whose parameters different ranks own, brought together one tensor at a time."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from shardgraph.torch_api import pytree

State = Mapping[int, Any]
"""The state of each parameter, by the parameter's number."""


def consolidated(
    own: State, group: dist.ProcessGroup | None, recipient: int | None, device: torch.device, as_objects: bool
) -> dict[int, Any] | None:
    """The state of all ranks' parameters in CPU memory, on the ``recipient`` (None: on every rank); else None.

    All ranks of ``group`` call it with the state of their ``own`` parameters. They first tell each other what there is:
    a tensor is then sent by itself, through ``device``, so that beside the result no rank holds more than one, and
    ranks that receive nothing hold none. What has no dimensions travels with the description; ``as_objects`` has
    everything travel so.
    """
    rank = dist.get_rank(group)
    described: list[dict[int, Any]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(described, {i: pytree.tree_map(_shape_of(as_objects), own[i]) for i in own}, group)
    whole: dict[int, Any] = {}
    for index, owner in sorted((index, owner) for owner, states in enumerate(described) for index in states):
        leaves, spec = pytree.tree_flatten(described[owner][index])
        sent = pytree.tree_leaves(own[index]) if owner == rank else leaves
        received = [
            _passed(value, owner, rank, group, recipient, device) if _is_sent(leaf) else leaf
            for leaf, value in zip(leaves, sent, strict=True)
        ]
        if recipient in (None, rank):
            whole[index] = pytree.tree_unflatten(received, spec)
    return whole if recipient in (None, rank) else None


def _shape_of(as_objects: bool) -> Any:
    def described(value: Any) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        if as_objects or value.dim() == 0:
            return value.detach().cpu()
        return torch.empty(value.shape, dtype=value.dtype, device="meta")

    return described


def _is_sent(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.is_meta


def _passed(
    value: torch.Tensor,
    owner: int,
    rank: int,
    group: dist.ProcessGroup | None,
    recipient: int | None,
    device: torch.device,
) -> torch.Tensor | None:
    """A copy of the owner's ``value`` on the CPU, on ranks that receive it; ``value`` has its shape elsewhere."""
    if recipient is not None and rank not in (owner, recipient):
        return None
    passed = value.detach().to(device).contiguous() if rank == owner else torch.empty_like(value, device=device)
    if recipient is None:
        dist.broadcast(passed, group=group, group_src=owner)
    elif owner != recipient:
        if rank == owner:
            dist.send(passed, group=group, group_dst=recipient)
            return None
        dist.recv(passed, group=group, group_src=owner)
    return passed.to("cpu", copy=rank == owner)
