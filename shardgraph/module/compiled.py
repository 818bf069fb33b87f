"""What all of a compiled module's interface has: the model, its plan, and what its programs are compiled with."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from shardgraph.capture.captures import Captures
from shardgraph.module.as_written import AsWritten
from shardgraph.module.lengths import Lengths, Padding
from shardgraph.module.programs import Programs
from shardgraph.plans.plan import Plan
from shardgraph.runtime.agreement import Agreement
from shardgraph.runtime.backends import Backend, eager
from shardgraph.runtime.executor import State


@dataclass(frozen=True)
class Setup:
    """What a module compiles its programs with, on this rank; see :func:`shardgraph.compile`."""

    device: torch.device
    loss_fn: Callable[..., torch.Tensor] | None
    agreement: Agreement
    progress: bool | None
    captures: Captures
    loss_weight: str = "ranks"
    backend: Backend = eager.backend
    lengths: Lengths | None = None
    random: str = "ranks"

    def again(self) -> Setup:
        """The same for another module."""
        return replace(self, captures=Captures(self.device, self.agreement.first_made))


class Compiled(nn.Module):
    """The attributes of a compiled module; :class:`shardgraph.module.sharded.ShardedModule` sets them."""

    original: nn.Module
    plan: Plan
    mesh: DeviceMesh | None
    replicas: dist.ProcessGroup | None  # those with this rank's shards in all replicas of the model
    loss_fn: Callable[..., torch.Tensor] | None
    gradient_norm: torch.Tensor | None  # of all gradients, before the latest clipping by ``step``
    _setup: Setup
    _state: State
    _sync: bool
    _as_written: AsWritten
    _whole_mesh: DeviceMesh | None  # with the axes of replicas and stages
    _hooked_by: str | None  # the communication hook that has been registered
    _unsharded: ExitStack | None  # within, parameters are whole
    _before_training: Callable[[], None] | None  # called before each call that is differentiated
    _programs: Programs
    _padding: Padding | None

    def _own(self, **attributes: Any) -> None:
        """Set attributes of this module, where assignment may set the model's."""
        self.__dict__.update(attributes)

    def _why_not_as_written(self) -> str | None:
        """Why the model's own code cannot run on this rank, if it cannot."""
        return None

    def forget(self) -> None:
        """Drop all programs."""
        self._programs.forget()
