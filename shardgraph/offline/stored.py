"""Whole tensors that are not read yet: what every format of checkpoint is read into and written from."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from torch import nn

from shardgraph.errors import CheckpointError, ShardGraphError, one_line
from shardgraph.module.checkpoint import compared, differences, tensors_of
from shardgraph.module.local_state import tied


@dataclass(frozen=True)
class Stored:
    """A tensor in files. ``read`` returns all of it, each time anew."""

    shape: torch.Size
    dtype: torch.dtype
    read: Callable[[], torch.Tensor]

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Stored:
        """A tensor that is whole, and perhaps mapped from a file."""
        return cls(tensor.shape, tensor.dtype, lambda: tensor)


@dataclass(frozen=True)
class StoredState:
    """A model's state: tensors by name, and for the other names of tied ones that of the tensor.

    ``buffers`` are the names of tensors that are no parameters, as far as files tell.
    """

    tensors: dict[str, Stored]
    tied: dict[str, str] = field(default_factory=dict)
    buffers: frozenset[str] = frozenset()

    def by_name(self) -> dict[str, Stored]:
        """The tensors by all names."""
        return self.tensors | {name: self.tensors[first] for name, first in self.tied.items()}


@contextmanager
def reading(files: str) -> Iterator[None]:
    """Read ``files``, which may have anything in them.

    Raises:
        CheckpointError: for what they lead to, unless an error says it already.
    """
    try:
        yield
    except (ShardGraphError, OSError):
        raise
    except Exception as error:  # of any kind: a description that is damaged may say anything
        told = one_line(f"{type(error).__name__}: {error}", 300)
        raise CheckpointError(f"{files} cannot be read, and nothing was written: {told}") from error


def of_model(state: StoredState, model: nn.Module) -> StoredState:
    """``state`` with the first names and the ties of ``model``, which may be on ``meta``.

    Raises:
        CheckpointError: names or shapes do not match the model.
    """
    found, own, ties = state.by_name(), tensors_of(model), tied(model)
    keys, misshapen = compared(own, found)
    if misshapen or any(keys):
        raise CheckpointError(f"{differences(own, found)}\nnothing was written: give the model that was saved")
    names = {ties.get(name, name): name for name in found}
    return StoredState({name: found[names[name]] for name in own if name not in ties}, ties)
