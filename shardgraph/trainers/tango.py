"""AI2 Tango: its FairScale integration, by the names it has there, over :mod:`shardgraph.fairscale`.

Configurations stay as they are; ``include_package: [shardgraph.trainers.tango]`` takes the place of the integration,
whose names these are: only one of the two can be imported.
"""

# Tango reads annotations of functions as they are: they cannot be text, as `from __future__ import annotations` has it.
import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from tango.common import FromParams, Lazy
from tango.common.exceptions import ConfigurationError
from tango.integrations.torch import LRScheduler, Model, Optimizer, TorchTrainingEngine, TrainConfig, TrainingEngine
from torch import nn

from shardgraph.errors import ShardGraphError
from shardgraph.fairscale.checkpoint_wrapper import checkpoint_wrapper
from shardgraph.fairscale.fsdp import FullyShardedDataParallel
from shardgraph.module.grad_scaler import GradScaler
from shardgraph.trainers.whole_optimizer import WholeOptimizer


@dataclass
class FSDPConfig(FromParams):
    """The options of :class:`shardgraph.fairscale.FullyShardedDataParallel` that a configuration gives.

    Args:
        reshard_after_forward: free gathered parameters after their use in forward, and gather them again in backward.
        move_params_to_cpu: keep parameters, gradients and the optimizer's state in host memory.
        move_grads_to_cpu: gradients are where their parameters are; None: likewise.
        mixed_precision: compute in float16.
    """

    reshard_after_forward: bool = True
    move_params_to_cpu: bool = False
    move_grads_to_cpu: bool | None = None
    mixed_precision: bool = False

    def as_kwargs(self) -> dict[str, Any]:
        """The options by their names."""
        return asdict(self)

    def wrap(self, module: nn.Module) -> FullyShardedDataParallel:
        """``module`` in FSDP with these options."""
        return FullyShardedDataParallel(module, **self.as_kwargs())


@TrainingEngine.register("fairscale")
class FairScaleTrainingEngine(TorchTrainingEngine):
    """The ``"fairscale"`` engine of ``TorchTrainStep``: the model in shardgraph's FSDP, on several devices.

    Checkpoints have whole tensors, in the files of the first worker.

    Args:
        train_config, model, optimizer, lr_scheduler: come from ``TorchTrainStep``.
        amp: compute under autocast.
        max_grad_norm: clip gradients to that norm, over all shards.
        amp_use_bfloat16: autocast to bfloat16 instead of float16; default: on a CPU.
        fsdp_config: options of FSDP.

    Raises:
        ConfigurationError: there is one device.
    """

    # Of Tango's engine, which declares its own classes.
    model: Any
    optimizer: Any
    grad_scaler: Any

    def __init__(
        self,
        train_config: TrainConfig,
        model: Lazy[Model],
        optimizer: Lazy[Optimizer],
        *,
        lr_scheduler: Lazy[LRScheduler] | None = None,
        amp: bool = False,
        max_grad_norm: float | None = None,
        amp_use_bfloat16: bool | None = None,
        fsdp_config: FSDPConfig | None = None,
    ) -> None:
        if not train_config.is_distributed:
            raise ConfigurationError(
                "the engine 'fairscale' shards a model over devices, and this step has one: give it a device_count "
                "of 2 or more, or the engine 'torch'"
            )
        self.fsdp_config = fsdp_config or FSDPConfig()
        super().__init__(
            train_config,
            model,
            optimizer,
            lr_scheduler=lr_scheduler,
            amp=amp,
            max_grad_norm=max_grad_norm,
            amp_use_bfloat16=amp_use_bfloat16,
        )
        if amp:  # an overflow in one worker's shards skips the step of all
            self.grad_scaler = GradScaler(self.device.type)

    def _construct_model(self, model: Model | Lazy[Model]) -> Any:
        if isinstance(model, Lazy):
            model = model.construct()
        return self.fsdp_config.wrap(model)

    def clip_grad_norm(self) -> None:
        """Clip by the norm of the gradients of all workers' shards."""
        if self.max_grad_norm is not None:
            self.model.clip_grad_norm_(self.max_grad_norm)

    def get_model_state(self) -> dict[str, torch.Tensor]:
        """Whole tensors for the first worker, none for the others; all must call it."""
        state: dict[str, torch.Tensor] = self.model.full_state_dict()
        return state

    def load_model_state(self, state_dict: dict[str, torch.Tensor]) -> None:
        """Load whole tensors, of which each worker keeps its shards."""
        self.model.load_state_dict(state_dict)

    def save_checkpoint(self, checkpoint_dir: Path, client_state: dict[str, Any]) -> None:
        """As of the ``"torch"`` engine; the first worker's files have all of the model and of the optimizer."""
        optimizer, self.optimizer = self.optimizer, WholeOptimizer(self.optimizer)
        try:
            super().save_checkpoint(checkpoint_dir, client_state)
        finally:
            self.optimizer = optimizer

    def load_checkpoint(self, checkpoint_dir: Path) -> dict[str, Any]:
        """Load a checkpoint into the shards of this worker; returns its ``client_state``."""

        def saved(name: str, worker: int = 0) -> Any:
            # Callbacks may have saved anything with the trainer: that file is trusted, as the code of the run.
            file, tensors = checkpoint_dir / f"worker{worker}_{name}.pt", name != "trainer"
            return torch.load(file, map_location="cpu", weights_only=tensors)

        self.load_model_state(saved("model"))
        WholeOptimizer(self.optimizer).load_state_dict(saved("optimizer"))
        if self.lr_scheduler is not None:
            self.lr_scheduler.load_state_dict(saved("lr_scheduler"))
        if self.grad_scaler is not None:
            self.grad_scaler.load_state_dict(saved("grad_scaler"))
        state: dict[str, Any] = saved("trainer", self.train_config.worker_id)
        return state


@Model.register("fairscale::with_wrapped_modules")
def with_wrapped_modules(
    model: Model,
    modules_to_wrap: set[str],
    fsdp_config: FSDPConfig | None = None,
    activation_checkpointing: bool = False,
) -> Model:
    """``model`` with some of its modules in FSDP, recomputed in backward, or both.

    Args:
        model: its modules are replaced in place.
        modules_to_wrap: names of modules, as regular expressions that match the whole name.
        fsdp_config: wrap each in FSDP with these options, in a run on several devices. None: do not.
        activation_checkpointing: recompute each in backward from its inputs.

    Raises:
        ShardGraphError: an expression matches no module; nothing has been wrapped.
    """
    names = [name for name, _ in model.named_modules() if name]
    if unmatched := [each for each in modules_to_wrap if not any(re.fullmatch(each, name) for name in names)]:
        raise ShardGraphError(
            f"modules_to_wrap has {', '.join(map(repr, sorted(unmatched)))}, and no module of {type(model).__name__} "
            f"has such a name: its modules are {', '.join(names[:8])}{', ...' if len(names) > 8 else ''}"
        )
    chosen = [name for name in names if any(re.fullmatch(each, name) for each in modules_to_wrap)]
    for name in sorted(chosen, key=lambda name: name.count("."), reverse=True):  # inner ones first
        module = model.get_submodule(name)
        if activation_checkpointing:
            module = checkpoint_wrapper(module)
        if fsdp_config is not None and torch.distributed.is_initialized():
            module = fsdp_config.wrap(module)
        holder, _, key = name.rpartition(".")
        setattr(model.get_submodule(holder), key, module)
    return model
