"""Tensors in memory-mapped files, which the system writes back and reads where memory does not hold them all."""

from __future__ import annotations

import os
import shutil
import tempfile
from collections.abc import Mapping
from contextlib import ExitStack

import torch

from shardgraph.errors import OffloadError
from shardgraph.runtime.host import known_on_host
from shardgraph.sizes import format_bytes


def mapped_files(folder: str, tensors: Mapping[str, torch.Tensor], what: str) -> dict[str, torch.Tensor]:
    """A contiguous tensor of zeros in a file of its own, with reserved space, for each of ``tensors``.

    A file is unlinked as soon as it is mapped: its space is freed with the tensor, or with this process.

    Raises:
        OffloadError: there is not enough space for ``what``, or the folder cannot be written to; nothing is left there.
    """
    total = sum(tensor.nbytes for tensor in tensors.values())
    with ExitStack() as files:
        try:
            if (room := shutil.disk_usage(folder).free) < total:
                raise OffloadError(
                    f"{what} of this rank take {format_bytes(total)}, and {folder!r} has {format_bytes(room)} left: "
                    "nothing was written. Make room there, or give another folder"
                )
            paths = {}
            for name, tensor in tensors.items():
                file = files.enter_context(tempfile.NamedTemporaryFile(dir=folder, prefix="shardgraph-"))
                if tensor.nbytes and hasattr(os, "posix_fallocate"):
                    os.posix_fallocate(file.fileno(), 0, tensor.nbytes)
                file.truncate(tensor.nbytes)
                paths[name] = file.name
            return {name: known_on_host(_mapped(path, tensors[name]), in_file=True) for name, path in paths.items()}
        except OSError as error:
            raise OffloadError(
                f"{what} of this rank take {format_bytes(total)}, which cannot be had in {folder!r} "
                f"({error.strerror}): nothing was left there. Give a folder that exists, that this process may write "
                "to, and that has as much room"
            ) from error


def _mapped(path: str, tensor: torch.Tensor) -> torch.Tensor:
    if not tensor.numel():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device="cpu")
    return torch.from_file(path, shared=True, size=tensor.numel(), dtype=tensor.dtype).view(tensor.shape)
