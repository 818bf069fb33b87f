"""The memory of a rank's parameters: on the device, in host memory, or in memory-mapped files."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack

import torch

from shardgraph.cost_models.detection import host_memory
from shardgraph.errors import OffloadError
from shardgraph.plans.parameter_plan import ParameterPlan
from shardgraph.runtime.host import empty_on_host, known_on_host
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
        self._files = {} if folder is None else _mapped_files(folder, offloaded)
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


def _mapped_files(folder: str, parts: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """A tensor in a file of its own for each of ``parts``, with reserved space.

    A file is unlinked as soon as it is mapped: its space is freed with the tensor, or with this process.
    """
    total = sum(part.nbytes for part in parts.values())
    with ExitStack() as files:
        try:
            if (room := shutil.disk_usage(folder).free) < total:
                raise OffloadError(
                    f"the offloaded parameters of this rank take {format_bytes(total)}, and {folder!r} has "
                    f"{format_bytes(room)} left: nothing was written. Make room there, or give another folder"
                )
            paths = {}
            for fqn, part in parts.items():
                file = files.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix="shardgraph-"))
                if part.nbytes and hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, part.nbytes)
                file.truncate(part.nbytes)
                paths[fqn] = file.name
            return {fqn: known_on_host(_mapped(path, parts[fqn]), in_file=True) for fqn, path in paths.items()}
        except OSError as error:
            raise OffloadError(
                f"the offloaded parameters of this rank take {format_bytes(total)}, which cannot be had in {folder!r} "
                f"({error.strerror}): nothing was left there. Give a folder that exists, that this process may write "
                "to, and that has as much room"
            ) from error


def _mapped(path: str, part: torch.Tensor) -> torch.Tensor:
    if not part.numel():
        return torch.empty(part.shape, dtype=part.dtype)
    return torch.from_file(path, shared=True, size=part.numel(), dtype=part.dtype).view(part.shape)
