"""A loss scale for each layer (R. Zhao et al., 2019, "Adaptive loss scaling", https://arxiv.org/abs/1910.12385)."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from shardgraph.arguments import MODEL, POSITIVE, checked, mapping_of, number
from shardgraph.errors import CheckpointError, ShardGraphError, expect
from shardgraph.module.grad_scaler import GradScaler
from shardgraph.module.sharded import ShardedModule
from shardgraph.torch_api import local_tensor, pytree

_FACTOR = "gradient_scale"  # the buffer of a scaled module


class LayerwiseGradScaler(GradScaler):
    """A :class:`shardgraph.GradScaler` with a further factor for each of some modules::

        scaler = shardgraph.LayerwiseGradScaler(model, {"layers.*": 2.0**8, "head": 2.0**2})  # before compile
        sharded = shardgraph.compile(model, "fsdp", precision="fp16")
        ...
        scaler.scale(sharded(ids).loss).backward()
        scaler.step(optimizer)
        scaler.update()

    Within backward of such a module, and in the reduction of its gradients over ranks, gradients are the loss scale
    times its factor as large; between modules they are the loss scale as large. ``unscale_`` and ``step`` divide by
    both. A factor moves like the loss scale, by its own module's gradients: it is backed off where these overflow, and
    grows after ``growth_interval`` steps in which they did not. The step is skipped on all ranks if any gradient
    overflows; the loss scale backs off only if one of a parameter outside of these modules does.

    The factors are buffers of the modules (not in their state dict; :meth:`state_dict` of the scaler has them), which
    the compiled programs read, so that a factor that moves compiles nothing again.

    Args:
        model: what will be compiled; a plain model works likewise. Inputs and outputs of its modules are what
            hooks of torch see.
        factors: for names of modules, or patterns of them (``*``, ``?``), the factor to begin with, larger than 0. None
            of the modules may be in another, or share a parameter with a module outside of it.
        min_factor: a factor is backed off to this at the least.
        max_factor: a factor grows to this at the most.
        options: those of :class:`shardgraph.GradScaler`; ``growth_factor``, ``backoff_factor`` and ``growth_interval``
            are also those of the factors.

    Raises:
        ShardGraphError: a pattern matches no module, modules overlap, or the model is compiled already.
    """

    @checked(
        model=MODEL,
        factors=mapping_of("factors above 0 by pattern of modules: {'layers.*': 256.0}", number("", math.isfinite)),
        min_factor=POSITIVE,
        max_factor=POSITIVE,
    )
    def __init__(
        self,
        model: nn.Module,
        factors: Mapping[str, float],
        *,
        min_factor: float = 2.0**-24,
        max_factor: float = 2.0**24,
        **options: Any,
    ) -> None:
        super().__init__(**options)
        expect(0 < min_factor <= max_factor, "min_factor", min_factor, "larger than 0, and at most max_factor")
        self._least, self._most = min_factor, max_factor
        self._layers, self._outside = list(_layers(model, factors)) if self._enabled else [], False
        for layer in self._layers:
            _scale_backward(layer)

    @property
    def overflowed(self) -> bool:
        """Whether a gradient of any rank has overflowed since the last :meth:`update`."""
        return self._outside or any(layer.overflowed for layer in self._layers)

    def factors(self) -> dict[str, float]:
        """The present factor of each module, by its name."""
        return {layer.name: layer.factor for layer in self._layers}

    def _unscale_grads_(
        self, optimizer: torch.optim.Optimizer, inv_scale: torch.Tensor, found_inf: torch.Tensor, allow_fp16: bool
    ) -> dict[torch.device, torch.Tensor]:
        gradients = {id(p): p.grad for group in optimizer.param_groups for p in group["params"] if p.grad is not None}
        flags = torch.zeros(len(self._layers) + 1, device=found_inf.device)
        for flag, layer in zip(flags, self._layers, strict=False):
            for gradient in [gradients.pop(id(p)) for p in layer.module.parameters() if id(p) in gradients]:
                flag += _overflows(gradient)
                gradient.div_(layer.factor)
        for gradient in gradients.values():
            flags[-1] += _overflows(gradient)
        if dist.is_initialized():
            dist.all_reduce(flags, dist.ReduceOp.MAX, self._group)
        *of_layers, outside = flags.gt(0).tolist()
        for layer, overflows in zip(self._layers, of_layers, strict=True):
            layer.overflowed |= overflows
        # A factor that cannot be backed off any more leaves the loss scale.
        self._outside |= outside or any(each.overflowed and each.factor <= self._least for each in self._layers)
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, allow_fp16)

    def update(self, new_scale: float | torch.Tensor | None = None) -> None:
        """Move the loss scale and the factors; after the step of every optimizer."""
        if not self._enabled:
            return
        within = self.overflowed and not self._outside
        super().update(self.get_scale() if new_scale is None and within else new_scale)
        for layer in self._layers:
            if layer.overflowed:
                layer.move(max(self._least, layer.factor * self._backoff_factor))
            elif (layer.steps + 1) % self._growth_interval == 0:
                layer.move(min(self._most, layer.factor * self._growth_factor))
            else:
                layer.steps += 1
            layer.overflowed = False
        self._outside = False

    def state_dict(self) -> dict[str, Any]:
        """The loss scale, the factors, and the steps since they last moved."""
        factors = {layer.name: (layer.factor, layer.steps) for layer in self._layers}
        return {**super().state_dict(), "factors": factors} if self._enabled else {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from what :meth:`state_dict` gave.

        Raises:
            CheckpointError: it is of other modules.
        """
        super().load_state_dict(state_dict)
        factors, own = state_dict.get("factors", {}), [layer.name for layer in self._layers]
        if sorted(factors) != sorted(own):
            raise CheckpointError(f"the state is of factors of {sorted(factors)}, and this scaler has those of {own}")
        for layer in self._layers:
            factor, steps = factors[layer.name]
            layer.move(factor)
            layer.steps = steps


@dataclass
class _Layer:
    """A module with its factor, and the ``steps`` without an overflow since the factor moved."""

    name: str
    module: nn.Module
    factor: float
    steps: int = 0
    overflowed: bool = False

    def move(self, factor: float) -> None:
        self.factor, self.steps = factor, 0
        self.module.get_buffer(_FACTOR).fill_(factor)


class _Scale(torch.autograd.Function):
    """Its input; in backward the gradient is multiplied by a factor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, factor: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(factor)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (factor,) = ctx.saved_tensors
        return gradients[0] * factor, None


def _layers(model: nn.Module, factors: Mapping[str, float]) -> Iterator[_Layer]:
    """The modules that patterns name; a later pattern is for those that no earlier one names."""
    modules = dict(model.named_modules())
    if any(isinstance(module, ShardedModule) for module in modules.values()):
        raise ShardGraphError(
            "the model is compiled, and its programs have no factors in them: make the LayerwiseGradScaler first, of "
            "the model that is compiled then"
        )
    chosen: dict[str, float] = {}
    for pattern, factor in factors.items():
        names = [name for name in modules if fnmatchcase(name, pattern)]
        if not names:
            raise ShardGraphError(
                f"no module of the model matches {pattern!r}, for which a factor of {factor} is given"
            )
        expect(factor > 0, f"the factor of {pattern!r}", factor, "larger than 0")
        for name in names:
            chosen.setdefault(name, float(factor))
    users: dict[torch.Tensor, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        users.setdefault(parameter, []).append(name)
    for name, factor in chosen.items():
        within = [other for other in chosen if other != name and (not name or other.startswith(f"{name}."))]
        if within:
            raise ShardGraphError(f"the modules {name!r} and {within[0]!r} both have a factor, and one is in the other")
        for parameter in modules[name].parameters():
            if outside := [user for user in users[parameter] if name and not user.startswith(f"{name}.")]:
                raise ShardGraphError(
                    f"{name!r} has a factor and shares a parameter with {outside[0]!r} outside of it: gradients of two "
                    "sizes would be added up. Give the factor to a module that has both, or to neither"
                )
        yield _Layer(name, modules[name], factor)


def _scale_backward(layer: _Layer) -> None:
    """Have gradients in backward of a module be its factor as large, by a hook on its inputs and one on its outputs."""
    device = next((parameter.device for parameter in layer.module.parameters()), None)
    layer.module.register_buffer(_FACTOR, torch.tensor(layer.factor, device=device), persistent=False)

    def scaled(values: Any, factor: torch.Tensor) -> Any:
        floating = (torch.Tensor, lambda each: _Scale.apply(each, factor) if each.is_floating_point() else each)
        return pytree.tree_map_only(*floating, values)

    def before(module: nn.Module, args: Any, kwargs: Any) -> Any:
        return scaled((args, kwargs), 1 / module.get_buffer(_FACTOR))

    def after(module: nn.Module, args: Any, output: Any) -> Any:
        return scaled(output, module.get_buffer(_FACTOR))

    layer.module.register_forward_pre_hook(before, with_kwargs=True)
    layer.module.register_forward_hook(after)


def _overflows(gradient: torch.Tensor) -> torch.Tensor:
    """Whether an element is inf or NaN, on the gradient's device: the host waits once for all of them."""
    return ~local_tensor(gradient).isfinite().all()
