"""FairScale's Pipe is a pipeline of the layers of an ``nn.Sequential``, under the schedule of GPipe."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist
from torch import nn

from shardgraph.api.compile import compile
from shardgraph.arguments import BOOL, LIST, WHOLE, checked, one_of
from shardgraph.errors import PlanError, expect
from shardgraph.fairscale.skip import Skippable, SkipSequential, verify_skippables
from shardgraph.plans.pipeline_plan import Pipeline


class Pipe(nn.Module):
    """``fairscale.nn.Pipe``: ``module``, an ``nn.Sequential``, in stages of ``balance`` layers on a rank each.

    FairScale drives all devices from one process. Here each has a process, started by torchrun,
    ``torch.multiprocessing.spawn`` or :func:`shardgraph.launch`, which has the parameters of its stage alone. All of
    them call the module with the same batch, get the output of the last stage, and call ``backward()`` of their loss.
    With a multiple of as many ranks, each stage is on several, which average gradients of batches of their own.

    ``.module`` is the compiled module: its state has the names of the sequence, without FairScale's partitions.

    Args:
        module: the layers, which may pass on tuples, may share parameters, and may be skippable.
        balance: the number of layers of each stage.
        devices: as many as stages, or None; which device a rank computes on is its process's choice.
        chunks: the number of microbatches of a batch.
        checkpoint: microbatches that backward recomputes: ``"always"``, ``"except_last"`` or ``"never"``.
        deferred_batch_norm: has no effect: running statistics of batch norms move once per batch, by all of it.

    Raises:
        PlanError: the balance is not of this sequence, or not of these ranks.
        TypeError: what skippable layers set aside and take does not match.
    """

    @checked(
        balance=LIST,
        devices=LIST,
        chunks=WHOLE,
        checkpoint=one_of(["always", "except_last", "never"]),
        deferred_batch_norm=BOOL,
    )
    def __init__(
        self,
        module: nn.Sequential,
        balance: Sequence[int] | None = None,
        *,
        devices: Sequence[Any] | None = None,
        chunks: int = 1,
        checkpoint: str = "except_last",
        deferred_batch_norm: bool = False,
    ) -> None:
        super().__init__()
        expect(isinstance(module, nn.Sequential), "module", type(module).__name__, "an nn.Sequential")
        expect(bool(balance), "balance", balance, "the number of layers of each stage, such as [2, 2]")
        assert balance is not None
        if any(isinstance(layer, Skippable) for layer in module):
            verify_skippables(module)
            module = SkipSequential(OrderedDict(module.named_children()))
        mesh = _mesh(len(balance), devices)
        pipeline = Pipeline(chunks, "gpipe", balance=tuple(balance), checkpoint=checkpoint)
        self.balance, self.chunks, self.checkpoint = list(balance), chunks, checkpoint
        self.module = compile(module, "pp+ddp" if "dp" in mesh else "pp", mesh=mesh, pipeline=pipeline)

    def forward(self, *args: Any) -> Any:
        """The output of all layers, on every rank."""
        return self.module(*args)

    def __len__(self) -> int:
        return sum(self.balance)


def _mesh(stages: int, devices: Sequence[Any] | None) -> dict[str, int]:
    ranks = dist.get_world_size() if dist.is_initialized() else 1
    if devices is not None and len(devices) != stages:
        raise PlanError(f"{len(devices)} devices are given for {stages} stages: give each stage one, or no devices")
    if ranks % stages:
        raise PlanError(
            f"{stages} stages run on {stages} ranks or a multiple, and this run has {ranks}: start it with "
            f"{stages} processes, or give a balance of {ranks} stages"
        )
    return {"pp": stages} | ({"dp": ranks // stages} if ranks > stages else {})
