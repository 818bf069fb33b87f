"""The model's own code on a compiled module's parameters: other methods than forward, submodules, the original itself.

Compiled programs are of ``forward``. Everything else runs as it is written, one operation after the other, on whole
parameters: a call of a module that holds shards gathers those of the module and of its children for the call, and a
method those that it uses by themselves. Backward through it averages the gradients of whole parameters over all ranks
and gives each shard its part, as compiled programs do. So all ranks must make the same calls.
"""

from __future__ import annotations

import functools
import re
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor, Replicate
from torch.overrides import TorchFunctionMode, _get_current_function_mode, _pop_mode_temporarily

from shardgraph.errors import MIXED, ON_SHARDS, ShardGraphError, ShardOperationError
from shardgraph.module.checkpoint import sharded_like
from shardgraph.module.joining import refuse_inside
from shardgraph.torch_api import explain_refusals, list_weights, local_tensor, pytree

_RUN = "_compiled_call_impl"
"""The attribute of a module that replaces what calling it does, for this instance; torch's copies leave it out."""


class AsWritten:
    """Runs the code of a model whose parameters are shards, on ``device``.

    With a ``refusal`` it cannot, and that is why.
    """

    def __init__(self, device: torch.device, refusal: str | None = None) -> None:
        self._device, self._refusal = device, refusal
        self._whole: dict[DTensor, torch.Tensor] = {}  # what has been gathered and is still needed
        self._depth = 0

    def intercept(self, model: nn.Module) -> None:
        """From now on, calls of ``model`` and of its submodules that have shards gather them."""
        explain_refusals(_explained)
        for module in _with_shards(model):
            before = vars(module).get(_RUN)
            run = before.run if isinstance(before, _Intercepted) else before
            vars(module)[_RUN] = _Intercepted(self, weakref.ref(module), run)

    def method(self, name: str, bound: Any) -> Callable[..., Any]:
        """A method of the model, in which a parameter that several calls need is gathered once."""

        @functools.wraps(bound)
        def run(*args: Any, **kwargs: Any) -> Any:
            with self.by_themselves(f"{name}() of the model"):
                result = bound(*args, **kwargs)
            return self._returned(result)

        return run

    @contextmanager
    def by_themselves(self, what: str) -> Iterator[None]:
        """Inside, which is ``what``, parameters may be used by themselves, and each is gathered once."""
        try:
            with self._session(), nullcontext() if self._refusal else _ByThemselves(self):
                yield
        except RuntimeError as error:
            if not isinstance(error, ShardOperationError) and MIXED not in str(error):
                raise
            raise ShardGraphError(  # all that computes with them has found them whole
                f"{what} writes to a parameter outside of the call of the module that has it, and the parameter is a "
                f"shard: call it inside of `with sharded.unsharded():` ({error.__cause__ or error})"
            ) from error

    def aside(self) -> AbstractContextManager[Any]:
        """Inside, functions are as they are outside of :meth:`by_themselves`: a program is made of the model alone."""
        mine = isinstance(_get_current_function_mode(), _ByThemselves)
        return _pop_mode_temporarily() if mine else nullcontext()

    def call(self, module: nn.Module, run: Callable[..., Any]) -> Any:
        """The result of ``run``, with whole parameters in the places of the shards of ``module`` and its children."""
        shards = list(filter(_is_shard, module.parameters()))
        if not shards:  # within another call
            return run()
        if self._refusal is not None:
            raise ShardGraphError(self._refusal)
        refuse_inside(f"{type(module).__name__}, which runs as it is written,")
        with self._session(), self._in_place(module, shards):
            return run()

    def whole(self, shard: DTensor) -> torch.Tensor:
        """A parameter, or what was computed from some, with backward to its shards."""
        if not shard.is_leaf:
            everywhere = [Replicate()] * shard.device_mesh.ndim
            return _Whole.apply(shard.redistribute(placements=everywhere), self._device)
        if shard not in self._whole:
            with torch.enable_grad():  # another use in the method may be differentiated
                self._whole[shard] = _Whole.apply(shard, self._device)
        return self._whole[shard]

    def _returned(self, result: Any) -> Any:
        """What a method returns; what it computed from shards alone, as their norms, is whole, to be part of a loss."""
        if not any(map(_is_computed, pytree.tree_leaves(result))):
            return result  # the very object
        return pytree.tree_map_only(_is_computed, self.whole, result)

    @contextmanager
    def _session(self) -> Iterator[None]:
        """What is gathered stays so until the outermost session ends; then shards take what was written to it."""
        self._depth += 1
        try:
            yield
        finally:
            self._depth -= 1
            if not self._depth:
                gathered, self._whole = self._whole, {}
                for parameter, whole in gathered.items():
                    if whole._version:
                        with torch.no_grad():
                            local_tensor(parameter).copy_(local_tensor(sharded_like(whole.detach(), parameter)))

    @contextmanager
    def _in_place(self, module: nn.Module, shards: list[Any]) -> Iterator[None]:
        """Whole parameters in the places of a module's and its children's shards."""
        for parameter in shards:
            self.whole(parameter)
        replaced: list[tuple[Any, str, Any]] = [
            (holder, key, parameter)
            for holder in module.modules()
            for key, parameter in holder._parameters.items()
            if isinstance(parameter, DTensor)
        ]
        for holder, key, parameter in replaced:
            holder._parameters[key] = self._whole[parameter]  # no nn.Parameter, as with torch.func.functional_call
        try:
            yield
        finally:
            for holder, key, parameter in replaced:
                holder._parameters[key] = parameter
                list_weights(holder)


@dataclass(frozen=True)
class _Intercepted:
    """What calling a module does; ``run`` is what it did before, if not what its class says."""

    as_written: AsWritten
    module: weakref.ref[nn.Module]  # which has this as its attribute
    run: Callable[..., Any] | None

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        module = self.module()
        assert module is not None  # it is being called
        run = module._call_impl if self.run is None else self.run
        return self.as_written.call(module, functools.partial(run, *args, **kwargs))


class _ByThemselves(TorchFunctionMode):
    """Inside, shards are whole for a function that takes them together with other tensors, or that DTensor has not.

    Functions of shards alone are left to DTensor, and so are those that write to them.
    """

    def __init__(self, as_written: AsWritten) -> None:
        super().__init__()
        self._as_written = as_written

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        """Call ``func``."""
        given, kwargs = (args, kwargs or {}), kwargs or {}
        if torch.compiler.is_compiling() or _writes(func, kwargs):
            return func(*args, **kwargs)
        tensors = [each for each in pytree.tree_leaves(given) if isinstance(each, torch.Tensor)]
        if not any(isinstance(each, DTensor) for each in tensors):
            return func(*args, **kwargs)
        if all(isinstance(each, DTensor) for each in tensors):
            with suppress(ShardOperationError):  # of what DTensor does not have
                if torch.is_grad_enabled() and not _LEAF.search(getattr(func, "__name__", "")):
                    args, kwargs = pytree.tree_map_only(DTensor, _placed, given)
                return func(*args, **kwargs)
        args, kwargs = pytree.tree_map_only(DTensor, self._as_written.whole, given)
        return func(*args, **kwargs)


def _explained(error: RuntimeError) -> Exception:
    """What is raised where torch does not have an operation for shards."""
    told = str(error).partition("\n")[0]
    if (summand := _IN_SUMMANDS.search(told)) is None:
        return ShardOperationError(f"{ON_SHARDS} ({told})")
    name = summand[1]
    return ShardOperationError(
        f"a norm, mean or sum of a shard is only part of the whole one's, of which torch makes the whole where it is "
        f"used, not where it is written to: take the result of {name}() instead of {name}_() ({told})"
    )


_IN_SUMMANDS = re.compile(r"(\w+)_\.\w+: in-place operations that require placement changes.*Partial")
_WRITING = re.compile(r"[^_]_$|^__(set|setitem|i(add|sub|mul|truediv|floordiv|mod|pow|and|or|xor))__$|^backward$")


_LEAF = re.compile(r"^__(get|set|deepcopy)__$|^register_|^retain_grad$")
"""Functions that are about a tensor itself, not about its value."""


def _writes(func: Any, kwargs: Mapping[str, Any]) -> bool:
    return "out" in kwargs or bool(_WRITING.search(getattr(func, "__name__", "")))


def _is_computed(value: Any) -> bool:
    return isinstance(value, DTensor) and not value.is_leaf


def _is_shard(parameter: nn.Parameter) -> bool:
    return isinstance(parameter, DTensor) or parameter.is_meta  # on meta: of another pipeline stage


def _with_shards(model: nn.Module) -> set[nn.Module]:
    """The modules of a model that have shards, or children that do."""
    parents: dict[nn.Module, list[nn.Module]] = {module: [] for module in model.modules()}
    for module in parents:
        for child in module.children():
            parents[child].append(module)
    pending = [module for module in parents if any(map(_is_shard, module.parameters(recurse=False)))]
    found = set(pending)
    while pending:
        above = [each for each in parents[pending.pop()] if each not in found]
        found.update(above)
        pending += above
    return found


def _placed(shard: DTensor) -> DTensor:
    """``shard``, as one that is given its gradient in its own placements: those of a function of shards may differ."""
    return _Placed.apply(shard) if shard.is_leaf and shard.requires_grad else shard


class _Placed(torch.autograd.Function):
    """A shard, whose gradient is placed as it is."""

    @staticmethod
    def forward(ctx: Any, shard: DTensor) -> Any:
        """The same."""
        ctx.placements = shard.placements
        return shard.view_as(shard)

    @staticmethod
    def backward(ctx: Any, gradient: Any) -> Any:
        """The gradient, in these placements."""
        return gradient.redistribute(placements=ctx.placements)


class _Whole(torch.autograd.Function):
    """A whole parameter from its shards."""

    @staticmethod
    def forward(ctx: Any, parameter: DTensor, device: torch.device) -> torch.Tensor:
        """Gather it."""
        ctx.parameter = parameter
        whole = parameter.full_tensor().to(device)
        return whole.clone() if whole._is_view() or whole is local_tensor(parameter) else whole

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[DTensor, None]:
        """The mean over all ranks, of which each takes its part."""
        parameter, mean = ctx.parameter, gradient.clone()
        mesh = parameter.device_mesh
        for axis in range(mesh.ndim):
            dist.all_reduce(mean, group=mesh.get_group(axis))
        return sharded_like(mean / mesh.size(), parameter), None


@contextmanager
def without_gradients(parameters: Iterable[nn.Parameter]) -> Iterator[None]:
    """Backward raises where it reaches one of these, which are whole for a while and have no shard to give it to."""

    def refuse(gradient: torch.Tensor) -> None:
        raise ShardGraphError(
            "backward reached a parameter that is whole inside of unsharded(): its gradient would be lost. Compute "
            "what is differentiated outside of unsharded(): calls of the module, of its submodules and methods gather "
            "what they need, and their gradients reach the shards"
        )

    hooks = [parameter.register_hook(refuse) for parameter in parameters if parameter.requires_grad]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
