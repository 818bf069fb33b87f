"""The compiled module: an ``nn.Module`` that holds shards and trains like the original."""

from __future__ import annotations

import types
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import fx, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardgraph import torch_api
from shardgraph.arguments import BOOL, FROM_NUMPY, OPTIMIZER, checked, instance, whole
from shardgraph.capture.capture import own_loss
from shardgraph.capture.captures import Call
from shardgraph.capture.pytrees import flatten
from shardgraph.capture.subclasses import check_inputs, check_tensors, check_transforms
from shardgraph.errors import NOT_PICKLED, ArgumentError, ShardGraphError, shown
from shardgraph.module import checkpoint, training_step
from shardgraph.module.accumulated import clear_with_optimizers
from shardgraph.module.as_written import AsWritten
from shardgraph.module.compiled import Setup
from shardgraph.module.copying import copied_model
from shardgraph.module.fingerprint import digest
from shardgraph.module.flat_update import FlatUpdate, NotFlatError
from shardgraph.module.gradient_norm import check_clipping
from shardgraph.module.lengths import Padding
from shardgraph.module.local_step import step_together
from shardgraph.module.optimizer_state import described
from shardgraph.module.other_wrappers import instead_of
from shardgraph.module.programs import Programs
from shardgraph.module.remembered import lowered
from shardgraph.module.replaced import adopt, current
from shardgraph.module.saved_state import SavedState
from shardgraph.module.sharding import shard_added
from shardgraph.module.shared_batch import check_shared
from shardgraph.module.update_in_backward import updates_of
from shardgraph.passes.program import Program
from shardgraph.plans.plan import Plan
from shardgraph.plans.shards import named_shapes
from shardgraph.runtime.autograd import Differentiable
from shardgraph.runtime.direct import is_direct, loss_and_gradients
from shardgraph.runtime.executor import Executor, State, mesh_rank
from shardgraph.runtime.gradient_statistics import GradientStatistics
from shardgraph.runtime.joined import announce
from shardgraph.runtime.loss_weight import weight_by_elements
from shardgraph.runtime.pipeline.microbatches import loss_counts
from shardgraph.runtime.watch import translated
from shardgraph.torch_api import pytree

_SCALER = instance("a torch.amp.GradScaler, such as shardgraph.GradScaler()", torch.amp.GradScaler)


class ShardedModule(SavedState):
    """A model compiled under a plan, by :func:`shardgraph.compile`.

    It shares the original's submodules, so names, ``train()``/``eval()`` and ``requires_grad_`` are the original's; its
    parameters are DTensors (plain tensors without a process group). The first call with new shapes, dtypes, mode or
    numbers, or after a change of the model that its forward reads, compiles a program, under the same plan and for the
    same parameters; programs are cached.
    """

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
        self._own(gradient_norm=None, _shared=False, _before_training=None, _hooked_by=None)
        _MODULES.add(self)

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
        raise ShardGraphError(NOT_PICKLED)

    def __copy__(self) -> Any:
        raise ShardGraphError(
            "copy.copy of a compiled module would share its programs: copy.deepcopy makes one with shards of its own"
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

    @checked(samples=whole(0))
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
        self.reshard()
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

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As ``nn.Module.zero_grad``; gradients accumulated under :meth:`no_sync` are cleared too."""
        if set_to_none is not True and set_to_none is not False:
            BOOL.check("zero_grad(): set_to_none", set_to_none)
        self.reshard()
        super().zero_grad(set_to_none)
        for gradients in self._state.accumulated:
            gradients.clear()

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
        torch_api.take_blocks(checkpoint.own_part)
        torch_api.describe_states(described)
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
            if computed := [name for name in names if not isinstance(parameters[name], nn.Parameter)]:
                raise ShardGraphError(
                    f"in the place of the parameter {computed[0]!r} is a tensor that is none, as in "
                    "torch.func.functional_call: call functional_call(sharded.original, ...), which runs as written, "
                    "with whole tensors (inside of sharded.unsharded() the parameters are)"
                )
            check_tensors(self.original)
            lines += [f"{name}: {list(parameters[name].shape)} {digest(parameters[name])}" for name in names]
        with self._setup.agreement.on_all_ranks("their shards"):
            shard_added(self.original, names, self.plan, self.mesh, self._state.device)
        self._state.updates.clear()
        self.forget()
        self.settle()

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
        with self._as_written.aside():
            return self._programs.of(calls, spec, loss_fn)

    def _program(self, call: Call, show: Callable[[str], None]) -> Program:
        """The program of a call, not bound to this rank."""
        show("capture")
        joint = self._setup.captures.take(call, self.plan)
        setup = self._setup
        return lowered(joint, self.plan, named_shapes(call.model), show, setup.device, setup.agreement.first_made)

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
