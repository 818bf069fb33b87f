"""FairScale's OffloadModel is offloading of parameters, and of what layers are recomputed from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from shardgraph.api.compile import compile
from shardgraph.arguments import BOOL, DEVICE, MODEL, WHOLE, checked, sequence_of
from shardgraph.errors import ShardGraphError
from shardgraph.module.sharded import ShardedModule
from shardgraph.torch_api import pytree


class OffloadModel(ShardedModule):
    """``fairscale.experimental.nn.OffloadModel``: ``model`` with its parameters in host memory until they are used.

    Each parameter is moved by itself, before its use in forward and in backward; gradients and the optimizer's state
    are in host memory too. In a process group it is trained as under DDP.

    Args:
        model: an ``nn.Sequential``, or a list of its parts; or any other module.
        device: the device of this run; another one is refused.
        offload_device: host memory, which is all that there is.
        num_slices: has no effect: each parameter is moved by itself.
        checkpoint_activation: recompute layers from their inputs, which are in host memory.
        num_microbatches: parts of the batch, one after the other; takes ``checkpoint_activation``.

    Raises:
        ShardGraphError: an option cannot be.
    """

    @checked(
        model=MODEL | sequence_of("a list of its parts", MODEL, least=1),
        device=DEVICE,
        offload_device=DEVICE,
        num_slices=WHOLE,
        checkpoint_activation=BOOL,
        num_microbatches=WHOLE,
    )
    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        device: torch.device | str,
        offload_device: torch.device | str = "cpu",
        num_slices: int = 3,
        checkpoint_activation: bool = False,
        num_microbatches: int = 1,
    ) -> None:
        if torch.device(offload_device).type != "cpu":
            raise ShardGraphError(f"offload_device is {offload_device}, and parameters are offloaded to host memory")
        if num_microbatches > 1 and not checkpoint_activation:
            raise ShardGraphError(
                f"num_microbatches={num_microbatches} saves no memory while all activations are kept for backward: "
                "give checkpoint_activation=True too"
            )
        module = model if isinstance(model, nn.Module) else nn.Sequential(*model)
        sharded = compile(
            module,
            "ddp" if dist.is_initialized() else "single",
            offload="all" if checkpoint_activation else "parameters",
            recompute="full" if checkpoint_activation else None,
        )
        object.__setattr__(self, "__dict__", sharded.__dict__)  # this is that module, with FairScale's name
        self._own(num_microbatches=num_microbatches, sharded=sharded)
        own = self._setup.device
        if torch.device(device).type != own.type or torch.device(device).index not in (None, own.index):
            raise ShardGraphError(f"device is {device}, and this run computes on {own}")

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """The model's output for the whole batch."""
        if self.num_microbatches == 1:
            return super().forward(*inputs, **kwargs)
        outputs = [super(OffloadModel, self).forward(*part, **kwargs) for part in self._parts(inputs)]
        flat, (structure, *_) = zip(*map(pytree.tree_flatten, outputs), strict=True)
        return pytree.tree_unflatten([torch.cat(each) for each in zip(*flat, strict=True)], structure)

    def _parts(self, inputs: tuple[Any, ...]) -> list[tuple[Any, ...]]:
        cut = [x.chunk(self.num_microbatches) if isinstance(x, Tensor) else [x] * self.num_microbatches for x in inputs]
        rows = {len(each) for each in cut}
        if rows != {self.num_microbatches}:
            raise ShardGraphError(
                f"a batch cannot be cut into {self.num_microbatches} microbatches: one has {min(rows)} parts at most"
            )
        return list(zip(*cut, strict=True))
