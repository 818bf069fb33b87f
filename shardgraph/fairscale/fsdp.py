"""FairScale's FSDP is the plan ``"fsdp"``; one inside another is annotations of the outer one's model."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from shardgraph.api.annotate import annotate
from shardgraph.api.compile import compile
from shardgraph.arguments import BOOL, DEVICE, DTYPE, GROUP, MODEL, NOT_NEGATIVE, POSITIVE, checked
from shardgraph.errors import CheckpointError, ShardGraphError, shown
from shardgraph.fairscale import optimizer_state
from shardgraph.module import checkpoint
from shardgraph.module.sharded import ShardedModule
from shardgraph.module.whole import unshard, whole_parameters
from shardgraph.offline.consolidate import read_shards
from shardgraph.plans.annotations.kinds import Annotation, keep_gathered, offload, precision, reshard
from shardgraph.plans.precision import Precision

_SWITCHES = (
    "reshard_after_forward", "disable_reshard_on_root", "mixed_precision", "fp32_reduce_scatter", "flatten_parameters",
    "move_params_to_cpu", "move_grads_to_cpu", "no_broadcast_optim_state", "clear_autocast_cache",
    "force_input_to_fp32", "verbose", "cpu_offload", "state_dict_on_rank_0_only", "allow_reset_parameters",
)  # fmt: skip


class FullyShardedDataParallel(ShardedModule):
    """``fairscale.nn.FullyShardedDataParallel``: ``module`` compiled under the plan ``"fsdp"``.

    Parameters are sharded in place, each by itself under its own name, and the program is captured at the first call.
    A compiled module's methods, such as ``train_step``, are there too. Without a process group nothing is sharded.

    Wrapped in another one, an FSDP becomes annotations of it: the outer one takes its parameters back, puts its module
    in its place and makes one program of all.

    Args:
        module: any module; equal on all ranks, or on ``meta``.
        process_group: all ranks; a model on some of them is launched on these alone.
        process_group_reduce_scatter: is refused: gradients are reduced in the order of the program.
        reshard_after_forward: free gathered parameters after their use in forward and all-gather them again in
            backward. False: keep them, as the plan ``"zero2"`` does.
        disable_reshard_on_root: parameters outside of all inner FSDPs stay gathered, if there are inner ones.
        mixed_precision: compute in ``compute_dtype``.
        fp32_reduce_scatter: reduce gradients in float32 under mixed precision.
        flatten_parameters: has no effect: parameters keep their names and shapes.
        move_params_to_cpu: keep parameters, gradients and the optimizer's state in host memory.
        compute_dtype: of mixed precision; default: float16.
        buffer_dtype: of buffers; default: under mixed precision ``compute_dtype``.
        move_grads_to_cpu: has no effect: gradients are where their parameters are, as torch demands.
        bucket_cap_mb: has no effect: reductions of small gradients are merged, up to the plan's ``bucket``.
        compute_device: the device of this run; another one is refused.
        no_broadcast_optim_state: is refused: state of the optimizer is gathered from its shards.
        state_dict_device: where :meth:`state_dict` puts tensors; default: where the parameters are.
        clear_autocast_cache: has no effect: programs cast by themselves.
        force_input_to_fp32: cast inputs to float32, unless under mixed precision.
        verbose: print the plan as part of the module.
        cpu_offload: the older name of ``move_params_to_cpu``.
        state_dict_on_rank_0_only: :meth:`state_dict` is empty on other ranks.
        gradient_predivide_factor: has no effect: gradients are averaged, and float16 ones are divided before the sum.
        allow_reset_parameters: is refused: initialise the module before it is sharded.

    Raises:
        ShardGraphError: an option cannot be.
    """

    @checked(
        dict.fromkeys(_SWITCHES, BOOL),
        module=MODEL,
        process_group=GROUP,
        compute_dtype=DTYPE,
        buffer_dtype=DTYPE,
        bucket_cap_mb=NOT_NEGATIVE,
        compute_device=DEVICE,
        state_dict_device=DEVICE,
        gradient_predivide_factor=POSITIVE,
    )
    def __init__(
        self,
        module: nn.Module,
        process_group: dist.ProcessGroup | None = None,
        process_group_reduce_scatter: dist.ProcessGroup | None = None,
        reshard_after_forward: bool = True,
        disable_reshard_on_root: bool = True,
        mixed_precision: bool = False,
        fp32_reduce_scatter: bool = False,
        flatten_parameters: bool = True,
        move_params_to_cpu: bool = False,
        compute_dtype: torch.dtype | None = None,
        buffer_dtype: torch.dtype | None = None,
        move_grads_to_cpu: bool | None = None,
        bucket_cap_mb: int = 25,
        compute_device: torch.device | str | None = None,
        no_broadcast_optim_state: bool = False,
        state_dict_device: torch.device | str | None = None,
        clear_autocast_cache: bool = False,
        force_input_to_fp32: bool = False,
        verbose: bool = False,
        cpu_offload: bool = False,
        state_dict_on_rank_0_only: bool = False,
        gradient_predivide_factor: float | None = None,
        allow_reset_parameters: bool = False,
    ) -> None:
        options = {name: value for name, value in locals().items() if name not in ("self", "module", "__class__")}
        options["move_params_to_cpu"] = move_params_to_cpu or cpu_offload
        _check(options)
        if mixed_precision:
            options["compute_dtype"] = compute_dtype or torch.float16
            options["buffer_dtype"] = buffer_dtype or options["compute_dtype"]
        elif force_input_to_fp32:
            options["compute_dtype"] = torch.float32
        outside = _take_inner(module, options)
        keeps = not reshard_after_forward or (disable_reshard_on_root and len(outside) < len([*module.parameters()]))
        if options["move_params_to_cpu"]:
            annotate(module, dict.fromkeys(outside, offload()))
        plan = "zero2" if keeps else "fsdp"
        sharded = compile(module, plan if dist.is_initialized() else "single", precision=_precision(options))
        object.__setattr__(self, "__dict__", sharded.__dict__)  # this is that module, with FairScale's names
        self._own(options=options, outside=outside, sharded=sharded)
        if compute_device is not None and torch.device(compute_device) != self._setup.device:
            raise ShardGraphError(
                f"compute_device is {compute_device}, and this run computes on {self._setup.device}, the device of its "
                "process group: leave it out"
            )

    @property
    def module(self) -> nn.Module:
        """The module that was wrapped, whose parameters are shards."""
        return self.original

    def extra_repr(self) -> str:
        """The plan, if the module is verbose."""
        return str(self.plan) if self.options["verbose"] else f"plan={self.plan.name}"

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The module's forward, on this rank's part of the batch."""
        if "sharded" not in vars(self):  # part of another one
            return self.original(*args, **kwargs)
        return super().forward(*args, **kwargs)

    @contextmanager
    def summon_full_params(self, recurse: bool = True, volatile: bool = False) -> Iterator[None]:
        """Parameters are whole, plain tensors inside. All ranks must enter it.

        Args:
            recurse: also those of inner FSDPs.
            volatile: forget what is written to them.
        """
        with whole_parameters(self.original, None if recurse else self.outside, keep=not volatile):
            yield

    def state_dict(self, *args: Any, destination: Any = None, prefix: str = "", **kwargs: Any) -> Any:
        """As of the module that was wrapped: plain, whole tensors, on every rank or the first one. All must call it."""
        everywhere = not self.options["state_dict_on_rank_0_only"]
        state = checkpoint.full_state_dict(self.original, everywhere=everywhere)
        device = self.options["state_dict_device"] or next((p.device for p in self.parameters()), None)
        state = {prefix + name: value.to(device) for name, value in state.items()}
        if destination is None:
            return state
        destination.update(state)
        return destination

    def _load_from_state_dict(self, state_dict: Any, prefix: str, *args: Any) -> None:
        """Loading the state of a module that this one is inside of: whole tensors become shards of their own."""
        for name, own in nn.Module.state_dict(self.original, prefix=prefix).items():
            if isinstance(own, DTensor) and name in state_dict and not isinstance(state_dict[name], DTensor):
                state_dict[name] = checkpoint.sharded_like(state_dict[name], own)
        super()._load_from_state_dict(state_dict, prefix, *args)

    @staticmethod
    def consolidate_shard_weights(
        shard_weights: Sequence[Mapping[str, torch.Tensor]],
        shard_metadata: Sequence[Mapping[str, Any]],
        with_module_buffers: bool = True,
        strict: bool = True,
    ) -> dict[str, torch.Tensor]:
        """The whole tensors of all ranks' :meth:`local_state_dict` and :meth:`local_metadata_dict`, or of FairScale's.

        Tied names are all there. :func:`shardgraph.consolidate` does it in files, with one tensor in memory at a time.

        Args:
            shard_weights: of each rank, in their order.
            shard_metadata: of the same ranks.
            with_module_buffers: also buffers, of the first rank.
            strict: False is refused: what is missing would be missing in the result.

        Raises:
            CheckpointError: they are not those of all ranks of one run.
        """
        if not strict:
            raise ShardGraphError("strict=False cannot be: shards that are not there make no whole tensors; leave it")
        if len(shard_weights) != len(shard_metadata):
            raise CheckpointError(
                f"there are {len(shard_weights)} ranks' shards and {len(shard_metadata)} descriptions"
            )
        saved = zip(shard_weights, shard_metadata, strict=True)
        state = read_shards([{"model": weights, "shard_metadata": metadata} for weights, metadata in saved])
        whole = {name: stored.read() for name, stored in state.tensors.items()}
        whole |= {name: whole[first] for name, first in state.tied.items()}
        return {name: tensor for name, tensor in whole.items() if with_module_buffers or name not in state.buffers}

    def gather_full_optim_state_dict(
        self, optim: torch.optim.Optimizer, recipient_rank: int | None = 0
    ) -> dict[str, Any] | None:
        """The unsharded state of ``optim``, in torch's format, on one rank or (None) on all. All ranks must call it."""
        return optimizer_state.gathered(self.original, optim, recipient_rank)

    def get_shard_from_optim_state_dict(self, full_optim_state_dict: Mapping[str, Any]) -> dict[str, Any]:
        """This rank's part of what :meth:`gather_full_optim_state_dict` returned, for ``optim.load_state_dict``."""
        return optimizer_state.own_shard(self.original, full_optim_state_dict)

    def _become_part(self, of: Mapping[str, Any]) -> nn.Module:
        """The module, whole again, annotated so that a module wrapped with the options ``of`` trains it as this one."""
        if "sharded" not in vars(self):
            return self.original
        own, inner = self.original, self.options
        if inner["fp32_reduce_scatter"] and not of["fp32_reduce_scatter"]:
            raise ShardGraphError(
                "an inner FSDP has fp32_reduce_scatter=True and the outer one has not, and a program reduces all "
                "gradients in one dtype: give it to the outer one, with mixed_precision=True"
            )
        unshard(own)
        gather: Annotation = reshard() if inner["reshard_after_forward"] else keep_gathered()
        annotate(own, dict.fromkeys(self.outside, gather))
        if inner["compute_dtype"] != of["compute_dtype"]:
            annotate(own, {"": precision(inner["compute_dtype"] or torch.float32)})
        self.forget()
        del self.__dict__["sharded"]
        return own


def _take_inner(module: nn.Module, options: Mapping[str, Any]) -> list[str]:
    """Put the modules of inner FSDPs in their place; returns the names of the parameters outside of them."""
    inner = [name for name, each in module.named_modules() if isinstance(each, FullyShardedDataParallel) and name]
    for holder in list(module.modules()):
        for key, child in holder._modules.items():
            if isinstance(child, FullyShardedDataParallel):
                holder._modules[key] = child._become_part(options)
    prefixes = tuple(f"{name}." for name in inner)
    return [name for name, _ in module.named_parameters() if not name.startswith(prefixes)]


def _precision(options: Mapping[str, Any]) -> Precision | None:
    compute, buffers = options["compute_dtype"], options["buffer_dtype"]
    reduce = "float32" if options["fp32_reduce_scatter"] else None
    return Precision(compute, reduce, buffers) if compute or buffers else None


def _check(options: Mapping[str, Any]) -> None:
    """Refuse what cannot be."""
    group = options["process_group"]
    if group is not None and dist.get_world_size(group) != dist.get_world_size():
        raise ShardGraphError(
            f"process_group has {dist.get_world_size(group)} of {dist.get_world_size()} ranks, and a model is compiled "
            "on all: launch the ranks of the group alone, or give shardgraph.compile a plan on a mesh of all"
        )
    refused = {
        "process_group_reduce_scatter": "collectives run in the order of the program, on one group",
        "no_broadcast_optim_state": "the optimizer's state is sharded like its parameters, also that of experts, and "
        "is gathered from all ranks",
        "allow_reset_parameters": "initialise the module before it is wrapped, or make it on 'meta'",
    }
    for option, why in refused.items():
        if options[option] is not None and options[option] is not False:
            raise ShardGraphError(f"{option}={shown(options[option])} cannot be: {why}; leave it out")
    for option in () if options["mixed_precision"] else ("fp32_reduce_scatter", "compute_dtype"):
        if options[option] not in (None, False, torch.float32):
            raise ShardGraphError(
                f"{option}={options[option]} is without effect in full precision: give mixed_precision=True with it"
            )
    if options["move_grads_to_cpu"] and not options["move_params_to_cpu"]:
        raise ShardGraphError(
            "move_grads_to_cpu=True without move_params_to_cpu=True cannot be: torch demands a gradient on the device "
            "of its parameter. Move both"
        )
