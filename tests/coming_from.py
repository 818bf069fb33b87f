"""What runs on the ranks for :mod:`tests.test_coming_from`: what users of DDP and FSDP2 call, beside theirs."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.nn.functional as F
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.nn.parallel import DistributedDataParallel as DDP

import shardgraph
from shardgraph.errors import ShardGraphError
from tests.ranks import whole


def model(seed: int = 0, width: int = 16) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, width), nn.GELU(), nn.LayerNorm(width), nn.Linear(width, 3)).double()


def made(kind: str, seed: int = 0, width: int = 16) -> tuple[Any, torch.optim.Optimizer]:
    """A model under a plan, or under FSDP2 or DDP, and its optimizer."""
    plain = model(seed, width)
    if kind == "FSDP2":
        for layer in (plain[0], plain[3]):
            fully_shard(layer)
    wrapped = {"FSDP2": fully_shard, "DDP": DDP}.get(kind, lambda m: shardgraph.compile(m, kind))(plain)
    return wrapped, torch.optim.AdamW(wrapped.parameters(), lr=1e-2)


def train(wrapped: nn.Module, optimizer: torch.optim.Optimizer, steps: int) -> list[torch.Tensor]:
    """The whole weights after some steps, with the same batch on all ranks."""
    for step in range(steps):
        x = torch.randn(4, 6, generator=torch.Generator().manual_seed(step), dtype=torch.float64)
        wrapped(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [whole(parameter.detach()) for parameter in wrapped.parameters()]


def apart(one: list[torch.Tensor], other: list[torch.Tensor]) -> float:
    return max((a - b).abs().max().item() for a, b in zip(one, other, strict=True))


# -- states ----------------------------------------------------------------------------------------------------


def saved(kind: str, folder: str) -> list[torch.Tensor]:
    """Train, save model and optimizer, and return the weights after one more step."""
    wrapped, optimizer = made(kind)
    train(wrapped, optimizer, 2)
    weights, states = get_state_dict(wrapped, optimizer)
    dcp.save({"model": weights, "optimizer": states}, checkpoint_id=folder)
    return train(wrapped, optimizer, 1)


def loaded(kind: str, folder: str, expected: list[torch.Tensor]) -> float:
    """How far the weights are from those after one more step, where another model goes on from what was saved."""
    wrapped, optimizer = made(kind, seed=1)
    weights, states = get_state_dict(wrapped, optimizer)
    state = {"model": weights, "optimizer": states}
    dcp.load(state, checkpoint_id=folder)
    set_state_dict(wrapped, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
    return apart(train(wrapped, optimizer, 1), expected)


def whole_states(kind: str) -> float:
    """The same for whole states, handed over in memory."""
    options = StateDictOptions(full_state_dict=True)
    (one, first), (other, second) = made(kind), made(kind, seed=1)
    train(one, first, 2)
    weights = {name: value.clone() for name, value in get_model_state_dict(one, options=options).items()}
    states = copy.deepcopy(get_optimizer_state_dict(one, first, options=options))  # counts of steps are not copied
    assert not any(isinstance(value, DTensor) for value in weights.values())
    set_model_state_dict(other, weights, options=options)
    set_optimizer_state_dict(other, second, states, options=options)
    return apart(train(one, first, 1), train(other, second, 1))


# -- gradients -------------------------------------------------------------------------------------------------


def gradients_synchronised_now_and_then(plan: str) -> tuple[bool, float]:
    """Whether gradients are kept back while they are not to be synchronised, and how far those are from FSDP2's that
    are reduced at last."""
    found = {}
    for kind in (plan, "FSDP2"):
        wrapped, _ = made(kind)
        for synchronised in (False, True):
            wrapped.set_requires_gradient_sync(synchronised)
            x = torch.full((2, 6), 1.0 + dist.get_rank() + synchronised, dtype=torch.float64)
            wrapped(x).square().mean().backward()
            if kind == plan and not synchronised:
                kept = all(parameter.grad is None for parameter in wrapped.parameters())
        found[kind] = [whole(parameter.grad) for parameter in wrapped.parameters()]
    return kept, apart(found[plan], found["FSDP2"])


def hooked() -> dict[str, float]:
    """How far gradients under communication hooks are from those of DDP under the same; over gloo it has none in
    bfloat16."""
    found, x = {}, torch.randn(4, 6, generator=torch.Generator().manual_seed(dist.get_rank()), dtype=torch.float64)
    for name in ("allreduce_hook", "bf16_compress_hook", "fp16_compress_hook"):
        gradients = []
        for kind in ("DDP", "ddp"):
            wrapped, _ = made(kind)
            if (kind, name) != ("DDP", "bf16_compress_hook"):
                wrapped.register_comm_hook(None, getattr(default_hooks, name))
            F.mse_loss(wrapped(x), torch.ones(4, 3).double()).backward()
            gradients.append([parameter.grad for parameter in wrapped.parameters()])
        found[name] = apart(*([whole(each) for each in kind] for kind in gradients))
    return found


def powers(accumulate: bool) -> tuple[float, float]:
    """How far weights trained with PowerSGD are from those of DDP with it, and from those without it."""
    found = {}
    for kind in ("DDP", "ddp", "without"):
        wrapped, optimizer = made("ddp" if kind == "without" else kind)
        if kind != "without":
            state = powerSGD_hook.PowerSGDState(
                None, matrix_approximation_rank=1, start_powerSGD_iter=2, min_compression_rate=1
            )
            wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
        numbers = torch.Generator().manual_seed(dist.get_rank())
        for _ in range(6):
            batches = [torch.randn(4, 6, generator=numbers, dtype=torch.float64) for _ in range(1 + accumulate)]
            with wrapped.no_sync():
                for x in batches[1:]:
                    F.mse_loss(wrapped(x), torch.ones(4, 3).double()).backward()
            F.mse_loss(wrapped(batches[0]), torch.ones(4, 3).double()).backward()
            optimizer.step()
            optimizer.zero_grad()
        found[kind] = [whole(parameter).detach() for parameter in wrapped.parameters()]
    return apart(found["ddp"], found["DDP"]), apart(found["ddp"], found["without"])


def own_hook() -> tuple[list[Any], float]:
    """What a hook of the user sees of a bucket, and how far gradients that it leaves alone are from the rank's own."""
    sharded, _ = made("ddp")
    seen: list[Any] = []

    def alone(state: list[Any], bucket: Any) -> torch.futures.Future[torch.Tensor]:
        shapes = [[tuple(each.shape) for each in of] for of in (bucket.gradients(), bucket.parameters())]
        state.append((bucket.index(), bucket.is_last(), *shapes))
        future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
        future.set_result(bucket.buffer())
        return future

    sharded.register_comm_hook(seen, alone)
    plain = model()
    x = torch.full((4, 6), 1.0 + dist.get_rank(), dtype=torch.float64)
    for module in (sharded, plain):
        F.mse_loss(module(x), torch.ones(4, 3).double()).backward()
    own = [parameter.grad.to_local() for parameter in sharded.parameters()]
    return seen, apart(own, [parameter.grad for parameter in plain.parameters()])


def buckets() -> list[Any]:
    """What a hook of DDP, and of a compiled module, sees of two buckets at the last of three steps."""
    found = []
    for kind in ("DDP", "ddp"):
        wrapped, _ = made(kind, width=30_000)
        seen: list[Any] = []

        def noted(state, bucket):  # DDP reads annotations
            shapes = sorted(tuple(each.shape) for each in bucket.gradients())
            state.append((bucket.index(), bucket.is_last(), shapes, bucket.buffer().shape))
            return default_hooks.allreduce_hook(None, bucket)

        wrapped.register_comm_hook(seen, noted)
        for _ in range(3):
            wrapped(torch.ones(4, 6).double()).square().mean().backward()
        found.append(seen[-2:])
    return found


class Mean(nn.Module):
    """The mean of all elements, as a loss."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.mean()


def stepped_with_a_hook() -> float:
    """How far weights are from those of plain steps after whole steps with a hook that averages."""
    found = []
    for hooked_ in (True, False):
        scalar = nn.Sequential(*model(), Mean())
        sharded = shardgraph.compile(scalar, "ddp")
        optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
        if hooked_:
            sharded.register_comm_hook(None, lambda state, bucket: default_hooks.allreduce_hook(state, bucket))
        x = torch.full((4, 6), 1.0 + dist.get_rank(), dtype=torch.float64)
        for _ in range(2):
            if hooked_:
                sharded.step(x, optimizer=optimizer)
            else:
                sharded(x).backward()
                optimizer.step()
                optimizer.zero_grad()
        found.append([whole(parameter).detach() for parameter in sharded.parameters()])
    return apart(*found)


def joined_with_a_hook() -> str:
    sharded, _ = made("ddp")
    sharded.register_comm_hook(None, lambda state, bucket: default_hooks.allreduce_hook(state, bucket))
    try:
        sharded.join().__enter__()
    except ShardGraphError as error:
        return str(error)
    return ""


def refused_hook() -> str:
    sharded, _ = made("fsdp")
    try:
        sharded.register_comm_hook(powerSGD_hook.PowerSGDState(None), powerSGD_hook.powerSGD_hook)
    except ShardGraphError as error:
        return str(error)
    return ""


# -- parameters ------------------------------------------------------------------------------------------------


class OwnTensor(nn.Module):
    """A layer whose weight somebody has distributed already."""

    def __init__(self, mesh: Any) -> None:
        super().__init__()
        self.weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate()]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weight


def tensors_of_the_user() -> list[str]:
    """What a rank is told of a parameter, of an input and of a buffer that are DTensors already."""
    mesh, told = dist.init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",)), []
    buffered = nn.Linear(4, 4)
    buffered.register_buffer("mask", distribute_tensor(torch.ones(4), mesh, [Replicate()]))
    plain = nn.Linear(4, 4)
    given = distribute_tensor(torch.ones(2, 4), mesh, [Shard(0)])
    for layer, x in ((OwnTensor(mesh), torch.ones(2, 4)), (plain, given), (buffered, torch.ones(2, 4))):
        try:
            shardgraph.compile(layer, "fsdp")(x)
            told.append("")
        except ShardGraphError as error:
            told.append(str(error))
    return told


def left_alone(plan: str) -> dict[str, Any]:
    """Training with an ignored layer, of which each rank has its own values, beside FSDP2 that ignores it too."""
    found: dict[str, Any] = {}
    weights = {}
    for kind in (plan, "FSDP2"):
        plain = model()
        with torch.no_grad():
            plain[0].weight.add_(dist.get_rank())
        if kind == "FSDP2":
            wrapped = fully_shard(plain, ignored_params={*plain[0].parameters()})
        else:
            shardgraph.annotate(plain, {"0.*": shardgraph.ignored()})
            wrapped = shardgraph.compile(plain, kind)
        optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
        for step in range(3):
            x = torch.full((2, 6), 1.0 + dist.get_rank() + step, dtype=torch.float64)
            wrapped(x).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        weights[kind] = [whole(parameter.detach()) for parameter in wrapped.parameters()]
        found[kind] = [type(parameter.data).__name__ for parameter in (wrapped[0].weight, wrapped[3].weight)]
    found["apart"] = apart(weights[plan], weights["FSDP2"])
    sharded = shardgraph.compile(plain_with_ignored(), plan, loss_fn=F.mse_loss)
    x, y = torch.full((2, 6), 1.0 + dist.get_rank()).double(), torch.ones(2, 3).double()
    sharded.train_step(x, target=y)
    before = sharded[0].weight.grad.clone()
    norm = sharded.clip_grad_norm_(1e-3)
    found["norm"], found["clipped"] = norm.item(), not torch.equal(before, sharded[0].weight.grad)
    return found


def plain_with_ignored() -> nn.Module:
    plain = model()
    shardgraph.annotate(plain, {"0.*": shardgraph.ignored()})
    return plain


# -- profiles --------------------------------------------------------------------------------------------------


def profiled() -> tuple[list[str], bool]:
    """The ranges in a profile of a step, and whether gradients are those of a step without one."""
    sharded, _ = made("fsdp")
    x = torch.ones(2, 6, dtype=torch.float64)
    sharded(x).square().mean().backward()
    expected = [whole(parameter.grad) for parameter in sharded.parameters()]
    sharded.zero_grad()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        sharded(x).square().mean().backward()
    same = apart([whole(parameter.grad) for parameter in sharded.parameters()], expected) == 0.0
    return [event.name for event in profile.events()], same
