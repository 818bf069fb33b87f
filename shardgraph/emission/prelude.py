"""What emitted files begin with: meshes, collectives, shards and random numbers, on torch alone.

Emitted files have copies of what they use of it, under their own ``MESH`` and ``DEVICE``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy
import torch
import torch.distributed as dist
from torch import Tensor

from shardgraph.ir.rank_operations import chunk_bounds, take_part
from shardgraph.runtime.pipeline.messages import flat
from shardgraph.torch_api import with_strides

MESH: dict[str, int] = {}
DEVICE = torch.device("cpu")
GROUPS: dict[str, dist.ProcessGroup] = {}
ON_HOST: set[str] = set()
c10d: Any = dist
gather_into = getattr(c10d, "all_gather_single", None) or c10d.all_gather_into_tensor  # before torch 2.13
scatter_into = getattr(c10d, "reduce_scatter_single", None) or c10d.reduce_scatter_tensor


# -- ranks -------------------------------------------------------------------------------------------------


def join_ranks(groups: Iterable[str]) -> None:
    """Join the other ranks, as torchrun's environment says, and make the process groups along these axes."""
    if DEVICE.type == "cuda":
        torch.cuda.set_device(DEVICE)
    if math.prod(MESH.values()) == 1:
        return
    if not dist.is_initialized():
        dist.init_process_group("nccl" if DEVICE.type == "cuda" else "gloo")
    if dist.get_world_size() != math.prod(MESH.values()):
        raise SystemExit(f"this program is for the mesh {MESH}: start it on {math.prod(MESH.values())} ranks")
    for axes in groups:
        GROUPS[axes] = group_along(axes.split("+"))


def leave_ranks() -> None:
    """Leave the other ranks, once all are done."""
    if dist.is_initialized():
        dist.barrier()
        GROUPS.clear()
        dist.destroy_process_group()


def group_along(axes: Sequence[str]) -> dist.ProcessGroup:
    """The group of the ranks whose places in the mesh differ from this one's along ``axes`` only."""
    names = list(MESH)
    along = [names.index(axis) for axis in names if axis in axes]
    across = [i for i in range(len(names)) if i not in along]
    ranks = torch.arange(math.prod(MESH.values()), device="cpu").reshape(list(MESH.values())).permute(*across, *along)
    group, _ = dist.new_subgroups_by_enumeration(ranks.reshape(-1, math.prod(MESH[axis] for axis in axes)).tolist())
    return group


def group_among(axis: str, places: Sequence[int]) -> Any:
    """The group of the ranks at these places of ``axis`` that differ along no other; None on ranks of none."""
    names = list(MESH)
    across = [i for i in range(len(names)) if names[i] != axis]
    ranks = torch.arange(math.prod(MESH.values()), device="cpu").reshape(list(MESH.values()))
    ranks = ranks.permute(*across, names.index(axis))
    group, _ = dist.new_subgroups_by_enumeration(ranks.reshape(-1, MESH[axis])[:, list(places)].tolist())
    return group


def place(axis: str) -> int:
    """This rank's place along an axis of the mesh, whose last axis counts fastest."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    for name, size in reversed(MESH.items()):
        rank, here = divmod(rank, size)
        if name == axis:
            return here
    raise KeyError(axis)


def place_among(axes: Iterable[str]) -> int:
    """This rank's place among all along several axes, such as the number of its batch."""
    number = 0
    for axis in axes:
        number = number * MESH[axis] + place(axis)
    return number


# -- collectives -------------------------------------------------------------------------------------------


def all_gather(shard: Tensor, axis: str) -> Tensor:
    """The tensors of all ranks along ``axis``, one after the other along dimension 0."""
    whole = shard.new_empty((shard.shape[0] * dist.get_world_size(GROUPS[axis]), *shard.shape[1:]))
    gather_into(whole, shard.contiguous(), group=GROUPS[axis])
    return whole


def reduce_scatter(whole: Tensor, axis: str) -> Tensor:
    """This rank's rows of the sum over all ranks along ``axis``."""
    whole, ranks = whole.contiguous(), dist.get_world_size(GROUPS[axis])
    if DEVICE.type == "cpu":  # gloo's own sends twice the bytes
        parts = torch.empty_like(whole)
        dist.all_to_all_single(parts, whole, group=GROUPS[axis])
        return add_parts(parts, ranks)
    shard = whole.new_empty((whole.shape[0] // ranks, *whole.shape[1:]))
    scatter_into(shard, whole, group=GROUPS[axis])
    return shard


def add_parts(received: Tensor, ranks: int) -> Tensor:
    """The sum of what all ranks have sent, in their order."""
    first, *others = received.chunk(ranks)
    total = first + others[0] if others else first.clone()
    for part in others[1:]:
        total += part
    return total


def all_reduce(tensor: Tensor, axis: str, operation: str = "sum") -> Tensor:
    """The sum over all ranks along ``axis``, or ``"max"`` or another operation."""
    total = tensor.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(total, getattr(dist.ReduceOp, operation.upper()), group=GROUPS[axis])
    return total


def all_to_all(rows: Tensor, received: list[int], sent: list[int], axis: str) -> Tensor:
    """Send so many rows to each rank along ``axis``, and receive so many of each."""
    result = rows.new_empty((sum(received), *rows.shape[1:]))
    dist.all_to_all_single(result, rows.contiguous(), received, sent, group=GROUPS[axis])
    return result


def send_to_next(tensor: Tensor, axis: str) -> Tensor:
    """Send ``tensor`` to the next rank on the ring of ``axis``; returns the tensor of the one before."""
    ranks, here = MESH[axis], place(axis)
    sent, received = [0] * ranks, [0] * ranks
    sent[(here + 1) % ranks] = received[(here - 1) % ranks] = tensor.shape[0]
    return all_to_all(tensor, received, sent, axis)


class Format(NamedTuple):
    """A tensor that goes from stage to stage."""

    shape: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


def send_values(values: Sequence[Tensor], formats: Sequence[Format], axis: str, to: int, tag: int) -> list[Any]:
    """Start to send tensors to a place along ``axis``; returns what to wait for, with the memory that it reads."""
    sends = []
    for number, (value, form) in enumerate(zip(values, formats, strict=True)):
        row = flat(with_strides(value, form.strides))
        if row.numel():
            sends.append((dist.isend(row, group=GROUPS[axis], group_dst=to, tag=tag * 64 + number), row))
    return sends


def receive_values(formats: Sequence[Format], axis: str, source: int, tag: int) -> list[Tensor]:
    """The tensors that a place along ``axis`` sends."""
    values = [torch.empty_strided(form.shape, form.strides, dtype=form.dtype, device=DEVICE) for form in formats]
    for number, value in enumerate(values):
        if value.numel():
            dist.recv(flat(value), group=GROUPS[axis], group_src=source, tag=tag * 64 + number)
    return values


# -- what depends on the rank ------------------------------------------------------------------------------


def trim_shard(padded: Tensor, rows: int, axis: str) -> Tensor:
    """What this rank owns of its padded shard of a tensor of ``rows`` rows."""
    start, stop = chunk_bounds(rows, MESH[axis], place(axis))
    return padded[: stop - start]


def local_chunk(whole: Tensor, rows: int, axis: str) -> Tensor:
    """This rank's rows of a tensor of ``rows`` rows."""
    start, stop = chunk_bounds(rows, MESH[axis], place(axis))
    return whole[start:stop]


def local_part(whole: Tensor, dim: int, blocks: int, axis: str, back: int = 0) -> Tensor:
    """This rank's part of each of ``blocks`` equal blocks of ``dim``; that of the rank ``back`` places before it."""
    return take_part(whole, dim, blocks, MESH[axis], (place(axis) - back) % MESH[axis])


def first_only(whole: Tensor, axis: str) -> Tensor:
    """``whole`` on the first rank of ``axis``, zeros on the others, so that the sum over ranks is ``whole``."""
    return torch.zeros_like(whole) if place(axis) else whole.clone()


def first_row(rows: int, axis: str) -> int:
    """The number of this rank's first row, where every rank of ``axis`` has ``rows``."""
    return rows * place(axis)


def from_later(steps: int, axis: str) -> int:
    """1 if what has arrived after ``steps`` sends on the ring of ``axis`` is a later rank's, else 0."""
    return int(place(axis) < steps)


def rank_weight(elements: float, axes: str, ranks: int) -> float:
    """What this rank's loss, a mean of so many elements, counts for in the mean over those of all ``ranks``."""
    total = torch.tensor(elements, dtype=torch.float32, device=DEVICE)
    dist.all_reduce(total, group=GROUPS[axes])
    return elements * ranks / total.item() if total else math.nan


# -- parameters --------------------------------------------------------------------------------------------


class Layout(NamedTuple):
    """How a parameter is stored: ``split`` along a dimension (of so many blocks each) over axes of operators, and then
    its ``rows`` over an axis of shards."""

    shape: tuple[int, ...]
    rows: str | None = None
    split: Mapping[str, tuple[int, int]] = {}


def shard(whole: Tensor, layout: Layout) -> Tensor:
    """This rank's part of a whole parameter."""
    if tuple(whole.shape) != layout.shape:
        raise ValueError(f"a parameter of shape {tuple(whole.shape)} where this program has {layout.shape}")
    for axis, (dim, blocks) in layout.split.items():
        whole = take_part(whole, dim, blocks, MESH[axis], place(axis))
    if layout.rows is not None:
        start, stop = chunk_bounds(whole.shape[0], MESH[layout.rows], place(layout.rows))
        whole = whole[start:stop]
    return whole.clone()


def within(state: Mapping[str, Tensor], module: str) -> dict[str, Tensor]:
    """The parameters and buffers of a module, by their names in it."""
    return {name.removeprefix(f"{module}."): each for name, each in state.items() if name.startswith(f"{module}.")}


def named(gradients: Mapping[str, Tensor], module: str) -> dict[str, Tensor]:
    """Gradients by the whole names of parameters, from those by their names in a module."""
    return {f"{module}.{name}": each for name, each in gradients.items()}


# -- host memory -------------------------------------------------------------------------------------------


def to_host(tensor: Tensor) -> Tensor:
    """A copy in host memory."""
    return torch.empty_like(tensor, device="cpu", pin_memory=tensor.is_cuda).copy_(tensor)


def to_device(tensor: Tensor) -> Tensor:
    """A copy in the memory of this rank's device."""
    return torch.empty_like(tensor, device=DEVICE).copy_(tensor)


def placed(name: str, tensor: Tensor) -> Tensor:
    """A parameter or buffer where it stays between steps."""
    if name not in ON_HOST:
        return tensor.to(DEVICE)
    return tensor.pin_memory() if DEVICE.type == "cuda" else tensor


# -- outputs -----------------------------------------------------------------------------------------------


def view_of(base: Tensor, size: Sequence[int], strides: Sequence[int], offset: int) -> Tensor:
    """The view of a tensor that the model returns."""
    return base.as_strided(size, strides, base.storage_offset() + offset)


# -- replicas ----------------------------------------------------------------------------------------------


@torch.no_grad()
def average_replicas(state: Mapping[str, Tensor], parameters: Iterable[str], axis: str) -> None:
    """Make parameters that are trained, and buffers of floating point, their means over the replicas along ``axis``."""
    group, count = GROUPS[axis], MESH[axis]
    trained = [state[name] for name in parameters if state[name].requires_grad and state[name].numel()]
    for parameter in trained:
        flat = torch.nn.functional.pad(parameter.reshape(-1), (0, -parameter.numel() % count))
        mean = flat.new_empty(len(flat) // count)
        scatter_into(mean, flat, group=group)
        mean /= count
        gather_into(flat, mean, group=group)
        parameter.copy_(flat[: parameter.numel()].view_as(parameter))
    for buffer in [each for name, each in state.items() if name not in parameters and each.is_floating_point()]:
        dist.all_reduce(buffer, group=group)
        buffer /= count


# -- random numbers ----------------------------------------------------------------------------------------


def rank_seed(seed: int, number: int) -> int:
    """The seed of one of several batches in a step whose common seed is ``seed``."""
    return (seed + 0x9E3779B97F4A7C15 * number) % 2**63


def common_draw() -> int:
    """A number that is the same on every rank, since all are seeded alike."""
    return int(torch.randint(2**62, (), device="cpu").item())


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Random numbers of the body are those of ``seed``; those afterwards go on as if it had not been."""
    with torch.random.fork_rng([DEVICE] if DEVICE.type != "cpu" else [], device_type=DEVICE.type):
        torch.manual_seed(seed)
        yield


@contextmanager
def seeded_numpy(seed: int) -> Iterator[None]:
    """The same for what NumPy draws."""
    before = numpy.random.get_state()
    numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        numpy.random.set_state(before)


def random_state(device: str) -> Tensor:
    """The state of a device's generator of random numbers."""
    return torch.get_rng_state() if device == "cpu" else getattr(torch, device).get_rng_state()


def go_back_if(condition: Tensor, state: Tensor, device: str) -> Tensor:
    """Have a device's random numbers go on from ``state`` if the condition holds; returns the condition."""
    if condition:
        (torch if device == "cpu" else getattr(torch, device)).set_rng_state(state)
    return condition.clone()
