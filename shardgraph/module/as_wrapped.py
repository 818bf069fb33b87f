"""What users of ``fully_shard`` and ``DistributedDataParallel`` call of a wrapped model, and its parameters whole."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from shardgraph import torch_api
from shardgraph.arguments import BOOL, CALLABLE, checked
from shardgraph.errors import ShardGraphError
from shardgraph.module.as_written import without_gradients
from shardgraph.module.compiled import Compiled
from shardgraph.module.gradient_norm import check_clipping, clip_grad_norm_
from shardgraph.module.joining import joined
from shardgraph.module.replaced import adopt
from shardgraph.module.whole import whole_parameters
from shardgraph.runtime.hooked import CommunicationHook, check_hookable
from shardgraph.runtime.joined import announce
from shardgraph.runtime.watch import translated

_REDUCED_BY = {"allreduce_hook": "", "fp16_compress_hook": "float16", "bf16_compress_hook": "bfloat16"}


class AsWrapped(Compiled):
    """How a compiled module's gradients are reduced and clipped, and where its parameters are whole."""

    @translated
    def clip_grad_norm_(
        self, max_norm: float, norm_type: float = 2.0, error_if_nonfinite: bool = False
    ) -> torch.Tensor:
        """Scale the gradients down to a total norm of at most ``max_norm``; returns the norm before clipping.

        As :func:`shardgraph.clip_grad_norm_`, over all ranks and all pipeline stages. All ranks must call it.
        """
        check_clipping(max_norm, norm_type)
        self.reshard()
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
        saved with checkpoints. All ranks must call it, once.

        Raises:
            ShardGraphError: it is another hook, and the plan is not ``ddp``, or measures gradients; or there is a hook.
        """
        name = getattr(hook, "__name__", "")
        if self._hooked_by is not None:
            raise ShardGraphError(
                f"register_comm_hook({name!r}): gradients of this module are reduced by {self._hooked_by!r} already, "
                "and by one hook alone: call the one from the other, or compile the model again without it"
            )
        if name in _REDUCED_BY and getattr(hook, "__module__", "") == default_hooks.__name__:
            dtype = _REDUCED_BY[name]
            if dtype and self.plan.precision.reduce != dtype:
                self._own(plan=replace(self.plan, precision=replace(self.plan.precision, reduce=dtype)))
                self.forget()
        else:
            check_hookable(self.plan, name or repr(hook))
            self._state.hook = CommunicationHook(state, hook)
        self._own(_hooked_by=name or repr(hook))

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

    @checked(async_op=BOOL)
    def unshard(self, async_op: bool = False) -> None:
        """Put whole, plain parameters in the places of shards, until :meth:`reshard`. All ranks must call it.

        Submodules and methods of the model then compute without communication, and what is written to parameters, or
        into their places, is kept: each rank takes its part. Nothing is differentiated meanwhile. What trains shards
        them again: a call of this module, its ``zero_grad`` and :meth:`clip_grad_norm_`, a step of its optimizer.

        Raises:
            ShardGraphError: the plan has a pipeline, whose stages are on several ranks; or ``async_op`` is True.
        """
        if async_op:
            raise ShardGraphError("unshard() gathers before it returns: unshard(async_op=False), without a handle")
        if (reason := self._why_not_as_written()) is not None:
            raise ShardGraphError(reason)
        if self._unsharded is not None or self.mesh is None:
            return
        shards = frozenset(map(id, self.original.parameters()))
        with ExitStack() as stack:
            stack.enter_context(whole_parameters(self.original))
            stack.enter_context(without_gradients(self.original.parameters()))
            self._own(_unsharded=stack.pop_all())
        _UNSHARDED[self] = shards
        _watch_optimizers()

    def reshard(self) -> None:
        """Put shards in the places of whole parameters again, after :meth:`unshard`."""
        if self._unsharded is not None:
            stack = self._unsharded
            self._own(_unsharded=None)
            del _UNSHARDED[self]
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


_UNSHARDED: weakref.WeakKeyDictionary[AsWrapped, frozenset[int]] = weakref.WeakKeyDictionary()
"""The modules whose parameters are whole by :meth:`AsWrapped.unshard`, each with its shards."""


@functools.cache
def _watch_optimizers() -> None:
    torch_api.before_every_step(_reshard_what_steps)


def _reshard_what_steps(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Put shards in place again before an optimizer steps them: whole parameters would take the place of the step."""
    if not _UNSHARDED:
        return
    stepped = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    for module, shards in list(_UNSHARDED.items()):
        if not stepped.isdisjoint(shards | {*map(id, module.original.parameters())}):
            module.reshard()
            adopt(optimizer)  # one that was made of whole parameters
