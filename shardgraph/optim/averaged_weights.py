"""An exponential moving average of a compiled module's weights, kept as the shards are."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from shardgraph.arguments import ANYTHING, BOOL, checked, mapping_of, number, of_plan
from shardgraph.errors import ArgumentError, CheckpointError, shown
from shardgraph.module import checkpoint
from shardgraph.module.sharded import ShardedModule
from shardgraph.sizes import is_whole
from shardgraph.torch_api import local_tensor


class AveragedWeights:
    """Averages of the parameters of ``module`` over steps, each rank those of its shards, without communication::

        average = AveragedWeights(sharded, decay=0.999)
        for batch in batches:
            ...
            optimizer.step()
            average.update()
        with average.applied():
            evaluate(sharded)

    ``torch.optim.swa_utils.AveragedModel`` keeps a copy of the module instead. An update is

        average <- decay * average + (1 - decay) * parameter

    from the values that parameters have when this is made; with ``warmup``, ``decay`` is at most (1 + n) / (10 + n) at
    update n, so that the first values are soon forgotten. Buffers are not averaged: they stay the module's.

    Args:
        module: compiled by :func:`shardgraph.compile`, under any plan.
        decay: from 0 to 1.
        warmup: whether the first updates weigh more.

    Raises:
        ShardGraphError: the module is not compiled, or the decay cannot be.
    """

    @checked(decay=of_plan(number("from 0 to 1", lambda value: 0 <= value <= 1)), warmup=BOOL)
    def __init__(self, module: ShardedModule, decay: float = 0.999, *, warmup: bool = False) -> None:
        if not isinstance(module, ShardedModule):
            raise ArgumentError(
                f"AveragedWeights(): module is {shown(module)}: {type(module).__name__} is not compiled, and its "
                "weights are whole: compile it first, or use torch.optim.swa_utils.AveragedModel"
            )
        self.decay, self.warmup, self.updates = decay, warmup, 0
        self._module = module
        self._averages = {fqn: parameter.detach().clone() for fqn, parameter in module.named_parameters()}

    @torch.no_grad()
    def update(self) -> None:
        """Move the averages towards the parameters; after the optimizer's step."""
        decay = min(self.decay, (1 + self.updates) / (10 + self.updates)) if self.warmup else self.decay
        self.updates += 1
        for average, parameter in self._pairs():
            if average.is_floating_point() or average.is_complex():
                average.lerp_(parameter, 1 - decay)
            else:
                average.copy_(parameter)

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Exchange the module's parameters and the averages, one at a time, until the end of the block."""
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state_dict(self) -> dict[str, Any]:
        """The averages under the names of the parameters, as DTensors where these are, and the number of updates.

        ``torch.distributed.checkpoint`` saves and loads it, also under another plan.
        """
        return {"averages": dict(self._averages), "updates": self.updates}

    @checked(state_dict=mapping_of("what state_dict() returned: {'averages': ..., 'updates': ...}", ANYTHING))
    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Load what :meth:`state_dict` returned, under this or another plan, or whole tensors by name.

        Raises:
            CheckpointError: it is of other parameters; nothing has been loaded.
        """
        if not isinstance(state_dict.get("averages"), Mapping) or not is_whole(state_dict.get("updates"), 0):
            raise CheckpointError("the state of averaged weights has 'averages' and 'updates', and this has not")
        averages = state_dict["averages"]
        if unlike := averages.keys() ^ self._averages.keys():
            raise CheckpointError(f"the averages are of other parameters: {sorted(unlike)[0]!r} is in one of them only")
        checkpoint.check_dtypes(self._averages, averages)
        if checkpoint.compared(self._averages, averages)[1]:
            raise CheckpointError(checkpoint.differences(self._averages, averages))
        for fqn, average in self._averages.items():  # not as the model loads, which may translate older checkpoints
            checkpoint.copy_into(average, averages[fqn])
        self.updates = int(state_dict["updates"])

    @torch.no_grad()
    def _exchange(self) -> None:
        for average, parameter in self._pairs():
            before = parameter.clone()
            parameter.copy_(average)
            average.copy_(before)

    def _pairs(self) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """This rank's part of each average, and of the parameter."""
        for fqn, parameter in self._module.named_parameters():
            yield local_tensor(self._averages[fqn]), local_tensor(parameter.detach())
