"""The Hugging Face ``Trainer``: one whose accelerator compiles the model under a plan."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate.utils import ProjectConfiguration
from torch import nn
from transformers import Seq2SeqTrainer, Trainer, TrainingArguments
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME

from shardgraph.errors import ShardGraphError
from shardgraph.plans.plan import Plan
from shardgraph.trainers.accelerate import ShardGraphAccelerator, check_arguments


class TrainsUnderPlan:
    """Has a subclass of ``Trainer`` train under a plan: ``class MyTrainer(TrainsUnderPlan, TheirTrainer)``.

    ``model`` stays the model that was given, whose parameters are shards once training or evaluation has begun;
    ``model_wrapped`` is then the compiled module.

    Args:
        plan, options: of :class:`~shardgraph.trainers.accelerate.ShardGraphAccelerator`.
        args, kwargs: those of the ``Trainer``.
    """

    # Of the Trainer, which comes after this class.
    accelerator: ShardGraphAccelerator
    args: Any
    model: Any
    model_wrapped: Any
    optimizer: Any
    lr_scheduler: Any

    def __init__(
        self,
        *args: Any,
        plan: str | Path | Plan = "fsdp",
        options: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        self._plan, self._options = plan, options
        super().__init__(*args, **kwargs)

    def create_accelerator_and_postprocess(self) -> None:
        """As of the ``Trainer``; its accelerator is ours, made of the same arguments."""
        _check(self.args)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        project = ProjectConfiguration(save_on_each_node=self.args.save_on_each_node)
        self.accelerator = ShardGraphAccelerator(
            self._plan, options=self._options, project_config=project, **self._accelerator_args
        )

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        self._accelerator_args: dict[str, Any] = super()._build_accelerator_args(**kwargs)  # type: ignore[misc]
        check_arguments(self._accelerator_args)
        return self._accelerator_args

    def _move_model_to_device(self, model: nn.Module, device: torch.device) -> None:
        """Leave it where it is: shards are put on the device when it is compiled."""

    def _wrap_model(self, model: nn.Module, training: bool = True, dataloader: Any = None) -> nn.Module:
        """The compiled module, once there is one: evaluation asks for ``model``."""
        wrapped = self.model_wrapped if model is self.model else model
        return super()._wrap_model(wrapped, training, dataloader)  # type: ignore[misc]

    def _has_mixed_mesh_grads(self, model: nn.Module) -> bool:
        return False  # of no importance: the accelerator clips gradients of any meshes

    def _save(self, output_dir: str | None = None, state_dict: Mapping[str, Any] | None = None) -> None:
        if state_dict is None:
            state_dict = dict(self.accelerator.get_state_dict(self.model))
        super()._save(output_dir, state_dict)  # type: ignore[misc]

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        state = self.accelerator.whole_optimizer(self.optimizer).state_dict()
        if self.args.should_save:
            torch.save(state, Path(output_dir, OPTIMIZER_NAME))
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir, SCHEDULER_NAME))

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        optimizer, scheduler = (Path(checkpoint or "", name) for name in (OPTIMIZER_NAME, SCHEDULER_NAME))
        if checkpoint is None or not (optimizer.exists() and scheduler.exists()):
            return
        # In host memory, of which all ranks of a machine share the file's pages: it need not fit on a device.
        state = torch.load(optimizer, map_location="cpu", weights_only=True, mmap=True)
        self.accelerator.whole_optimizer(self.optimizer).load_state_dict(state)
        self.lr_scheduler.load_state_dict(torch.load(scheduler, map_location="cpu", weights_only=True))

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        super()._load_from_checkpoint(resume_from_checkpoint, model or self.model_wrapped)  # type: ignore[misc]

    def _load_best_model(self) -> None:
        original, self.model = self.model, self.model_wrapped  # which loads whole tensors into shards
        try:
            super()._load_best_model()  # type: ignore[misc]
        finally:
            self.model = original


class ShardGraphTrainer(TrainsUnderPlan, Trainer):
    """``transformers.Trainer`` that trains under a plan, in the place of DistributedDataParallel.

    ::

        trainer = ShardGraphTrainer(model=model, args=TrainingArguments(...), train_dataset=data, plan="fsdp")
        trainer.train()

    Args:
        plan, options: of :class:`~shardgraph.trainers.accelerate.ShardGraphAccelerator`.
        args, kwargs: those of the ``Trainer``.

    Raises:
        ShardGraphError: they ask for what cannot be under a plan; the message says what can.
    """


class ShardGraphSeq2SeqTrainer(TrainsUnderPlan, Seq2SeqTrainer):
    """``transformers.Seq2SeqTrainer`` that trains under a plan; the arguments are those of :class:`ShardGraphTrainer`.

    To generate (``predict_with_generate``), parameters are all-gathered for each batch of an evaluation.
    """

    def prediction_step(
        self, model: nn.Module, inputs: Any, prediction_loss_only: bool, ignore_keys: Any = None, **generate: Any
    ) -> Any:
        """As of the ``Seq2SeqTrainer``, with the model itself where it generates."""
        if prediction_loss_only or not self.args.predict_with_generate:
            return super().prediction_step(model, inputs, prediction_loss_only, ignore_keys, **generate)
        with self.accelerator.whole_parameters(model, keep=False) as original:
            return super().prediction_step(original, inputs, prediction_loss_only, ignore_keys, **generate)


def _check(args: TrainingArguments) -> None:
    """Refuse what cannot be."""
    if args.n_gpu > 1:
        raise ShardGraphError(
            f"this process has {args.n_gpu} GPUs, for which the Trainer uses DataParallel, and a plan has a process "
            "for each: launch it with torchrun, or with `accelerate launch`"
        )
    if args.bf16_full_eval or args.fp16_full_eval:
        raise ShardGraphError(
            "bf16_full_eval and fp16_full_eval cast the parameters, and those of a compiled module stay in their "
            "dtype: use bf16=True or fp16=True, under which it computes in that dtype in evaluation too"
        )
    if args.auto_find_batch_size:
        raise ShardGraphError(
            "auto_find_batch_size tries again after a rank has run out of memory, while the others wait for it in a "
            "collective: leave it out; shardgraph.analyze predicts the memory of a batch"
        )
