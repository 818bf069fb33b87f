"""A compiled module's state: of this rank, of all ranks, and whole, in torch's formats; and its program as source."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardgraph.arguments import BOOL, PATH, STATE, checked
from shardgraph.emission import saved as emission
from shardgraph.errors import ShardGraphError
from shardgraph.module import checkpoint, local_state
from shardgraph.module.as_wrapped import AsWrapped
from shardgraph.module.input_names import input_names
from shardgraph.passes.lowering import lower
from shardgraph.runtime.watch import translated


class SavedState(AsWrapped):
    """What a compiled module saves and loads."""

    @translated
    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """As the model's own ``state_dict``, with its hooks.

        A parameter that is split in several blocks of a dimension, such as a fused projection, is all-gathered along
        that axis, since ``torch.distributed.checkpoint`` cannot express it; all ranks must then call this.
        """
        state = self._of_stages(self.original.state_dict(*args, **kwargs))
        return state if kwargs.get("keep_vars") else checkpoint.describable(state)

    def _of_stages(self, state: dict[str, Any]) -> dict[str, Any]:
        """What of ``state`` this rank has: without a pipeline, all of it."""
        return state

    @translated
    @checked(state_dict=STATE, strict=BOOL, assign=BOOL)
    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True, assign: bool = False) -> Any:
        """Load sharded (DTensor) or full tensors into the shards, in place.

        With ``assign`` too, which asks in addition that each tensor has the dtype of what is loaded.

        A model that does more than copy values by name (hooks, extra state, methods of its own) loads them into whole
        parameters, as it is written; all ranks must then call this.

        Raises:
            CheckpointError: names or shapes do not match the model, or dtypes with ``assign``; nothing has been loaded.
        """
        if assign:
            checkpoint.check_assignable(checkpoint.tensors_of(self), state_dict)
        if checkpoint.loads_its_own_way(self.original):
            with self.unsharded():
                return checkpoint.load_as_written(self.original, state_dict, strict)
        here = self._of_stages(dict(checkpoint.tensors_of(self)))
        return checkpoint.load_full_state_dict(self, state_dict, strict=strict, here=here)

    @translated
    @checked(save_directory=PATH)
    def save_pretrained(self, save_directory: str | Path, **options: Any) -> None:
        """The ``save_pretrained`` of a model of ``transformers`` or ``peft``, of the unsharded state, on rank 0.

        All ranks must call it. ``from_pretrained`` of the original loads what it writes.

        Raises:
            AttributeError: the model has no such method.
            CheckpointError: on every rank, if rank 0 could not write.
        """
        save: Any = self.original.save_pretrained
        state = options.pop("state_dict", None) or self.full_state_dict()
        options.pop("is_main_process", None)
        checkpoint.written_by_first_rank(save_directory, lambda: save(save_directory, state_dict=state, **options))

    def local_state_dict(self) -> dict[str, Any]:
        """This rank's shards, as plain tensors, for :meth:`load_local_state_dict` on as many ranks."""
        return local_state.local_state_dict(self._of_stages(nn.Module.state_dict(self.original)))

    @checked(state_dict=STATE, strict=BOOL)
    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> checkpoint.LoadedKeys:
        """Load this rank's shards, of :meth:`local_state_dict`.

        Raises:
            CheckpointError: they are of another model, or of another number of ranks; nothing has been loaded.
        """
        return local_state.load_local_state_dict(self.original, self.local_state_dict(), state_dict, strict=strict)

    def local_metadata_dict(self) -> dict[str, Any]:
        """What this rank's shards are of. Saved beside them, :func:`shardgraph.consolidate` makes whole tensors."""
        rank = dist.get_rank() if dist.is_initialized() else 0
        here = tuple(self.mesh.get_local_rank(axis) for axis in range(self.mesh.ndim)) if self.mesh is not None else ()
        return local_state.description(self.original, self.plan, rank, here, self.local_state_dict().keys())

    @translated
    def full_state_dict(self) -> dict[str, torch.Tensor]:
        """The unsharded state on rank 0, in CPU memory, and ``{}`` on other ranks. All ranks must call it."""
        return checkpoint.full_state_dict(self, self._whole)

    def _whole(self, name: str, tensor: torch.Tensor, keep: bool) -> torch.Tensor:
        """The unsharded tensor in CPU memory if ``keep``; all ranks must call it."""
        return checkpoint.gathered(tensor, keep)

    @translated
    @checked(path=PATH)
    def save_safetensors(self, path: str | Path) -> None:
        """Write a file that the original model loads with ``safetensors.torch.load_model``. All ranks must call it."""
        checkpoint.save_safetensors(self, path, self._whole)

    @checked(directory=PATH, scheduled=BOOL)
    def save_program(self, directory: str | Path, *, scheduled: bool = False) -> None:
        """Write the program of the latest call as source. All ranks must call it, and rank 0 writes.

        As :func:`shardgraph.emit`, with the parameters as they are now, and a batch of random numbers of the shapes
        that the call had: put your own in ``batch.pt``. After a :meth:`train_step` the program has its loss;
        after a call as the model's, the loss is what the function ``criterion`` of the file makes of the outputs.

        Raises:
            ShardGraphError: nothing has been compiled, or the latest program has what plain PyTorch does not have.
            CheckpointError: on every rank, if rank 0 could not write.
        """
        key, executor = self._programs.latest
        program = executor.program
        by_tokens = self._setup.loss_weight == "tokens"
        emission.check(program, by_tokens)
        if self._setup.random != "ranks":
            raise ShardGraphError(
                f"random={self._setup.random!r} draws the numbers of all ranks' batches, and the source those of a "
                "rank's: compile with random='ranks' to write it"
            )
        whole = self.full_state_dict()
        if not scheduled:
            program = lower(program.joint, program.plan, program.shapes, scheduled=False)
        parts = 1 if program.plan.pipeline is None else program.plan.pipeline.parts
        leaves = [emission.synthesized(kind, program.joint.rows, parts) for kind in key.inputs]
        names, folder = input_names(self.original, key.structure), Path(directory)
        checkpoint.written_by_first_rank(
            folder, lambda: emission.save(program, self.original, folder, leaves, names, scheduled, whole, by_tokens)
        )
