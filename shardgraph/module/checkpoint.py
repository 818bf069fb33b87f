"""Full (unsharded) checkpoints of sharded models; ``torch.distributed.checkpoint`` saves and loads sharded ones."""

from __future__ import annotations

import os
from collections.abc import Callable, Container, Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from shardgraph.errors import CheckpointError, ShardGraphError, nearest
from shardgraph.torch_api import BatchNorm, as_placed, local_tensor, placed

Whole = Callable[[str, Tensor, bool], Tensor]


class HasShape(Protocol):
    """A tensor, or what stands for one in a file."""

    @property
    def shape(self) -> torch.Size: ...

    @property
    def dtype(self) -> torch.dtype: ...


class LoadedKeys(NamedTuple):
    """The names that ``strict=False`` ignored; the fields are named as those of ``nn.Module.load_state_dict``."""

    missing_keys: list[str]
    unexpected_keys: list[str]


def full_state_dict(module: nn.Module, whole: Whole | None = None, *, everywhere: bool = False) -> dict[str, Tensor]:
    """The unsharded parameters and persistent buffers in CPU memory on global rank 0, and ``{}`` on other ranks, or on
    all of them if ``everywhere``.

    ``whole(name, tensor, keep)`` returns the unsharded tensor in CPU memory if ``keep``; by default :func:`gathered`.
    All ranks must call this. Parameters are gathered one at a time, so that only rank 0 ever holds them all. Tied names
    share one copy. State that is not a tensor (``get_extra_state``) is rank 0's own.
    """
    keep = everywhere or _rank() == 0
    state: dict[str, Any] = {}
    copies: dict[int, Tensor] = {}
    for name, tensor in _state_of(module).items():
        if not isinstance(tensor, Tensor):
            state |= {name: tensor} if keep else {}
            continue
        if id(tensor) not in copies:
            copies[id(tensor)] = gathered(tensor, keep) if whole is None else whole(name, tensor, keep)
        if keep:
            state[name] = copies[id(tensor)]
    return state


def save_safetensors(module: nn.Module, path: str | Path, whole: Whole | None = None) -> None:
    """Write a file that the original, unsharded model loads with ``safetensors.torch.load_model(original, path)``.

    All ranks must call this. Tied names are stored once, as with ``safetensors.torch.save_model``: under the first in
    alphabetical order, to which the metadata maps the others. A file is replaced only once the new one is complete.

    Raises:
        CheckpointError: on every rank, if rank 0 could not write the file.
    """
    state = {name: value for name, value in full_state_dict(module, whole).items() if isinstance(value, Tensor)}
    written_by_first_rank(path, lambda: _write(state, Path(path)))


def written_by_first_rank(path: str | Path, write: Callable[[], Any]) -> None:
    """Return once rank 0 has written a checkpoint. All ranks must call it.

    Raises:
        CheckpointError: on every rank, if rank 0 could not.
    """
    failure: list[str | None] = [None]
    if _rank() == 0:
        try:
            write()
        except ShardGraphError as error:
            failure = [str(error)]
        except Exception as error:  # of any kind: the other ranks wait for the outcome
            failure = [
                f"rank 0 could not write {str(path)!r} ({type(error).__name__}: {error}): give a path in a folder that "
                "exists, that rank 0 may write to, and that has room for the whole model"
            ]
    if dist.is_initialized():
        dist.broadcast_object_list(failure, src=0)
    if failure[0] is not None:
        raise CheckpointError(failure[0])


def load_full_state_dict(
    module: nn.Module, state: Mapping[str, Tensor], *, strict: bool = True, here: Container[str] | None = None
) -> LoadedKeys:
    """Load unsharded tensors into a sharded module: each rank takes its own shard, without communication.

    Values are copied into the existing parameters and buffers, so that optimizers keep working. A value that is a
    DTensor is redistributed to the parameter's placement, which communicates unless it has that placement. One of
    several tied names is sufficient. Unless ``strict``, missing and unexpected names are ignored and returned. Names
    that are not ``here``, on the ranks of another pipeline stage, may be missing: this rank's state is without them.

    Raises:
        CheckpointError: names or shapes do not match the model; nothing has been loaded.
    """
    every = tensors_of(module)
    elsewhere = {name for name in every if here is not None and name not in here}
    own = {name: tensor for name, tensor in every.items() if name not in elsewhere or name in state}
    check_dtypes(own, state)
    keys, misshapen = compared(own, state)
    if misshapen or (strict and any(keys)):
        raise CheckpointError(
            differences(own, state)
            + "\nnothing was loaded: load it into the model that it was saved from"
            + (", or give strict=False to load only what both have" if strict and not misshapen else "")
            + (". A rank of a pipeline loads its own state_dict(), or full_state_dict()" if elsewhere else "")
        )
    with torch.no_grad():
        for name, value in state.items():
            if name in own and not own[name].is_meta:  # on meta: on the ranks of another pipeline stage
                copy_into(own[name], value)
    return keys


@torch.no_grad()
def copy_into(own: Tensor, value: Tensor) -> None:
    """Copy ``value``, whole or a DTensor, into what this rank has of it."""
    local_tensor(own).copy_(own_part(value.detach(), own))


@torch.no_grad()
def load_as_written(model: nn.Module, state: Mapping[str, Any], strict: bool) -> LoadedKeys:
    """``model.load_state_dict`` of unsharded tensors into whole parameters; DTensors are gathered first.

    Raises:
        CheckpointError: the model does not take it; its parameters and buffers are as before.
    """
    check_dtypes(tensors_of(model), state)
    whole = {name: value.full_tensor() if isinstance(value, DTensor) else value for name, value in state.items()}
    before = [(tensor, tensor.detach().clone()) for tensor in (*model.parameters(), *model.buffers())]
    try:
        return LoadedKeys(*model.load_state_dict(whole, strict=strict))
    except RuntimeError as error:
        for tensor, values in before:
            tensor.copy_(values)
        raise CheckpointError(f"the checkpoint is of another model, and nothing was loaded: {error}") from error


def compared(own: Mapping[str, Tensor], state: Mapping[str, HasShape]) -> tuple[LoadedKeys, list[str]]:
    """The names that only one has of a model's ``own`` state and of ``state``, a checkpoint; and those whose shapes
    differ. One of tied names, which are the same object in ``own``, is sufficient.
    """
    loaded = {id(own[name]) for name in state if name in own}
    missing = [name for name, tensor in own.items() if id(tensor) not in loaded]
    unexpected = [name for name in state if name not in own]
    misshapen = [name for name in state if name in own and state[name].shape != own[name].shape]
    return LoadedKeys(missing, unexpected), misshapen


def check_dtypes(own: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Refuse what would change values in silence: floating numbers may be rounded, as in torch, and all else may not.

    Raises:
        CheckpointError: an integer, a bool or a complex number would become another kind of number, or the other way.
    """
    changed = [
        f"{name!r} is {state[name].dtype} in it, here {own[name].dtype}"
        for name in state
        if name in own and isinstance(getattr(state[name], "dtype", None), torch.dtype)
        if not keeps_values(state[name].dtype, own[name].dtype)
    ]
    if changed:
        raise CheckpointError(
            "the checkpoint has numbers of other kinds, which a copy would change"
            + _some("of another dtype", changed)
            + "\nnothing was loaded: convert the model, or the checkpoint, with .to(dtype) first"
        )


def check_assignable(own: Mapping[str, Tensor], state: Mapping[str, Any]) -> None:
    """Refuse ``assign=True`` where a copy in place would not be what it asks for.

    Raises:
        CheckpointError: a tensor has another dtype than the model's.
    """
    changed = [
        f"{name!r} is {state[name].dtype} in it, here {own[name].dtype}"
        for name in state
        if name in own and getattr(state[name], "dtype", own[name].dtype) != own[name].dtype
    ]
    if changed:
        raise CheckpointError(
            "load_state_dict(assign=True) asks for tensors as they are in the checkpoint, and shards keep their dtype"
            + _some("of another dtype", changed)
            + "\nnothing was loaded: convert the checkpoint with .to(dtype), or leave out assign=True, which converts"
        )


def keeps_values(source: torch.dtype, target: torch.dtype) -> bool:
    """Whether numbers remain what they are, but for rounding of floating ones."""
    return source == target or (source.is_floating_point and target.is_floating_point)


def differences(own: Mapping[str, Tensor], state: Mapping[str, HasShape]) -> str:
    """What :func:`compared` found, in words."""
    (missing, unexpected), misshapen = compared(own, state)
    shapes = [f"{name!r} is {list(state[name].shape)}, here {list(own[name].shape)}" for name in misshapen]
    return (
        "the checkpoint is of another model"
        + _some("missing in it", [f"{name!r}{nearest(name, unexpected)}" for name in missing])
        + _some("unknown to this model", [f"{name!r}{nearest(name, missing or own)}" for name in unexpected])
        + _some("of another shape", shapes)
    )


def describable(state: Mapping[Any, Any]) -> dict[Any, Any]:
    """``state`` with DTensors that ``torch.distributed.checkpoint`` can describe: one contiguous box per rank.

    A tensor that is sharded in several blocks of a dimension is all-gathered along that axis: all ranks must call this.
    """
    return {name: _in_one_box(value) if isinstance(value, DTensor) else value for name, value in state.items()}


def _in_one_box(tensor: DTensor) -> DTensor:
    placements = one_box_placements(tensor)
    if placements != list(tensor.placements):
        tensor = tensor.redistribute(placements=placements)
    if tensor.requires_grad or not tensor.storage_offset():
        return tensor
    return as_placed(local_tensor(tensor), tensor)  # which torch.save and copy.deepcopy take for what it is


def one_box_placements(tensor: DTensor) -> list[Placement]:
    """Placements that ``torch.distributed.checkpoint`` can describe, as near to those of ``tensor`` as can be."""
    placements = list(tensor.placements)
    for position, placement in enumerate(tensor.placements):
        if isinstance(placement, _StridedShard):
            inner = [each for each in tensor.placements[position + 1 :] if isinstance(each, (Shard, _StridedShard))]
            if placement.dim not in [each.dim for each in inner]:  # it is not strided because of inner axes
                placements[position] = Replicate()
    return placements


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def tensors_of(module: nn.Module) -> dict[str, Tensor]:
    """The parameters and persistent buffers by name, whatever kind of module it is."""
    return {name: tensor for name, tensor in _state_of(module).items() if isinstance(tensor, Tensor)}


def _state_of(module: nn.Module) -> dict[str, Any]:
    """The state as the model itself gives it, of all pipeline stages."""
    # keep_vars: the parameters themselves, so that tied names are recognised.
    return getattr(module, "original", module).state_dict(keep_vars=True)


_LOADING = ("_load_from_state_dict", "set_extra_state", "load_state_dict")
_HOOKS = ("_state_dict_hooks", "_load_state_dict_pre_hooks", "_load_state_dict_post_hooks")
STATE_HOOKS = (*_HOOKS, "_state_dict_pre_hooks")
"""The attributes of a module with hooks of its state."""


def loads_its_own_way(model: nn.Module) -> bool:
    """Whether loading ``model`` does more than copy values by name: hooks, extra state, methods of its own."""
    for module in model.modules():
        kind = BatchNorm if isinstance(module, BatchNorm) else nn.Module  # which only adds what old files lack
        if any(getattr(type(module), method) is not getattr(kind, method) for method in _LOADING):
            return True
        if any(getattr(module, hooks) for hooks in _HOOKS):
            return True
    return False


@torch.no_grad()
def gathered(tensor: Tensor, keep: bool) -> Tensor:
    """A copy of the unsharded ``tensor`` on the CPU; an empty tensor unless ``keep``."""
    whole = tensor.detach()
    if isinstance(whole, DTensor):
        whole = whole.full_tensor()
    if not keep:
        return whole.new_empty(0, device="cpu")
    shared = whole.untyped_storage().data_ptr() == local_tensor(tensor).untyped_storage().data_ptr()
    return whole.to("cpu", copy=shared).contiguous()


def sharded_like(value: Tensor, target: DTensor) -> DTensor:
    """``value``, of which each rank takes its own shard, with the placements of ``target``."""
    return placed(own_part(value, target), target.device_mesh, list(target.placements), target.shape)


def own_part(value: Tensor, target: Tensor) -> Tensor:
    """This rank's shard of ``value``, with the placements of ``target``."""
    if not isinstance(target, DTensor):
        return value.full_tensor() if isinstance(value, DTensor) else value
    mesh, placements = target.device_mesh, target.placements
    if isinstance(value, DTensor):
        strided = any(isinstance(placement, _StridedShard) for placement in placements)
        if value.device_mesh == mesh and (not strided or value.placements == placements):
            return local_tensor(value.redistribute(placements=placements))
        value = value.full_tensor()
    return local_tensor(distribute_tensor(value, mesh, placements, src_data_rank=None))


def _write(state: dict[str, Tensor], path: Path) -> None:
    kept: dict[int, str] = {}
    metadata = {"format": "pt"}
    for name in sorted(state):
        first = kept.setdefault(id(state[name]), name)
        if first != name:
            metadata[name] = first
    draft = path.with_name(path.name + ".draft")
    try:
        save_file({name: state[name] for name in kept.values()}, draft, metadata=metadata)
        os.replace(draft, path)
    finally:
        draft.unlink(missing_ok=True)


def _some(description: str, entries: list[str]) -> str:
    """One line of an error: the number of names, and the first few of them."""
    more = f" and {len(entries) - 4} more" if len(entries) > 4 else ""
    return f"\n  {len(entries)} {description}: {', '.join(entries[:4])}{more}" if entries else ""
