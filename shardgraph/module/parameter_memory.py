"""The memory of a rank's parameters: on the device, in host memory, or in memory-mapped files."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from shardgraph.cost_models.detection import host_memory
from shardgraph.errors import OffloadError
from shardgraph.module.mapped_files import mapped_files
from shardgraph.plans.parameter_plan import ParameterPlan
from shardgraph.runtime.host import empty_on_host
from shardgraph.sizes import format_bytes


class ParameterMemory:
    """Memory for a rank's shards of parameters. Space for offloaded ones is checked before anything is written."""

    def __init__(
        self,
        parts: Mapping[str, torch.Tensor],
        entries: Mapping[str, ParameterPlan],
        device: torch.device,
        folder: str | None,
        ranks: int,
    ) -> None:
        """``parts`` are this rank's shards, as tensors on ``meta``. Offloaded ones are in files in ``folder`` if it is
        given, otherwise in host memory, which ``ranks`` ranks share.

        Raises:
            OffloadError: there is not enough space, or the folder cannot be written to; nothing is left behind.
        """
        self._entries, self._device = entries, device
        offloaded = {fqn: part for fqn, part in parts.items() if entries[fqn].offload}
        self._files = {} if folder is None else mapped_files(folder, offloaded, "the offloaded parameters")
        nbytes, room = sum(part.nbytes for part in offloaded.values()), host_memory() // ranks
        if folder is None and nbytes > room:
            raise OffloadError(
                f"the offloaded parameters of this rank take {format_bytes(nbytes)}, and this machine has "
                f"{format_bytes(room)} of free memory for each of {ranks}: offload fewer, use more machines, or put "
                "them on disk with Offload(parameters=True, disk=folder)"
            )

    def filled(self, fqn: str, part: torch.Tensor) -> torch.Tensor:
        """A contiguous copy of this rank's ``part`` of a parameter; without values if it is on ``meta``."""
        if not self._entries[fqn].offload:
            own = torch.empty(part.shape, dtype=part.dtype, device=self._device)
        elif fqn in self._files:
            own = self._files[fqn]
        else:
            own = empty_on_host(part.shape, part.dtype, self._device)
        return without_values(own) if part.is_meta else own.copy_(part)


def without_values(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, filled with what makes a computation before its values are loaded visible: nan, where it can be."""
    return tensor.fill_(torch.nan) if tensor.is_floating_point() and tensor.element_size() > 1 else tensor.zero_()
