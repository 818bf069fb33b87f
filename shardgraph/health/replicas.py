"""``shardgraph.check_replicas``: what several ranks have alike is compared, and the rank that differs is named.

A processor that computes wrongly now and then, memory that flips a bit, or a library that rounds otherwise on one rank
lets replicas drift apart in silence. Each tensor becomes a number of 64 bits, and these are compared.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardgraph.arguments import OPTIMIZER, checked, whole
from shardgraph.errors import ReplicaError
from shardgraph.module.joining import refuse_inside
from shardgraph.module.parameters import is_each_ranks_own
from shardgraph.module.pipelined import PipelinedModule
from shardgraph.module.sharded import COMPILED, ShardedModule
from shardgraph.runtime.exchange import Ranks
from shardgraph.torch_api import local_tensor

_PARAMETER = "parameter "
_TIMEOUT = 300.0  # seconds that stages wait for each other
_AT_ONCE = 1 << 20  # words of a tensor that are summed at a time


@dataclass(frozen=True)
class Replicas:
    """What was compared: ``compared`` tensors that several ranks have, of ``tensors`` in all; and in ``unseen`` the
    names of parameters that have no replica, so that nothing is known of them."""

    compared: int
    tensors: int
    unseen: tuple[str, ...]

    def __str__(self) -> str:
        text = f"{self.compared} of {self.tensors} tensors have replicas, and all of these are equal"
        if self.unseen:
            text += f"; {len(self.unseen)} parameters have none, such as {self.unseen[0]!r}, and cannot be compared"
        return text


@checked(sharded=COMPILED, optimizer=OPTIMIZER, every=whole(0, "a whole number of training calls"))
def check_replicas(
    sharded: ShardedModule, optimizer: torch.optim.Optimizer | None = None, *, every: int | None = None
) -> Replicas:
    """Compare what ranks have alike, bit for bit: parameters, and, where there are any, gradients and the
    ``optimizer``'s state; not buffers. All ranks must call it.

    Shards are compared where several ranks have the same one: all of a model under ``ddp``, shards between the replicas
    of ``hsdp``, and what tensor parallelism leaves whole. Under plain ``fsdp`` every element is on one rank, so that
    nothing can be compared; the result says so. A difference is found whatever made it, but not when: a wrong gradient
    is in the parameters after the step. With ``every``, parameters are compared again before each ``every``-th training
    call of the module, so that a difference is told at most so many steps later. Sums over 64 bits are exchanged, 8
    bytes for each tensor of each rank; a difference in one element is always found.

    Args:
        sharded: what ``shardgraph.compile`` returned.
        optimizer: that of ``sharded``; None: its state is not compared.
        every: compare from now on by itself, before each so many training calls. ``every=0`` ends that.

    Returns:
        what was compared, and what could not be.

    Raises:
        ReplicaError: on all ranks: tensors differ. The message names them, and the ranks: those that differ from most
            others, or both where there are two.
        ShardGraphError: inside of ``join()``, or an argument cannot be.
    """
    refuse_inside("check_replicas")
    if every is not None:
        _watch(sharded, every)
    return _compared(sharded, _tensors(sharded, optimizer))


def _watch(sharded: ShardedModule, every: int) -> None:
    module, calls = weakref.ref(sharded), 0

    def check() -> None:
        nonlocal calls
        calls += 1
        if calls % every == 0 and (alive := module()) is not None:
            _compared(alive, _tensors(alive, None))

    sharded.before_training(check if every else None)


def _tensors(sharded: ShardedModule, optimizer: torch.optim.Optimizer | None) -> dict[str, torch.Tensor]:
    """What may have replicas, by what it is called in messages."""
    parameters = {name: each for name, each in sharded.named_parameters() if not is_each_ranks_own(each)}
    found: dict[str, torch.Tensor] = {f"{_PARAMETER}{name}": each for name, each in parameters.items()}
    for name, parameter in parameters.items():
        if parameter.grad is not None:
            found[f"gradient of {name}"] = parameter.grad
        state: Mapping[str, Any] = optimizer.state.get(parameter, {}) if optimizer is not None else {}
        for key, value in state.items():
            if isinstance(value, torch.Tensor):
                found[f"{key} of {name}, of the optimizer"] = value
    return found


def _compared(sharded: ShardedModule, tensors: Mapping[str, torch.Tensor]) -> Replicas:
    mesh = sharded.mesh
    wrong: list[str] = []
    compared, unseen = 0, list[str]()
    if mesh is not None and mesh.size() > 1:
        of_ranks = _gathered(torch.stack([_sum(local_tensor(each)) for each in tensors.values()]), mesh)
        ranks = mesh.mesh.flatten().tolist()
    for number, (name, tensor) in enumerate(tensors.items()):
        groups = None if mesh is None else _alike(tensor, mesh)
        if groups is None:
            unseen += [name.removeprefix(_PARAMETER)] if name.startswith(_PARAMETER) else []
            continue
        compared += 1
        for group in groups:
            values = {ranks[place]: int(of_ranks[place, number]) for place in group}
            if len({*values.values()}) > 1:
                wrong.append(f"{name}: {_told(values)}")
    if isinstance(sharded, PipelinedModule):  # each stage has compared its own
        wrong = [each for stage in Ranks(_TIMEOUT).gather("check_replicas", wrong) for each in stage]
    if wrong:
        wrong = list(dict.fromkeys(wrong))
        more = f"\n  and {len(wrong) - 8} more" if len(wrong) > 8 else ""
        lines = "".join(f"\n  {each}" for each in wrong[:8])
        raise ReplicaError(
            "what ranks should have alike differs, so one of them has computed, stored or received something wrong:"
            f"{lines}{more}\nload the last checkpoint, with other hardware in the place of the rank that differs"
        )
    return Replicas(compared, len(tensors), tuple(unseen))


def _alike(tensor: torch.Tensor, mesh: DeviceMesh) -> list[list[int]] | None:
    """The places in the flattened mesh, in groups that have the same elements of a tensor; None if all differ."""
    sharded: set[int] = set()
    if isinstance(tensor, DTensor):
        sharded = {axis for axis, placement in enumerate(tensor.placements) if not placement.is_replicate()}
    if all(mesh.size(axis) == 1 or axis in sharded for axis in range(mesh.ndim)):
        return None
    groups: dict[tuple[int, ...], list[int]] = defaultdict(list)
    for place in range(mesh.size()):
        here = torch.unravel_index(torch.tensor(place, device="cpu"), mesh.mesh.shape)
        groups[tuple(int(at) for axis, at in enumerate(here) if axis in sharded)].append(place)
    return list(groups.values())


def _gathered(sums: torch.Tensor, mesh: DeviceMesh) -> torch.Tensor:
    """The sums of all ranks of the mesh, one row for each, in the order of the flattened mesh."""
    rows = sums[None]
    for axis in reversed(range(mesh.ndim)):
        parts = [torch.empty_like(rows) for _ in range(mesh.size(axis))]
        dist.all_gather(parts, rows.contiguous(), group=mesh.get_group(axis))
        rows = torch.cat(parts)
    return rows.cpu()


def _told(values: Mapping[int, int]) -> str:
    """Which ranks differ, from their sums."""
    by_value: dict[int, list[int]] = defaultdict(list)
    for rank, value in values.items():
        by_value[value].append(rank)
    most, *others = sorted(by_value.values(), key=len, reverse=True)
    if len(most) > len(others[0]):
        differing = ", ".join(str(rank) for ranks in others for rank in ranks)
        return f"rank {differing} differs from rank {', '.join(map(str, most))}"
    return f"rank {' and rank '.join(str(ranks[0]) for ranks in (most, *others))} differ: which is wrong cannot be told"


def _sum(tensor: torch.Tensor) -> torch.Tensor:
    """A number of 64 bits for the bits of a tensor, which one element that differs always changes.

    Words are added with weights that are odd, modulo 2**64: what one of them is off by is below 2**32 and not 0, and an
    odd multiple of that is not 0 either.
    """
    flat = tensor.detach().contiguous().reshape(-1).view(torch.uint8)
    rest = flat.numel() % 4
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    if rest:
        flat = torch.cat([flat, flat.new_zeros(4 - rest)])
    if flat.storage_offset() % 4:
        flat = flat.clone()
    for start, words in enumerate(flat.view(torch.int32).split(_AT_ONCE)):
        first = start * _AT_ONCE
        weights = torch.arange(first, first + words.numel(), device=flat.device) * _SPREAD * 2 + 1
        total += (words.long() * weights).sum()
    return total


_SPREAD = 0x9E3779B97F4A7C15 >> 1  # far-apart weights for neighbouring words; fits in 63 bits
