"""Gradients that a communication hook of ``DistributedDataParallel`` reduces, after backward, in place of the program.

A hook gets a bucket of this rank's gradients, and returns a future of what parameters get. Buckets are those of
``DistributedDataParallel``: parameters in the reverse of the order in which the model has them, the first bucket small.
So what a hook remembers of buckets, as PowerSGD its factors and errors, is the same.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from shardgraph import torch_api
from shardgraph.errors import ShardGraphError
from shardgraph.plans.plan import Plan
from shardgraph.runtime.executor import State

_FIRST, _OTHERS = 1 << 20, 25 << 20  # bytes from which on a bucket is full


@dataclass
class Bucket:
    """Gradients side by side, with the methods of ``torch.distributed.GradBucket``."""

    number: int
    last: bool
    flat: torch.Tensor
    owners: list[torch.Tensor]

    def index(self) -> int:
        """Its number, in the order in which buckets are reduced."""
        return self.number

    def is_last(self) -> bool:
        """Whether it is the last of a step."""
        return self.last

    def buffer(self) -> torch.Tensor:
        """All of its gradients as one flat tensor."""
        return self.flat

    def set_buffer(self, tensor: torch.Tensor) -> None:
        """Put another flat tensor in its place."""
        self.flat = tensor

    def gradients(self) -> list[torch.Tensor]:
        """The gradients, as views of the flat tensor."""
        pieces = self.flat.split([owner.numel() for owner in self.owners])
        return [piece.view(owner.shape) for piece, owner in zip(pieces, self.owners, strict=True)]

    def parameters(self) -> list[torch.Tensor]:
        """The parameters that they are of."""
        return self.owners


def check_hookable(plan: Plan, hook: str) -> None:
    """Check that every rank has whole gradients of its own batch, for a hook of this name to reduce.

    Raises:
        ShardGraphError: the plan shards something, or measures the gradients that programs reduce.
    """
    whole = all(entry.shard_axis is None and entry.gradient == "all_reduce" for _, entry in plan.parameters)
    own = plan.gradient_statistics or plan.offload.parameters or plan.copies > 1
    if plan.is_of_data and whole and not own:
        return
    raise ShardGraphError(
        f"the communication hook {hook!r} takes whole gradients of every rank, and the program of plan {plan.name!r} "
        "reduces shards of them by itself: use plan 'ddp', where any hook works. Under all plans work "
        "fp16_compress_hook and bf16_compress_hook, which are Precision(reduce='float16') and 'bfloat16'; to send "
        "less, use shardgraph.LocalSGD or no_sync(); to change gradients, do so between backward and the optimizer's "
        "step"
    )


@dataclass(frozen=True)
class CommunicationHook:
    """A hook, and the state that it is called with."""

    state: object
    hook: Callable[[Any, Any], torch.futures.Future[torch.Tensor]]

    def reduce(self, state: State, trained: Mapping[str, bool]) -> None:
        """Give parameters the gradients that the hook makes of the unreduced ones and those that they have; zeros
        stand for those that this rank lacks. ``trained`` says of each parameter whether it gets one."""
        names = [fqn for fqn in reversed(list(state.layout.names.values())) if fqn in trained]
        values = [self._own(state, fqn) for fqn in names]
        state.unreduced.clear()
        state.unsynced.clear()
        for number, (bucket, filled) in enumerate(buckets := _filled(names, values)):
            owners = [torch_api.local_tensor(state.layout.parameter(fqn)) for fqn in bucket]
            flat = torch.cat([value.reshape(-1) for value in filled])
            made = Bucket(number, number == len(buckets) - 1, flat, owners)
            made.flat = self.hook(self.state, made).wait()
            for fqn, value in zip(bucket, made.gradients(), strict=True):
                if trained[fqn]:
                    parameter = state.layout.parameter(fqn)
                    parameter.grad = None
                    state.add_gradients({fqn: value.to(parameter.dtype)})

    def _own(self, state: State, fqn: str) -> torch.Tensor:
        parameter = state.layout.parameter(fqn)
        value = state.unreduced.get(fqn)
        if value is None:
            value = torch.zeros_like(torch_api.local_tensor(parameter))
        earlier = parameter.grad
        return value if earlier is None else value + torch_api.local_tensor(earlier).to(value.dtype)


def _filled(names: list[str], values: list[torch.Tensor]) -> list[tuple[list[str], list[torch.Tensor]]]:
    """Names and values in buckets, each of one dtype."""
    buckets: list[tuple[list[str], list[torch.Tensor]]] = []
    full, filled = True, 0
    for fqn, value in zip(names, values, strict=True):
        if full or value.dtype != buckets[-1][1][0].dtype:
            buckets.append(([], []))
            filled = 0
        buckets[-1][0].append(fqn)
        buckets[-1][1].append(value)
        filled += value.nbytes
        full = filled >= (_FIRST if len(buckets) == 1 else _OTHERS)
    return buckets
