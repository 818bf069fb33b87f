"""A whole training step: forward, the loss, backward, clipping, the optimizer's update, and no gradients afterwards.

Without a pipeline, and with an optimizer that computes element by element, no operation of it is recorded
by autograd and none is Python for each parameter: the two graphs run one after the other, and the optimizer steps on
buckets (:mod:`shardgraph.module.flat_update`). Everything else is the same step, taken apart.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from itertools import chain
from operator import attrgetter

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from shardgraph import torch_api
from shardgraph.module.accumulated import clear_of
from shardgraph.module.flat_update import FlatUpdate, Run, as_they_lie
from shardgraph.module.grad_scaler import GradScaler
from shardgraph.module.gradient_norm import clip_by
from shardgraph.module.local_step import is_elementwise
from shardgraph.plans.plan import Plan
from shardgraph.runtime.executor import State
from shardgraph.torch_api import local_tensor


def is_flat(optimizer: torch.optim.Optimizer, scaler: torch.amp.GradScaler | None, plan: Plan, state: State) -> bool:
    """Whether an optimizer can step on gradients that parameters do not have, on many at a time."""
    if not is_elementwise(optimizer) or torch_api.has_step_hooks(optimizer):
        return False
    if (watched := FlatUpdate.of(optimizer, state).watched) is not None and watched.reason:
        return False
    if state.hook is not None:
        return False  # it sets gradients
    if plan.ignores_any:
        return False  # what is each rank's own is not clipped
    if scaler is not None and state.mesh is not None and not isinstance(scaler, GradScaler):
        return False  # it would find an overflow on one rank alone
    if state.unreduced or state.unsynced or state.layout.on_host or plan.offload.optimizer_state:
        return False
    parameters = state.layout.parameters
    if any(chain.from_iterable(map(_hooks, parameters))):
        return False
    if any(local_tensor(parameter).device != state.device for parameter in parameters):
        return False  # in host memory
    trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    return {*map(id, trained)} <= {*map(id, parameters)} and all(grad is None for grad in map(_gradient, trained))


_hooks, _gradient = attrgetter("_backward_hooks", "_post_accumulate_grad_hooks"), attrgetter("grad")


def update(
    flat: FlatUpdate,
    gradients: dict[str, torch.Tensor],
    state: State,
    max_norm: float | None,
    scaler: torch.amp.GradScaler | None,
) -> torch.Tensor | None:
    """Clip the ``gradients``, which are consumed, and step the optimizer; returns the norm before clipping, if it was
    asked for. Those of parameters that another optimizer trains are added to their ``grad``.

    Raises:
        NotFlatError: it cannot be done on many parameters at a time; nothing has happened.
    """
    flat.prepare(gradients, state, places=partial(as_they_lie, gradients))
    norm, changed = None, max_norm is not None or scaler is not None
    with flat.applied(gradients, changed) as runs:
        if scaler is not None:
            scaler.unscale_(flat.optimizer)
        if max_norm is not None:
            norm = norm_of(runs, state.mesh, state.device)
            clip_by((run.twin.grad for run in runs if run.twin.grad is not None), norm, max_norm, False)
        if scaler is None:
            flat.optimizer.step()
        else:
            scaler.step(flat.optimizer)
    state.steps += 1
    clear_of(flat.optimizer)
    state.add_gradients(gradients)
    return norm


def norm_of(runs: Iterable[Run], mesh: DeviceMesh | None, device: torch.device) -> torch.Tensor:
    """The norm of all gradients; a scalar, the same on every rank, all of which must call it.

    Ranks need not have the same runs: what they exchange is one number for each kind of placement.
    """
    squares: dict[tuple[int, ...], torch.Tensor] = {}
    dtype = torch.float32
    for run in runs:
        first, gradient = run.parameters[0], run.twin.grad
        assert gradient is not None
        placements = first.placements if isinstance(first, DTensor) else ()
        over = tuple(dim for dim, placement in enumerate(placements) if not placement.is_replicate())
        dtype = torch.promote_types(dtype, gradient.dtype)
        square = torch.linalg.vector_norm(gradient, dtype=torch.promote_types(torch.float32, gradient.dtype)).double()
        squares[over] = squares.get(over, 0) + square.square()
    for dim in range(mesh.ndim) if mesh is not None else ():
        kinds = sorted(over for over in squares if dim in over)
        if kinds:
            assert mesh is not None
            together = torch.stack([squares[over] for over in kinds])
            dist.all_reduce(together, group=mesh.get_group(dim))
            squares |= dict(zip(kinds, together.unbind(), strict=True))
    total = sum(squares.values(), torch.zeros((), dtype=torch.float64, device=device))
    return total.sqrt().to(dtype)


def apart(
    optimizer: torch.optim.Optimizer,
    max_norm: float | None,
    scaler: torch.amp.GradScaler | None,
    clip: Callable[[float], torch.Tensor],
) -> torch.Tensor | None:
    """Clip the gradients that parameters have, and step the optimizer, however it does that."""
    norm = None
    if scaler is not None and max_norm is not None:
        scaler.unscale_(optimizer)
    if max_norm is not None:
        norm = clip(max_norm)
    if scaler is None:
        optimizer.step()
    else:
        scaler.step(optimizer)
    return norm
