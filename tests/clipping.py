"""What runs on each rank of the tests of gradient norms; at module level, so that a new process finds it."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardgraph
from shardgraph import Pipeline, preset
from tests.pipelines import pipelined
from tests.ranks import part, prepared, whole
from tests.zoo import scalar

Case = tuple[str, str, dict[str, int]]
Found = tuple[float, float, float]
"""A norm, the unsharded model's, and the largest difference between any of their clipped gradients."""

ORDERS = (2.0, 1.0, 3.0, 0.5, math.inf, 0.0, -math.inf)
BY_TORCH = ORDERS[:5]
"""Those that torch has for DTensors too, of which every rank has rows."""
MAX_NORM = 0.01


def clipped(cases: list[Case], by_torch: tuple[str, ...]) -> dict[str, list[Found]]:
    """For each model under a plan what each order comes to: by our method, and by torch where it is said."""
    found: dict[str, list[Found]] = {}
    for name, plan, mesh in cases:
        sharded, original = with_gradients(name, plan, mesh)
        found[f"{name} {plan}"] = _of_each_order(sharded.clip_grad_norm_, sharded, original)
        if plan in by_torch:

            def torchs(*args: Any, model: nn.Module = sharded) -> torch.Tensor:
                norm = nn.utils.clip_grad_norm_(model.parameters(), *args)
                return norm.full_tensor() if isinstance(norm, DTensor) else norm

            found[f"{name} {plan} by torch"] = _of_each_order(torchs, sharded, original, BY_TORCH)
    return found


def with_gradients(name: str, plan: str, mesh: dict[str, int]) -> tuple[Any, nn.Module]:
    """A model under a plan and the unsharded one, after backward of the same batch; the first weight is frozen."""
    if plan.startswith("pp"):
        sharded, original, (args, kwargs, call) = pipelined(name, plan, mesh, Pipeline(4))
        sharded.train_step(*args, **kwargs)
    else:
        model, call = prepared(name, 2 * dist.get_world_size())
        next(model.parameters()).requires_grad_(False)
        original = copy.deepcopy(model)
        args, kwargs = part(call, preset(plan, mesh))
        sharded = shardgraph.compile(model, plan, mesh=mesh, example_inputs=args, example_kwargs=kwargs)
        scalar(sharded(*args, **kwargs)).backward()
    scalar(original(*call[0], **call[1])).backward()
    return sharded, original


def _of_each_order(
    clip: Callable[..., torch.Tensor], sharded: nn.Module, original: nn.Module, orders: tuple[float, ...] = ORDERS
) -> list[Found]:
    parameters = [p for model in (sharded, original) for p in model.parameters() if p.grad is not None]
    before = [p.grad.clone() for p in parameters]
    found = []
    for order in orders:
        for parameter, gradient in zip(parameters, before, strict=True):
            parameter.grad = gradient.clone()
        norm = clip(MAX_NORM, order)
        expected = nn.utils.clip_grad_norm_(original.parameters(), MAX_NORM, order)
        theirs = {fqn: p.grad for fqn, p in original.named_parameters()}
        pairs = [(whole(p.grad), theirs[fqn]) for fqn, p in sharded.named_parameters() if p.grad is not None]
        worst = max((float((ours - other).abs().max()) for ours, other in pairs if ours.numel()), default=0.0)
        found.append((norm.item(), expected.item(), worst))
    for parameter, gradient in zip(parameters, before, strict=True):
        parameter.grad = gradient
    return found


def clipped_together(cases: list[Case]) -> list[Found]:
    """What clipping the parameters of several models, each on a mesh of its own, comes to in one call."""
    pairs = [with_gradients(*case) for case in cases]
    sharded, original = (nn.ModuleList(models) for models in zip(*pairs, strict=True))
    return _of_each_order(lambda *args: shardgraph.clip_grad_norm_(sharded.parameters(), *args), sharded, original)


def not_finite(plan: str, mesh: dict[str, int], values: list[float]) -> list[tuple[float, float, bool]]:
    """For each value in one element of one rank's gradient its norms of orders 2 and infinity, and whether the
    error that is asked for came, with gradients left as they were."""
    sharded, _ = with_gradients("odd-mlp", plan, mesh)
    parameters = [p for p in sharded.parameters() if p.grad is not None]
    before = [p.grad.clone() for p in parameters]
    found = []
    for value in values:
        norms = []
        for order in (2.0, math.inf):
            for parameter, gradient in zip(parameters, before, strict=True):
                parameter.grad = gradient.clone()
            if dist.get_rank() == 1:
                sharded.up.weight.grad.to_local()[0, 0] = value
            try:
                sharded.clip_grad_norm_(MAX_NORM, order, error_if_nonfinite=True)
                raised = False
            except RuntimeError as error:
                raised = str(value) in str(error) and torch.equal(whole(parameters[-1].grad), whole(before[-1]))
            norms.append(sharded.clip_grad_norm_(MAX_NORM, order).item())
        found.append((*norms, raised))
    return found
