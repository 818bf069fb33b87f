"""Lightning: a ``Strategy`` of its ``Trainer`` that compiles the modules of a ``LightningModule`` under a plan."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.trainer.states import TrainerFn
from torch import nn

from shardgraph.api.compile import compile
from shardgraph.errors import ShardGraphError
from shardgraph.module import checkpoint
from shardgraph.module.first_rank import take_from_first_rank
from shardgraph.module.gradient_norm import clip_grad_norm_
from shardgraph.module.sharded import ShardedModule
from shardgraph.module.whole import whole_parameters
from shardgraph.plans.plan import Plan
from shardgraph.trainers.batches import check_lightning_precision, check_options, check_own_batches
from shardgraph.trainers.whole_optimizer import WholeOptimizer

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)


class ShardGraphStrategy(DDPStrategy):
    """A strategy for ``lightning.pytorch.Trainer`` that trains under a plan, in the place of ``"ddp"``.

    ::

        trainer = Trainer(strategy=ShardGraphStrategy("fsdp"), devices=2)

    The modules that a ``LightningModule`` has are compiled, each into a program, and stay in it under their names;
    its steps run as they are. Every rank takes the first one's weights. ``configure_optimizers`` sees shards.

    Args:
        plan: of :func:`shardgraph.compile`, for a run in which every rank has a batch of its own: ``"ddp"``,
            ``"zero1"``, ``"zero2"``, ``"fsdp"``, ``"hsdp"``, ``"ep"``, a :class:`Plan` or a plan file.
        options: further ones of :func:`shardgraph.compile`, such as ``{"recompute": "full"}``.
        ddp: the arguments of ``DDPStrategy`` about launching, by name: ``cluster_environment``, ``timeout``, ...

    Raises:
        ShardGraphError: they ask for what cannot be under a plan; the message says what can.
    """

    _lightning_module: Any

    def __init__(
        self, plan: str | Path | Plan = "fsdp", *, options: Mapping[str, Any] | None = None, **ddp: Any
    ) -> None:
        self.plan, self.options = plan, dict(options or {})
        check_options(self.options, "Lightning")
        if ddp.get("start_method", "popen") != "popen":
            raise ShardGraphError(
                f"start_method={ddp['start_method']!r} returns the model to the first process, and other ranks have "
                "shards of it: leave it out, so that the script is started for each rank, or use torchrun"
            )
        super().__init__(**ddp)

    def setup(self, trainer: Trainer) -> None:
        """Compile the modules of the LightningModule; once, also if another stage follows."""
        check_lightning_precision(self.precision_plugin.precision, "the Trainer")
        check_own_batches(self.plan, self.options.get("mesh"), "Lightning")
        assert self.accelerator is not None and self.lightning_module is not None
        self.accelerator.setup(trainer)
        self.model = self.precision_plugin.convert_module(self.lightning_module)
        if not self._compiled:
            self._compile(self.lightning_module)
        plugin: Any = self.precision_plugin
        plugin.clip_grad_by_norm = self._clip_grad_by_norm
        if trainer.state.fn == TrainerFn.FITTING:
            self.setup_optimizers(trainer)
        self.setup_precision_plugin()

    def _compile(self, module: nn.Module) -> None:
        _check_own(module)
        take_from_first_rank(module)
        for parent, name, child in _parts(module):
            if next(child.parameters(), None) is not None:
                setattr(parent, name, compile(child, self.plan, **self.options))
            else:
                child.to(self.root_device)
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(self.root_device))

    @property
    def _compiled(self) -> list[ShardedModule]:
        modules = () if self.lightning_module is None else self.lightning_module.modules()
        return [each for each in modules if isinstance(each, ShardedModule)]

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """Weights are loaded into shards."""
        return True

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Accumulate gradients without communication."""
        with ExitStack() as stack:
            for each in self._compiled:
                stack.enter_context(each.no_sync())
            yield

    def _clip_grad_by_norm(self, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        clip_grad_norm_(self.precision_plugin.main_params(optimizer), clip_val)

    @contextmanager
    def whole_parameters(self, keep: bool = True) -> Iterator[nn.Module]:
        """The LightningModule, whose parameters are whole, plain tensors inside; all ranks must enter it.

        Its modules are the ones that were compiled, so that it runs without communication. What is written to
        parameters stays, if ``keep``.
        """
        assert self.lightning_module is not None
        compiled = [
            (parent, name, child)
            for parent, name, child in _parts(self.lightning_module)
            if isinstance(child, ShardedModule)
        ]
        with ExitStack() as stack:
            for parent, name, sharded in compiled:
                stack.enter_context(whole_parameters(sharded.original, keep=keep))
                setattr(parent, name, sharded.original)
            try:
                yield self.lightning_module
            finally:
                for parent, name, sharded in compiled:
                    setattr(parent, name, sharded)

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Whole tensors in CPU memory, on the first rank; empty on others. All ranks must call it."""
        assert self.lightning_module is not None
        return checkpoint.full_state_dict(self.lightning_module)

    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        """Load whole tensors: each rank keeps its shards."""
        _load(self.lightning_module, checkpoint["state_dict"], strict)

    def optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """The state of whole tensors, on the first rank. All ranks must call it."""
        return WholeOptimizer(_plain(optimizer)).state_dict()

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        """Load states of whole tensors."""
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            WholeOptimizer(_plain(optimizer)).load_state_dict(state)

    def teardown(self) -> None:
        """Shards stay where they are: see :meth:`whole_parameters`."""
        module, self._lightning_module = self._lightning_module, None  # which would be moved
        try:
            super().teardown()
        finally:
            self._lightning_module = module


def _parts(module: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Module]]:
    """The modules that a step calls: the children, and those in lists and dictionaries of modules."""
    for name, child in list(module.named_children()):
        if isinstance(child, _CONTAINERS):
            yield from _parts(child)
        else:
            yield module, name, child


def _check_own(module: nn.Module) -> None:
    """Refuse parameters that no compiled module would have, or that two would."""
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise ShardGraphError(
            f"the LightningModule has the parameter {own[0]!r} itself, and its modules are what is compiled: make it a "
            "parameter of a module that training_step calls"
        )
    owners: dict[nn.Parameter, str] = {}
    for _, name, child in _parts(module):
        for parameter in {*child.parameters()}:
            if owners.setdefault(parameter, name) != name:
                raise ShardGraphError(
                    f"{owners[parameter]!r} and {name!r} of the LightningModule share a parameter, and each is "
                    "compiled by itself: put both into one module that training_step calls"
                )


def _load(module: Any, state: Mapping[str, Any], strict: bool) -> None:
    tensors = {name: value for name, value in state.items() if isinstance(value, torch.Tensor)}
    checkpoint.load_full_state_dict(module, tensors, strict=strict)


def _plain(optimizer: Any) -> torch.optim.Optimizer:
    """The optimizer that a LightningOptimizer has."""
    found: torch.optim.Optimizer = getattr(optimizer, "_optimizer", optimizer)
    return found
