"""Hugging Face Accelerate: an ``Accelerator`` that prepares models by compiling them under a plan."""

from __future__ import annotations

import os
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from accelerate import Accelerator
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType, DistributedType, DynamoBackend, load_state_dict
from accelerate.utils.constants import MODEL_NAME, SAFE_MODEL_NAME
from torch import nn

from shardgraph.api.compile import compile
from shardgraph.errors import ShardGraphError
from shardgraph.module import checkpoint
from shardgraph.module.first_rank import take_from_first_rank
from shardgraph.module.grad_scaler import GradScaler
from shardgraph.module.gradient_norm import clip_grad_norm_
from shardgraph.module.replaced import adopt, current
from shardgraph.module.sharded import ShardedModule, module_of
from shardgraph.module.whole import whole_parameters
from shardgraph.plans.plan import Plan
from shardgraph.plans.precision import Precision
from shardgraph.plans.resolve import named_or_loaded
from shardgraph.trainers.batches import check_options, check_own_batches
from shardgraph.trainers.whole_optimizer import WholeOptimizer

_PRECISIONS = {
    "bf16": Precision("bfloat16", reduce="float32", outputs="float32"),
    "fp16": Precision("float16", reduce="float32", outputs="float32"),
}
"""Of Accelerate's ``mixed_precision``, which promises outputs in float32."""

_OTHER_ENGINES = {
    "deepspeed_plugin": "ACCELERATE_USE_DEEPSPEED",
    "deepspeed_plugins": "ACCELERATE_USE_DEEPSPEED",
    "fsdp_plugin": "ACCELERATE_USE_FSDP",
    "megatron_lm_plugin": "ACCELERATE_USE_MEGATRON_LM",
    "torch_tp_plugin": "ACCELERATE_USE_TP",
    "parallelism_config": "ACCELERATE_USE_PARALLELISM_CONFIG",
}
"""Options that have Accelerate distribute models by other means, and what ``accelerate launch`` sets for them."""


class ShardGraphAccelerator(Accelerator):
    """``accelerate.Accelerator`` whose :meth:`prepare` compiles models, in the place of DistributedDataParallel.

    ::

        accelerator = ShardGraphAccelerator("fsdp")
        model, optimizer, dataloader, scheduler = accelerator.prepare(model, optimizer, dataloader, scheduler)

    The training loop stays as it is. Every rank takes the first one's weights; parameters become shards in place, which
    optimizers made before train too.

    Args:
        plan: of :func:`shardgraph.compile`, for a run in which every rank has a batch of its own: ``"ddp"``,
            ``"zero1"``, ``"zero2"``, ``"fsdp"``, ``"hsdp"``, ``"ep"``, a :class:`Plan`, a plan file or ``"auto"``.
        options: further ones of :func:`shardgraph.compile`, such as ``{"recompute": "full"}``. A ``precision`` among
            them takes the place of that of ``mixed_precision``.
        accelerator: the arguments of ``Accelerator``, by name.

    Raises:
        ShardGraphError: they ask for what cannot be under a plan; the message says what can.
    """

    _optimizers: list[Any]

    def __init__(
        self, plan: str | Path | Plan = "fsdp", *, options: Mapping[str, Any] | None = None, **accelerator: Any
    ) -> None:
        self.options = dict(options or {})
        check_options(self.options, "Accelerate")
        check_arguments(accelerator)
        super().__init__(**accelerator)
        self._check_state()
        named = isinstance(named_or_loaded(plan), str)
        self.plan = "single" if named and not dist.is_initialized() else plan  # the same script runs in one process
        self._check_plan()
        if self.mixed_precision == "fp16":  # an overflow in one rank's shards skips the step of all, on any device
            self.native_amp = True
            self.scaler = GradScaler(
                self.device.type, **(self.scaler_handler.to_kwargs() if self.scaler_handler else {})
            )

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """As ``Accelerator.prepare``. A model, or the compiled module of one, that has been prepared stays as it is."""
        result = super().prepare(*args, device_placement=device_placement)
        for optimizer in self._optimizers:
            adopt(_innermost(optimizer))  # now: clearing gradients and loading a state may come before a step
        return result

    def prepare_model(
        self, model: nn.Module, device_placement: bool | None = None, evaluation_mode: bool = False
    ) -> ShardedModule:
        """The model compiled under the plan; for evaluation too, so that it need not fit on one device."""
        sharded = _compiled(model) or self._compile(model, device_placement)
        # Its own attribute: others that are set on it are set on the model.
        vars(sharded)["_is_accelerate_prepared"] = True
        if sharded not in self._models:
            self._models.append(sharded)
        return sharded

    def _compile(self, model: nn.Module, device_placement: bool | None) -> ShardedModule:
        if not dist.is_initialized() and (self.device_placement if device_placement is None else device_placement):
            model = model.to(self.device)
        take_from_first_rank(model)
        precision = _PRECISIONS.get(self.mixed_precision)
        return compile(model, self.plan, **{"precision": precision, "mesh": self._mesh, **self.options})

    def prepare_optimizer(
        self, optimizer: torch.optim.Optimizer, device_placement: bool | None = None
    ) -> AcceleratedOptimizer:
        """As ``Accelerator.prepare_optimizer``; its state is made where the shards are, and needs no placement."""
        return super().prepare_optimizer(optimizer, device_placement=False)

    def unwrap_model(self, model: nn.Module, *args: Any, **kwargs: Any) -> nn.Module:
        """The model that was prepared. Its parameters are shards: see :meth:`whole_parameters` to call it."""
        return model.original if isinstance(model, ShardedModule) else super().unwrap_model(model, *args, **kwargs)

    @contextmanager
    def whole_parameters(self, model: nn.Module, keep: bool = True) -> Iterator[nn.Module]:
        """The model that was prepared, whose parameters are whole, plain tensors inside; all ranks must enter it.

        For what calls the model itself, such as ``generate``. What is written to parameters stays, if ``keep``.
        """
        original = self.unwrap_model(model)
        with whole_parameters(original, keep=keep):
            yield original

    def whole_optimizer(self, optimizer: torch.optim.Optimizer) -> WholeOptimizer:
        """What saves and loads the state of an optimizer as that of whole parameters."""
        return WholeOptimizer(_innermost(optimizer), self.project_configuration.save_on_each_node)

    def clip_grad_norm_(
        self, parameters: torch.Tensor | Iterable[torch.Tensor], max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """As ``Accelerator.clip_grad_norm_``, by the norm of the gradients of all ranks' shards."""
        self.unscale_gradients()
        listed = [parameters] if isinstance(parameters, torch.Tensor) else parameters
        return clip_grad_norm_(map(current, listed), max_norm, norm_type)

    def get_state_dict(self, model: nn.Module, unwrap: bool = True) -> OrderedDict[str, torch.Tensor]:
        """Whole tensors in CPU memory on the rank that saves, under the model's own names; empty on others.

        All ranks must call it.
        """
        everywhere = self.project_configuration.save_on_each_node
        return OrderedDict(checkpoint.full_state_dict(self.unwrap_model(model), everywhere=everywhere))

    def save_state(self, *args: Any, **kwargs: Any) -> Any:
        """As ``Accelerator.save_state``, with whole tensors, which load on any number of ranks and under any plan.

        Returns on every rank once all is written.
        """
        with self._whole_optimizers():
            folder = super().save_state(*args, **kwargs)
        self.wait_for_everyone()
        return folder

    def load_state(self, *args: Any, strict: bool = True, **kwargs: Any) -> None:
        """As ``Accelerator.load_state``; each rank keeps its shards of what was saved."""
        kwargs.setdefault("map_location", "cpu")  # the whole state may not fit on the device
        last_hook = self.register_load_state_pre_hook(partial(_load_models, strict))
        try:
            with self._whole_optimizers():
                super().load_state(*args, **kwargs)
        finally:
            last_hook.remove()

    @contextmanager
    def _whole_optimizers(self) -> Iterator[None]:
        prepared = self._optimizers
        self._optimizers = [self.whole_optimizer(each) for each in prepared]
        try:
            yield
        finally:
            self._optimizers = prepared

    def join_uneven_inputs(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Is refused: ranks need equally many batches."""
        raise ShardGraphError(
            "join_uneven_inputs has ranks without a batch repeat the collectives of the others, and those of a program "
            "are part of its computation: give ranks equally many batches, as even_batches=True does"
        )

    @property
    def _mesh(self) -> dict[str, int] | None:
        """The mesh to compile on: for ``"auto"`` one along whose ranks batches differ, so that it chooses no other."""
        return {"dp": self.num_processes} if self.plan == "auto" and dist.is_initialized() else None

    def _check_state(self) -> None:
        """Refuse what the environment, or an earlier ``Accelerator``, has set."""
        if dist.is_initialized() and self.num_processes != (ranks := dist.get_world_size()):
            raise ShardGraphError(
                f"Accelerate sees {self.num_processes} process and the process group has {ranks} ranks, so that all "
                "would train on the same batches: for ranks on the CPU give cpu=True"
            )
        backend = self.state.dynamo_plugin.backend
        if backend != DynamoBackend.NO:
            raise ShardGraphError(
                f"the model is compiled under the plan, and torch.compile (dynamo backend {backend.value!r}) has no "
                "module to compile then: leave out dynamo_backend and dynamo_plugin"
            )
        if self.mixed_precision not in ("no", *_PRECISIONS):
            raise ShardGraphError(
                f"mixed_precision={self.mixed_precision!r} cannot be: a plan computes in 'bf16' or 'fp16', or in the "
                "dtypes of options={'precision': shardgraph.Precision(...)}"
            )
        kinds = (DistributedType.DEEPSPEED, DistributedType.FSDP, DistributedType.MEGATRON_LM, DistributedType.XLA)
        if self.distributed_type in kinds:
            raise ShardGraphError(
                f"this run is set up for {self.distributed_type.value}, and a plan distributes the model instead: "
                "launch it with torchrun, or with `accelerate launch --multi_gpu` and no further engine"
            )

    def _check_plan(self) -> None:
        """Refuse plans under which ranks share a batch, since data loaders give each rank its own."""
        check_own_batches(self.plan, self.options.get("mesh", self._mesh), "Accelerate")


def _compiled(model: nn.Module) -> ShardedModule | None:
    """The compiled module that ``model`` is, or whose original it is."""
    if isinstance(model, ShardedModule):
        return model
    for parameter in model.parameters():
        try:
            found = module_of(parameter)
        except ShardGraphError:
            return None
        return found if found.original is model else None
    return None


def _load_models(strict: bool, models: list[ShardedModule], folder: str) -> None:
    """Load what :meth:`ShardGraphAccelerator.save_state` saved of models; none is left for Accelerate to load."""
    for number, model in enumerate(models):
        ending = f"_{number}" if number else ""
        file = Path(folder, f"{SAFE_MODEL_NAME}{ending}.safetensors")
        if not file.exists():  # saved with safe_serialization=False
            file = Path(folder, f"{MODEL_NAME}{ending}.bin")
        model.load_state_dict(load_state_dict(str(file)), strict)
    models.clear()


def _innermost(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    while isinstance(optimizer, AcceleratedOptimizer):
        optimizer = optimizer.optimizer
    return optimizer


def check_arguments(arguments: Mapping[str, Any]) -> None:
    """Refuse arguments of ``Accelerator``, or an environment, that have it distribute models by other means."""
    for name, variable in _OTHER_ENGINES.items():
        if arguments.get(name) is not None or os.environ.get(variable, "false").lower() == "true":
            raise ShardGraphError(
                f"{name} (or {variable} in the environment) has Accelerate distribute the model, and a plan does so "
                "already: leave it out, and choose the plan, such as 'fsdp' or 'hsdp'"
            )
    for handler in arguments.get("kwargs_handlers") or ():
        hook = getattr(handler, "comm_hook", DDPCommunicationHookType.NO)
        if hook != DDPCommunicationHookType.NO:
            raise ShardGraphError(
                f"the communication hook {hook.value!r} is one of DistributedDataParallel, and the program reduces "
                "gradients: for another dtype give options={'precision': shardgraph.Precision(reduce='bfloat16')}"
            )
