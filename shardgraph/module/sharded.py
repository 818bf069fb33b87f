"""The compiled module: an ``nn.Module`` that holds shards and trains like the original."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardgraph import torch_api
from shardgraph.arguments import BOOL, CALLABLE, FROM_NUMPY, OPTIMIZER, PATH, STATE, checked, instance
from shardgraph.capture.capture import own_loss
from shardgraph.capture.captures import Call, Captures
from shardgraph.capture.pytrees import flatten
from shardgraph.capture.subclasses import check_inputs, check_transforms
from shardgraph.emission import saved as emission
from shardgraph.errors import ArgumentError, ShardGraphError, shown
from shardgraph.module import checkpoint, local_state, training_step
from shardgraph.module.accumulated import clear_with_optimizers
from shardgraph.module.as_written import AsWritten, without_gradients
from shardgraph.module.copying import copied_model
from shardgraph.module.fingerprint import digest
from shardgraph.module.flat_update import FlatUpdate, NotFlatError
from shardgraph.module.gradient_norm import check_clipping, clip_grad_norm_
from shardgraph.module.input_names import input_names
from shardgraph.module.joining import joined
from shardgraph.module.lengths import Lengths, Padding
from shardgraph.module.local_step import step_together
from shardgraph.module.other_wrappers import instead_of
from shardgraph.module.programs import Programs
from shardgraph.module.remembered import lowered
from shardgraph.module.replaced import adopt, current
from shardgraph.module.sharding import shard_added
from shardgraph.module.shared_batch import check_shared
from shardgraph.module.update_in_backward import updates_of
from shardgraph.module.whole import whole_parameters
from shardgraph.passes.lowering import lower
from shardgraph.passes.program import Program
from shardgraph.plans.plan import Plan
from shardgraph.plans.shards import named_shapes
from shardgraph.runtime.agreement import Agreement
from shardgraph.runtime.autograd import Differentiable
from shardgraph.runtime.backends import Backend, eager
from shardgraph.runtime.direct import is_direct, loss_and_gradients
from shardgraph.runtime.executor import Executor, State, mesh_rank
from shardgraph.runtime.gradient_statistics import GradientStatistics
from shardgraph.runtime.hooked import CommunicationHook, check_hookable
from shardgraph.runtime.joined import announce
from shardgraph.runtime.loss_weight import weight_by_elements
from shardgraph.runtime.pipeline.microbatches import loss_counts
from shardgraph.runtime.watch import translated
from shardgraph.torch_api import pytree

_REDUCED_BY = {"allreduce_hook": "", "fp16_compress_hook": "float16", "bf16_compress_hook": "bfloat16"}

_SCALER = instance("a torch.amp.GradScaler, such as shardgraph.GradScaler()", torch.amp.GradScaler)


@dataclass(frozen=True)
class Setup:
    """What a module compiles its programs with, on this rank; see :func:`shardgraph.compile`."""

    device: torch.device
    loss_fn: Callable[..., torch.Tensor] | None
    agreement: Agreement
    progress: bool | None
    captures: Captures
    loss_weight: str = "ranks"
    backend: Backend = eager.backend
    lengths: Lengths | None = None
    random: str = "ranks"

    def again(self) -> Setup:
        """The same for another module."""
        return replace(self, captures=Captures(self.device))


class ShardedModule(nn.Module):
    """A model compiled under a plan, by :func:`shardgraph.compile`.

    It shares the original's submodules, so names, ``train()``/``eval()`` and ``requires_grad_`` are the original's; its
    parameters are DTensors (plain tensors without a process group). The first call with new shapes, dtypes, mode or
    numbers, or after a change of the model that its forward reads, compiles a program, under the same plan and for the
    same parameters; programs are cached.
    """

    original: nn.Module
    plan: Plan
    mesh: DeviceMesh | None
    replicas: dist.ProcessGroup | None  # those with this rank's shards in all replicas of the model
    loss_fn: Callable[..., torch.Tensor] | None
    _setup: Setup
    _state: State
    _sync: bool
    gradient_norm: torch.Tensor | None  # of all gradients, before the latest clipping by ``step``
    _as_written: AsWritten
    _whole_mesh: DeviceMesh | None  # with the axes of replicas and stages
    _unsharded: ExitStack | None  # within, parameters are whole
    _before_training: Callable[[], None] | None  # called before each call that is differentiated
    _programs: Programs
    _padding: Padding | None

    def __init__(self, model: nn.Module, plan: Plan, mesh: DeviceMesh | None, setup: Setup) -> None:
        super().__init__()
        # The original's own dictionaries: one set of names, no prefix, nothing to synchronise; and of hooks of its
        # state, which it makes and loads.
        for shared in ("_modules", "_parameters", "_buffers", "_non_persistent_buffers_set", *checkpoint.STATE_HOOKS):
            self.__dict__[shared] = getattr(model, shared)
        self._own(_whole_mesh=mesh, _unsharded=None, _as_written=AsWritten(setup.device, self._why_not_as_written()))
        replicas = mesh.get_group(plan.replicas[0][0]) if mesh is not None and plan.replicas else None
        if mesh is not None and plan.replicas:
            mesh = mesh[plan.axes] if plan.axes else None
        self._own(original=model, training=model.training, plan=plan, loss_fn=setup.loss_fn)
        self._own(mesh=mesh, replicas=replicas)
        replica = 0 if replicas is None else dist.get_rank(replicas)
        state = State(model, mesh, setup.device, replica, setup.backend, setup.agreement, setup.random)
        clear_with_optimizers(state)
        padded = setup.lengths is not None
        programs = Programs(model, plan, state, setup.agreement, self._program, self._bound, padded, setup.progress)
        self._own(_setup=setup, _state=state, _programs=programs, _sync=True)
        self._own(_padding=Padding(setup.lengths, model, setup.device) if setup.lengths is not None else None)
        self._own(gradient_norm=None, _shared=False, _before_training=None)
        _MODULES.add(self)

    def _own(self, **attributes: Any) -> None:
        """Set attributes of this module, where assignment may set the model's."""
        self.__dict__.update(attributes)

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            original = self.__dict__["original"]
            try:
                value = getattr(original, name)  # config, and other attributes of the model
            except AttributeError as absent:
                raise instead_of(name, type(original).__name__) or absent from None
            own = isinstance(value, types.MethodType) and value.__self__ is original
            return self._as_written.method(name, value) if own and self.mesh is not None else value

    def __setattr__(self, name: str, value: Any) -> None:
        own = name in self.__dict__ or hasattr(type(self), name)
        if own:
            self.__dict__[name] = value
        if not own or name == "training":
            setattr(self.__dict__["original"], name, value)

    def __delattr__(self, name: str) -> None:
        if name in self.__dict__:
            super().__delattr__(name)
        else:
            delattr(self.__dict__["original"], name)

    def __getitem__(self, key: Any) -> Any:
        model: Any = self.original  # an nn.Sequential, perhaps
        return model[key]

    def __setitem__(self, key: Any, value: Any) -> None:
        model: Any = self.original
        model[key] = value

    def __deepcopy__(self, memo: Any) -> Any:
        """A module of its own with the same values, which compiles its programs at its first call, on all ranks."""
        if self.plan.offload.parameters:
            raise ShardGraphError(
                "a compiled module whose parameters are offloaded cannot be copied: copy the model before "
                "shardgraph.compile and compile both; state_dict and load_state_dict copy values"
            )
        self.reshard()
        made = type(self)(copied_model(self.original, memo), self.plan, self._whole_mesh, self._setup.again())
        memo[id(self)] = made
        made.settle()
        return made

    def __reduce_ex__(self, protocol: Any) -> Any:
        raise ShardGraphError(
            "a compiled module cannot be pickled, with its process groups and programs: save its state, with "
            "torch.save(sharded.full_state_dict(), ...) or save_safetensors for the original model, or with "
            "torch.distributed.checkpoint for any number of ranks"
        )

    @torch_api.not_traced
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As ``nn.Module``; ``torch.compile`` leaves it as it is."""
        return super().__call__(*args, **kwargs)

    def train(self, mode: bool = True) -> ShardedModule:
        """Set training mode, as ``nn.Module.train``."""
        if mode is not True and mode is not False:
            BOOL.check("train(): mode", mode)
        self.original.train(mode)
        self.training = mode
        return self

    @translated
    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """The original's forward, on this rank's part of the batch; returns its output."""
        return self._without_padding(self._run(args, kwargs, None)[-1], args, kwargs)

    def rows_of(self, samples: int) -> slice:
        """This rank's rows of a batch of ``samples``, which are those of all ranks together.

        Ranks along data axes have parts as equal as can be, in their order, and ranks that share a batch have the same.
        Where ``samples`` is no multiple, the first ones have a row more: ``compile(..., loss_weight="tokens")`` weighs
        the losses of ``train_step`` by their rows.

        Raises:
            ShardGraphError: there are fewer samples than ranks along data axes.
        """
        count = self.plan.data_size * self.plan.copies
        if samples < count:
            raise ShardGraphError(f"{samples} samples are fewer than the {count} ranks that have batches of their own")
        mesh = self._state.mesh
        index = 0 if mesh is None else self._state.replica * self.plan.data_size + self.plan.data_rank(mesh_rank(mesh))
        each, more = divmod(samples, count)
        start = index * each + min(index, more)
        return slice(start, start + each + (index < more))

    @torch_api.not_traced
    @translated
    def train_step(self, *args: Any, scaler: torch.amp.GradScaler | None = None, **kwargs: Any) -> torch.Tensor:
        """Forward, the loss and backward; returns this rank's loss, detached.

        Gradients are accumulated in ``parameter.grad``; the optimizer step is the caller's. The loss is
        ``loss_fn(output, target)`` with the ``loss_fn`` of :func:`shardgraph.compile` and the keyword argument
        ``target``, or else the model's own ``output.loss``. With a ``scaler``, gradients are those of the scaled loss,
        for its ``step`` or ``unscale_``; the returned loss is not scaled.

        Raises:
            ShardGraphError: there is neither loss, or a ``target`` without a ``loss_fn``.
        """
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            _SCALER.check("train_step(): scaler", scaler)
        executor, leaves, loss = self._run(args, kwargs, self._loss_of(kwargs))
        self._weighted(loss, executor, leaves, scaler).backward()
        return loss.detach()

    def _weighted(
        self, loss: torch.Tensor, executor: Executor, leaves: list[Any], scaler: torch.amp.GradScaler | None
    ) -> torch.Tensor:
        """What is differentiated in place of this rank's loss."""
        if self._setup.loss_weight == "tokens":
            values = [lambda role: self._state.value(role, leaves)]
            reduction, rows, counts = loss_counts([executor.program], values)
            announce(self._state, lambda: ("weigh",))
            loss = loss * weight_by_elements(reduction.elements(rows, counts), self.plan, self._state)
        return loss if scaler is None else scaler.scale(loss)

    @torch_api.not_traced
    @translated
    def step(
        self,
        *args: Any,
        optimizer: torch.optim.Optimizer,
        max_norm: float | None = None,
        scaler: torch.amp.GradScaler | None = None,
        **kwargs: Any,
    ) -> torch.Tensor:
        """A whole training step; returns this rank's loss, detached.

        It is :meth:`train_step`, :meth:`clip_grad_norm_` if ``max_norm`` is given, ``optimizer.step()`` and
        ``optimizer.zero_grad()``, with a ``scaler`` its ``step`` and ``update``, and the same numbers, in less time:
        optimizers that compute element by element step on whole buckets of parameters, and no parameter has a
        ``grad`` at any time. Gradients that parameters already have, of earlier calls of :meth:`train_step` or under
        :meth:`no_sync`, count too. The optimizer stays the owner of hyper-parameters and state, and may step by itself
        in between. ``gradient_norm`` is the norm before the latest clipping.

        Raises:
            ShardGraphError: as :meth:`train_step`; or inside of :meth:`no_sync`, or the optimizer trains none of this
                module's parameters.
        """
        if not self._sync:
            raise ShardGraphError(
                "step() updates parameters, and inside no_sync() their gradients are not reduced: call train_step() "
                "there, and step() for the last microbatch outside of it"
            )
        if max_norm is not None:
            check_clipping(max_norm)
        if scaler is not None and not isinstance(scaler, torch.amp.GradScaler):
            _SCALER.check("step(): scaler", scaler)
        if optimizer not in self._state.updates:
            OPTIMIZER.check("step(): optimizer", optimizer)
            adopt(optimizer)
            own = {*map(id, self.parameters())}
            if not any(id(p) in own for group in optimizer.param_groups for p in group["params"]):
                raise ShardGraphError(
                    "the optimizer given to step() has none of this module's parameters: make it of "
                    "sharded.parameters(), or of some of them"
                )
        flat, loss = FlatUpdate.of(optimizer, self._state), None
        if self._state.joining is None and training_step.is_flat(optimizer, scaler, self.plan, self._state):
            loss = self._step_flat(args, kwargs, flat, max_norm, scaler)
        if loss is None:
            loss = self.train_step(*args, scaler=scaler, **kwargs)
            self._own(gradient_norm=training_step.apart(optimizer, max_norm, scaler, self.clip_grad_norm_))
            optimizer.zero_grad()
        if scaler is not None:
            scaler.update()
        return loss

    def _step_flat(
        self,
        args: Any,
        kwargs: Any,
        flat: FlatUpdate,
        max_norm: float | None,
        scaler: torch.amp.GradScaler | None,
    ) -> torch.Tensor | None:
        """The loss of a step on buckets of parameters, or None if it cannot be done like that and nothing has been."""
        with torch.enable_grad():
            executor, leaves = self._executor(args, kwargs, self._loss_of(kwargs))
        if not is_direct(executor, leaves):
            return None
        assert isinstance(executor, Differentiable)

        def tangent(loss: torch.Tensor) -> torch.Tensor:
            if scaler is None and self._setup.loss_weight != "tokens":
                return torch.ones_like(loss)
            loss = loss.detach().requires_grad_()
            with torch.enable_grad():
                return torch.autograd.grad(self._weighted(loss, executor, leaves, scaler), loss)[0]

        updates = updates_of(flat, executor, leaves) if max_norm is None and scaler is None else None
        if updates is not None:
            loss = updates.step(executor, leaves, tangent)
            self._programs.set_attributes()
            self._own(gradient_norm=None)
            return loss
        loss, gradients = loss_and_gradients(executor, leaves, tangent)
        self._programs.set_attributes()
        try:
            norm = training_step.update(flat, gradients, self._state, max_norm, scaler)
        except NotFlatError:
            self._state.add_gradients(gradients)
            norm = training_step.apart(flat.optimizer, max_norm, scaler, self.clip_grad_norm_)
            flat.optimizer.zero_grad()
        self._own(gradient_norm=norm)
        return loss

    def _loss_of(self, kwargs: Mapping[str, Any]) -> Callable[..., torch.Tensor]:
        """The loss function of a training step with these keyword arguments."""
        if "target" not in kwargs:
            if self.loss_fn is None:
                return own_loss
            raise ShardGraphError("train_step needs the target of loss_fn(output, target): give it target=...")
        if self.loss_fn is None:
            raise ShardGraphError(
                "train_step has a target and no loss to make of it: give shardgraph.compile a loss_fn(output, target)"
            )
        return self.loss_fn

    @translated
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients down to a total norm of at most ``max_norm``; returns the norm before clipping.

        As :func:`shardgraph.clip_grad_norm_`, over all ranks and all pipeline stages. All ranks must call it.
        """
        check_clipping(max_norm, norm_type)
        announce(self._state, lambda: ("clip", max_norm, norm_type, error_if_nonfinite))
        return clip_grad_norm_(self.parameters(), max_norm, norm_type, error_if_nonfinite)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate gradients locally in backward passes inside, without communication.

        The first backward outside, of whatever program, reduces the sum and sets ``parameter.grad``. ``zero_grad()`` of
        this module, or of an optimizer, clears it.
        """
        before, self._sync = self._sync, False
        try:
            yield
        finally:
            self._sync = before

    @checked(requires_gradient_sync=BOOL, recurse=BOOL)
    def set_requires_gradient_sync(self, requires_gradient_sync: bool, *, recurse: bool = True) -> None:
        """Whether backward passes from now on reduce gradients, as of ``FSDPModule``; see :meth:`no_sync`."""
        if not recurse:
            raise ShardGraphError(
                "gradients of the whole model are reduced by one program: set_requires_gradient_sync(..., recurse=True)"
            )
        self._own(_sync=requires_gradient_sync)

    @checked(is_last_backward=BOOL)
    def set_is_last_backward(self, is_last_backward: bool) -> None:
        """As of ``FSDPModule``, where it saves waits; backward of a program waits for all that it has started."""

    @checked(hook=CALLABLE)
    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """Reduce gradients as this hook of ``DistributedDataParallel`` does, such as PowerSGD.

        Those of ``torch.distributed.algorithms.ddp_comm_hooks.default_hooks`` that say a dtype set ``precision.reduce``
        of the plan, and programs are compiled anew. Any other is called after each backward that reduces gradients,
        with this rank's in buckets as those of ``DistributedDataParallel``; what it remembers is in ``state``, to be
        saved with checkpoints. All ranks must call it.

        Raises:
            ShardGraphError: it is another hook, and the plan is not ``ddp``, or measures gradients.
        """
        name = getattr(hook, "__name__", "")
        if name in _REDUCED_BY and getattr(hook, "__module__", "") == default_hooks.__name__:
            self._state.hook = None
            dtype = _REDUCED_BY[name]
            if dtype and self.plan.precision.reduce != dtype:
                self._own(plan=replace(self.plan, precision=replace(self.plan.precision, reduce=dtype)))
                self.forget()
        else:
            check_hookable(self.plan, name or repr(hook))
            self._state.hook = CommunicationHook(state, hook)

    @checked(divide_by_initial_world_size=BOOL, enable=BOOL, throw_on_early_termination=BOOL)
    def join(
        self, divide_by_initial_world_size: bool = True, enable: bool = True, throw_on_early_termination: bool = False
    ) -> AbstractContextManager[None]:
        """Train inside on unequally many batches: ranks that have no more take part in the others' steps without any.

        As ``DistributedDataParallel.join``, whose arguments it has, also under plans that shard parameters. A rank that
        leaves the block repeats the calls of this module, of :meth:`clip_grad_norm_` and of optimizers that the others
        make, with gradients of zero, until all have left it. So parameters and optimizer states are the same, or shards
        of the same, at any time.

        Args:
            divide_by_initial_world_size: gradients are means over all ranks; False: over those that have batches.
            enable: False: ranks have equally many batches, and nothing is done.
            throw_on_early_termination: raise on all ranks as soon as one has no more batches.

        Raises:
            ShardGraphError: the plan divides more than data.
        """
        return joined(self, divide_by_initial_world_size, throw_on_early_termination) if enable else nullcontext()

    def join_hook(self, **kwargs: Any) -> Any:
        """What ``torch.distributed.algorithms.Join`` asks of a module: refused, since ranks without data follow
        steps of optimizers too, which only :meth:`join` knows of."""
        raise ShardGraphError(
            "torch.distributed.algorithms.Join does not take a compiled module: train inside of "
            "`with sharded.join():`, which covers its optimizers too"
        )

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``; gradients accumulated under :meth:`no_sync` are cleared too."""
        if set_to_none is not True and set_to_none is not False:
            BOOL.check("zero_grad(): set_to_none", set_to_none)
        super().zero_grad(set_to_none)
        for gradients in self._state.accumulated:
            gradients.clear()

    @checked(async_op=BOOL)
    def unshard(self, async_op: bool = False) -> None:
        """Put whole, plain parameters in the places of shards, until :meth:`reshard`. All ranks must call it.

        Submodules and methods of the model then compute without communication, and what is written to parameters, or
        into their places, is kept: each rank takes its part. Nothing is differentiated meanwhile.

        Raises:
            ShardGraphError: the plan has a pipeline, whose stages are on several ranks; or ``async_op`` is True.
        """
        if async_op:
            raise ShardGraphError("unshard() gathers before it returns: unshard(async_op=False), without a handle")
        if (reason := self._why_not_as_written()) is not None:
            raise ShardGraphError(reason)
        if self._unsharded is not None or self.mesh is None:
            return
        with ExitStack() as stack:
            stack.enter_context(whole_parameters(self.original))
            stack.enter_context(without_gradients(self.original.parameters()))
            self._own(_unsharded=stack.pop_all())

    def reshard(self) -> None:
        """Put shards in the places of whole parameters again, after :meth:`unshard`."""
        if self._unsharded is not None:
            stack = self._unsharded
            self._own(_unsharded=None)
            stack.close()

    @contextmanager
    def unsharded(self) -> Iterator[None]:
        """Whole parameters inside: :meth:`unshard`, and :meth:`reshard` at the end."""
        self.unshard()
        try:
            yield
        finally:
            self.reshard()

    @contextmanager
    def as_written(self) -> Iterator[None]:
        """Code of your own inside runs as methods of the model do: on whole parameters, which are gathered where other
        tensors meet them, each once. Gradients reach the shards. All ranks must run it.

        Raises:
            ShardGraphError: the plan has a pipeline, whose stages are on several ranks.
        """
        if (reason := self._why_not_as_written()) is not None:
            raise ShardGraphError(reason)
        with self._as_written.by_themselves("what is inside of as_written()"):
            yield

    def _why_not_as_written(self) -> str | None:
        """Why the model's own code cannot run on this rank, if it cannot."""
        return None

    @property
    def gradient_statistics(self) -> GradientStatistics:
        """What has been measured of gradients since they were last cleared, under a plan that measures them."""
        return self._state.statistics

    def measure_gradients(self) -> None:
        """Measure gradients where they are reduced, from the next call on, as with ``gradient_statistics`` of the plan.

        All ranks must call it. Programs are compiled anew.

        Raises:
            PlanError: the plan cannot.
        """
        if not self.plan.gradient_statistics:
            self._own(plan=replace(self.plan, gradient_statistics=True))
            self.forget()

    def _run(self, args: Any, kwargs: Any, loss_fn: Callable[..., Any] | None) -> tuple[Executor, list[Any], Any]:
        """What ran the call, its flattened inputs, and the output."""
        executor, inputs = self._executor(args, kwargs, loss_fn)
        output = executor(inputs, lambda: self._sync)
        self._programs.set_attributes()
        return executor, inputs, output

    def _executor(self, args: Any, kwargs: Any, loss_fn: Callable[..., Any] | None) -> tuple[Any, list[Any]]:
        """What runs the call, and its flattened inputs."""
        check_transforms()
        self.reshard()
        self._watched()
        leaves, spec = flatten(self._padded(args, kwargs))
        leaves = [on_device(leaf, self._state.device) if isinstance(leaf, torch.Tensor) else leaf for leaf in leaves]
        (executor,) = self._executables([leaves], spec, loss_fn)
        if not self._shared:
            with self._setup.agreement.communicating():
                check_shared(self.plan, self.mesh, leaves)
            self._own(_shared=True)
        return executor, self._programs.lift(leaves, spec)

    def _watched(self) -> None:
        """Do what :meth:`before_training` was given, if this call trains."""
        if self._before_training is not None and self.training and torch.is_grad_enabled():
            self._before_training()

    def before_training(self, check: Callable[[], None] | None) -> None:
        """Have ``check`` called before every call that trains, on all ranks; None: nothing."""
        self._own(_before_training=check)

    def _padded(self, args: Any, kwargs: Any) -> tuple[Any, Any]:
        """The call with the lengths that inputs are to have."""
        return (args, kwargs) if self._padding is None else self._padding.padded(args, kwargs)

    def _without_padding(self, output: Any, args: Any, kwargs: Any) -> Any:
        """What forward returned for the padded call, with the lengths of this one."""
        return output if self._padding is None else self._padding.cut(output, args, kwargs)

    def settle(self) -> None:
        """Record that the model's tensors are sharded now; programs from before are for these."""
        self._state.layout.settle()
        if not self.plan.offload.optimizer_state:
            step_together(self._state)
        self._state.arrange()
        if self.mesh is not None or self._why_not_as_written() is not None:
            self._as_written.intercept(self.original)
        self._programs.moved()

    def _shard_added(self, names: Sequence[str]) -> None:
        """Shard parameters that were added to the model, or replaced, since it was compiled: on all ranks, alike."""
        parameters = dict(self.original.named_parameters())
        with self._setup.agreement.on_all_ranks("the parameters that were added after shardgraph.compile") as lines:
            if self.plan.offload.parameters or self._why_not_as_written() is not None:
                raise ShardGraphError(
                    f"the parameter {names[0]!r} was added or replaced after shardgraph.compile, under a plan with a "
                    "pipeline or offloaded parameters: change the model before, or compile it again"
                )
            lines += [f"{name}: {list(parameters[name].shape)} {digest(parameters[name])}" for name in names]
        with self._setup.agreement.on_all_ranks("their shards"):
            shard_added(self.original, names, self.plan, self.mesh, self._state.device)
        self._state.updates.clear()
        self.forget()
        self.settle()

    def forget(self) -> None:
        """Drop all programs."""
        self._programs.forget()

    def compile_for(self, call: Call) -> None:
        """Compile for a call now, without running; only the shapes, dtypes and numbers of its inputs matter."""
        leaves, spec = pytree.tree_flatten((call.args, dict(call.kwargs)))
        self._executables([leaves], spec, call.loss_fn)

    def _executables(self, calls: Sequence[list[Any]], spec: Any, loss_fn: Callable[..., Any] | None) -> list[Any]:
        """The executables for calls with these flattened inputs, all of one structure, compiled if they are not yet."""
        for leaves in calls:
            _check_local(leaves)
        self._state.layout.refresh()
        if self._state.layout.strange:
            self._shard_added(self._state.layout.strange)
        return self._programs.of(calls, spec, loss_fn)

    def _program(self, call: Call, show: Callable[[str], None]) -> Program:
        """The program of a call, not bound to this rank."""
        show("capture")
        joint = self._setup.captures.take(call, self.plan)
        return lowered(joint, self.plan, named_shapes(call.model), show)

    def _bound(self, program: Program) -> Executor:
        return Differentiable(program, self._state)

    @property
    def forward_graph(self) -> fx.GraphModule:
        """The forward graph of the latest program, as this rank runs it; a pipeline has one per stage."""
        return self._graph("forward")

    @property
    def backward_graph(self) -> fx.GraphModule | None:
        """The backward graph of the latest program, or None for one without gradients; likewise."""
        return self._graph("backward")

    def _graph(self, half: str) -> Any:
        _, executor = self._programs.latest
        return executor.graph(half).module if half in executor.program.graphs else None

    @property
    def program(self) -> Program:
        """The latest program: its plan and its graphs, unbound and for all stages of a pipeline."""
        _, executor = self._programs.latest
        return executor.program

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

        A model that does more than copy values by name (hooks, extra state, methods of its own) loads them into whole
        parameters, as it is written; all ranks must then call this.

        Raises:
            CheckpointError: names or shapes do not match the model; nothing has been loaded.
        """
        if assign:
            raise ShardGraphError("load_state_dict(assign=True) would replace the shards; load in place (the default)")
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
        return local_state.local_state_dict(self._of_stages(nn.Module.state_dict(self)))

    @checked(state_dict=STATE, strict=BOOL)
    def load_local_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> checkpoint.LoadedKeys:
        """Load this rank's shards, of :meth:`local_state_dict`.

        Raises:
            CheckpointError: they are of another model, or of another number of ranks; nothing has been loaded.
        """
        return local_state.load_local_state_dict(self.local_state_dict(), state_dict, strict=strict)

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
        that the call had: put your own in ``batch.safetensors``. After a :meth:`train_step` the program has its loss;
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


_MODULES: weakref.WeakSet[ShardedModule] = weakref.WeakSet()


def module_of(parameter: torch.Tensor) -> ShardedModule:
    """The compiled module that has ``parameter``, or what replaced it.

    Raises:
        ShardGraphError: there is none.
    """
    wanted = current(parameter)
    for module in _MODULES:
        if any(own is wanted for own in module.parameters()):
            return module
    raise ShardGraphError(
        f"a parameter of shape {list(parameter.shape)} is not of a compiled module: compile the model first, with "
        "shardgraph.compile or a wrapper of shardgraph.fairscale"
    )


def on_device(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """An input of a call on ``device``; a DTensor that all ranks have whole, as a parameter's ``new_zeros`` may give,
    is the plain tensor that it is."""
    if type(tensor) is DTensor and not tensor.requires_grad and all(at.is_replicate() for at in tensor.placements):
        tensor = torch_api.local_tensor(tensor)
    return tensor.to(device)


def _check_local(leaves: Sequence[Any]) -> None:
    check_inputs(leaves)
    for i, leaf in enumerate(leaves):
        if type(leaf) is DTensor:
            raise ShardGraphError(
                f"input {i} of the call is a DTensor of shape {list(leaf.shape)}, placed {leaf.placements}, and ranks "
                "are called with their own parts of a batch as plain tensors: give its to_local(), or its "
                "full_tensor() where ranks share a batch"
            )
        if type(leaf) is np.ndarray:
            raise ArgumentError(f"input {i} of the call is {shown(leaf)}; it may be a tensor{FROM_NUMPY}")


COMPILED = instance(
    "a module that shardgraph.compile returned",
    ShardedModule,
    hint=lambda value: f"; {type(value).__name__} is not compiled" if isinstance(value, nn.Module) else "",
)
