"""What runs on each rank of the multi-process tests; at module level, so that a new process finds it."""

from __future__ import annotations

import copy
import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Replicate
from torch.utils._pytree import tree_leaves, tree_map_only

import shardgraph
from shardgraph import Pipeline, Plan, preset
from shardgraph.passes.lowering import build_program
from shardgraph.report.step import program_memory
from shardgraph.runtime.host import is_on_host
from shardgraph.runtime.measure import PeakMemory
from tests.two_heads import KeepsState, TwoHeads
from tests.zoo import Deep, make, scalar, shorter


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """The unsharded value of a parameter or gradient."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def part(call: Any, plan: Plan | None = None) -> Any:
    """This rank's part of a batch; under a plan that divides operators, several ranks have the same."""
    rank, count = dist.get_rank(), dist.get_world_size()
    if plan is not None:
        rank, count = plan.data_rank(rank), plan.data_size
    return tree_map_only(torch.Tensor, lambda tensor: tensor.chunk(count)[rank], call)


def deterministic(model: nn.Module) -> nn.Module:
    """``model`` in double precision without dropout and with frozen batch statistics: exact to compare."""
    for module in model.double().modules():
        if isinstance(module, nn.Dropout):
            module.p = 0.0
        if isinstance(getattr(module, "dropout", None), float):
            module.dropout = 0.0
        if isinstance(module, nn.modules.batchnorm._BatchNorm):
            module.eval()
    return model


def prepared(name: str, batch: int) -> tuple[nn.Module, Any]:
    model, call = make(name, batch)
    return deterministic(model), tree_map_only(torch.Tensor, lambda t: t.double() if t.is_floating_point() else t, call)


def train(sharded: nn.Module, original: nn.Module, call: Any, steps: int = 5, clip: float | None = None) -> float:
    """Train both for some steps of AdamW; returns the largest difference of any loss, gradient or weight."""
    args, kwargs = part(call, sharded.plan)
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (sharded, original)]
    worst = 0.0
    for _ in range(steps):
        loss = scalar(sharded(*args, **kwargs))
        loss.backward()
        reference = scalar(original(*call[0], **call[1]))
        reference.backward()
        mean = loss.detach().clone()
        dist.all_reduce(mean)
        worst = max(worst, abs(mean.item() / dist.get_world_size() - reference.item()))
        worst = max(worst, difference(sharded, original, gradients=True))
        if clip is not None:
            norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), clip) for m in (sharded, original)]
            worst = max(worst, abs(whole(norms[0]).item() - norms[1].item()))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return max(worst, difference(sharded, original, gradients=False))


def difference(sharded: nn.Module, original: nn.Module, *, gradients: bool) -> float:
    worst = 0.0
    for (name, mine), (other_name, theirs) in zip(sharded.named_parameters(), original.named_parameters(), strict=True):
        assert name == other_name
        a, b = (mine.grad, theirs.grad) if gradients else (mine.detach(), theirs.detach())
        assert (a is None) == (b is None), f"{name}: one has a gradient and the other has none"
        if a is not None and b is not None and b.numel():
            worst = max(worst, (whole(a) - b).abs().max().item())
    return worst


def parity(
    name: str, plan: str, mesh: dict[str, int] | None, clip: float | None = None, length: int | None = None
) -> float:
    model, call = prepared(name, 2 * dist.get_world_size())
    call = shorter(call, length) if length else call
    original = copy.deepcopy(model)
    example: dict[str, Any] = {}
    if "tp" in plan or "ep" in plan:  # where parameters lie follows from what is computed with them
        args, kwargs = part(call, preset(plan, mesh or {"tp": dist.get_world_size()}))
        example = {"example_inputs": args, "example_kwargs": kwargs}
    return train(shardgraph.compile(model, plan, mesh=mesh, **example), original, call, clip=clip)


def on_another_default_device(name: str, plan: str, mesh: dict[str, int], length: int | None = None) -> float:
    """The largest difference of any weight, after steps in which tensors that are given no device are on ``meta``."""
    model, call = prepared(name, 2 * dist.get_world_size())
    call = shorter(call, length) if length else call
    original = copy.deepcopy(model)
    args, kwargs = part(call, preset(plan, mesh))
    with torch.device("meta"):
        sharded = shardgraph.compile(model, plan, mesh=mesh, example_inputs=args, example_kwargs=kwargs)
        _descend(sharded, args, kwargs)
    _descend(original, *call)
    weights = sharded.full_state_dict()  # by torch's own DTensor
    assert bool(weights) == (dist.get_rank() == 0)
    expected = original.state_dict()
    return max(((value - expected[key]).abs().max().item() for key, value in weights.items()), default=0.0)


def _descend(model: nn.Module, args: Any, kwargs: Any) -> None:
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for _ in range(3):
        scalar(model(*args, **kwargs)).backward()
        optimizer.step()
        optimizer.zero_grad()


def microbatches_of_the_same() -> list[str]:
    """Which way a pipeline's forward goes, of one that asks whether its inputs are one tensor."""
    torch.manual_seed(0)
    model, x, y = AsksOfStages(), torch.randn(4, 4), torch.randn(4, 4)
    original = copy.deepcopy(model)
    options: Any = {"pipeline": Pipeline(2), "loss_fn": nn.functional.mse_loss, "example_inputs": (x, x)}
    sharded = shardgraph.compile(model, "pp", mesh={"pp": 2}, **options)
    took = []
    for inputs in [(x, x), (x, y), (x, x)]:
        loss = sharded.train_step(*inputs, target=y)
        ways = {way: nn.functional.mse_loss(original.went(way, *inputs), y) for way in ("alone", "both")}
        took += [way for way, expected in ways.items() if torch.allclose(loss, expected)]
        sharded.zero_grad()
    return took


class AsksOfStages(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.alone, self.both = nn.Linear(4, 4), nn.Linear(4, 4)
        self.layers = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 4))

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.went("alone" if y is x else "both", x, y)

    def went(self, way: str, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        return self.layers(self.alone(x) if way == "alone" else self.both(x * y))


def gradient_norms(name: str, plan: str, mesh: dict[str, int], norms: tuple[float, ...]) -> list[tuple[float, float]]:
    """The gradient's total norm of each order and the unsharded model's."""
    model, call = prepared(name, 2 * dist.get_world_size())
    original = copy.deepcopy(model)
    args, kwargs = part(call, preset(plan, mesh))
    sharded = shardgraph.compile(model, plan, mesh=mesh, example_inputs=args, example_kwargs=kwargs)
    scalar(sharded(*args, **kwargs)).backward()
    scalar(original(*call[0], **call[1])).backward()

    def norm(module: nn.Module, order: float) -> float:
        found = nn.utils.get_total_norm([p.grad for p in module.parameters() if p.grad is not None], order)
        return (found.full_tensor() if isinstance(found, DTensor) else found).item()

    return [(norm(sharded, order), norm(original, order)) for order in norms]


def annotated_parity() -> float:
    """Parity of a model that is annotated otherwise than ``"tp"`` would place it, with recomputed layers."""
    original, (args, kwargs) = prepared("tied-transformer", 4)
    model = copy.deepcopy(original)
    shardgraph.annotate(
        model,
        {
            "blocks.layers.0": shardgraph.output(shardgraph.shard(1, "tp")),
            "blocks.layers.0.linear1.weight": shardgraph.shard(1, "tp"),
            "blocks.layers.*": shardgraph.recompute(),
        },
    )
    mesh = {"tp": dist.get_world_size()}
    sharded = shardgraph.compile(model, "tp", mesh=mesh, example_inputs=args, example_kwargs=kwargs)
    assert sharded.program.parameters["blocks.layers.0.linear1.weight"].placements == ("split(1)",)
    return train(sharded, original, (args, kwargs))


def accumulated_norm(name: str, plan: str, mesh: dict[str, int]) -> tuple[float, float]:
    """How far gradients added up over two microbatches, and their norm, are from those of the whole batch at once."""
    model, call = prepared(name, 4 * dist.get_world_size())
    original = copy.deepcopy(model)
    args, kwargs = part(call, preset(plan, mesh))
    halves = [tree_map_only(torch.Tensor, lambda t, i=i: t.chunk(2)[i], (args, kwargs)) for i in (0, 1)]
    sharded = shardgraph.compile(model, plan, mesh=mesh, example_inputs=halves[0][0], example_kwargs=halves[0][1])
    with sharded.no_sync():
        (scalar(sharded(*halves[0][0], **halves[0][1])) / 2).backward()
    (scalar(sharded(*halves[1][0], **halves[1][1])) / 2).backward()
    scalar(original(*call[0], **call[1])).backward()
    worst = difference(sharded, original, gradients=True)
    norms = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1) for m in (sharded, original)]
    return worst, abs(whole(norms[0]).item() - norms[1].item())


def offloaded_activations() -> tuple[float, float]:
    """How far a model with offloaded activations is from the unsharded one in training, and under ``no_sync``."""
    worst = []
    for accumulates in (False, True):
        original, call = prepared("tied-transformer", 8)
        sharded = shardgraph.compile(copy.deepcopy(original), "fsdp", offload="activations", recompute="selective")
        if not accumulates:
            worst.append(train(sharded, original, call, clip=0.1))
            continue
        args, _ = part(call)
        halves = args[0].chunk(2)
        with sharded.no_sync():
            (scalar(sharded(halves[0])) / 2).backward()
        (scalar(sharded(halves[1])) / 2).backward()
        scalar(original(*call[0])).backward()
        worst.append(difference(sharded, original, gradients=True))
    return worst[0], worst[1]


def parity_of_several(names: list[str], plan: str, mesh: dict[str, int] | None = None) -> dict[str, float]:
    return {name: parity(name, plan, mesh) for name in names}


def against_torch() -> dict[str, float]:
    """The largest difference of a loss to FSDP2's and to DDP's over five steps of the same training."""

    def losses(wrap: Any) -> list[float]:
        model, call = prepared("llama", 4)
        module = wrap(model)
        optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
        args, kwargs = part(call)
        seen = []
        for _ in range(5):
            loss = module(*args, **kwargs).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    def fsdp2(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh)
        return fully_shard(model, mesh=mesh)

    mine = losses(lambda model: shardgraph.compile(model, "fsdp"))
    return {
        name: max(abs(a - b) for a, b in zip(mine, losses(wrap), strict=True))
        for name, wrap in (("FSDP2", fsdp2), ("DDP", nn.parallel.DistributedDataParallel))
    }


def features() -> dict[str, Any]:
    """Many small facts about one sharded module, gathered in one launch."""
    facts: dict[str, Any] = {}
    model, call = prepared("odd-mlp", 4)
    original = copy.deepcopy(model)
    sharded = shardgraph.compile(model, "fsdp")
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)  # before the first call, and so before compiling
    args, kwargs = part(call)
    facts["names"] = [n for n, _ in sharded.named_parameters()] == [n for n, _ in original.named_parameters()]
    facts["dtensors"] = all(isinstance(p, DTensor) for p in sharded.parameters())

    output = sharded(*args, **kwargs)
    reference = original(*args, **kwargs)
    facts["structure"] = output["hidden"][1] == 3 and list(output) == list(reference)
    facts["output"] = max((output[k] - reference[k]).abs().max().item() for k in ("out", "flat"))
    output["out"].sum().backward()
    reference["out"].sum().backward()

    # Accumulation: two halves, the first without communication, equal the whole.
    sharded.zero_grad()
    original.zero_grad()
    halves = [tree_map_only(torch.Tensor, lambda t, i=i: t.chunk(2)[i], (args, kwargs)) for i in (0, 1)]
    with sharded.no_sync():
        (scalar(sharded(*halves[0][0], **halves[0][1])) / 2).backward()
    facts["no_sync leaves no gradient"] = all(p.grad is None for p in sharded.parameters())
    (scalar(sharded(*halves[1][0], **halves[1][1])) / 2).backward()
    for a, k in (tree_map_only(torch.Tensor, lambda t, i=i: t.chunk(4)[i], call) for i in range(4)):
        (scalar(original(*a, **k)) / 4).backward()
    facts["accumulated"] = difference(sharded, original, gradients=True)
    optimizer.step()
    for kind in ({"fused": True}, {"foreach": True}):
        torch.optim.AdamW(sharded.parameters(), **kind).step()

    with torch.no_grad():
        facts["inference"] = (sharded(*args, **kwargs)["out"].requires_grad, sharded.backward_graph)
    sharded.eval()
    facts["eval"] = not any(module.training for module in (*sharded.modules(), *model.modules()))
    sharded.train()
    facts["train"] = all(module.training for module in (*sharded.modules(), *model.modules()))
    programs = len(sharded._programs.kept)
    sharded(*args, **kwargs)
    facts["cached"] = len(sharded._programs.kept) == programs

    sharded(*args, **kwargs)
    facts["graphs print"] = "all_gather_into_tensor" in sharded.forward_graph.code and isinstance(
        sharded.backward_graph, torch.fx.GraphModule
    )
    full = sharded.full_state_dict()
    facts["full state"] = sorted(full) == (sorted(original.state_dict()) if dist.get_rank() == 0 else [])
    return facts


def program_text(name: str, plan: str, mesh: dict[str, int]) -> tuple[int, str]:
    """This rank, and the text of the program that it builds from its own batch."""
    model, call = prepared(name, 2 * dist.get_world_size())
    chosen = preset(plan, mesh)
    program = build_program(model, chosen, *part(call, chosen))
    return dist.get_rank(), program.text


def numbers_that_change() -> int:
    """How many programs a number that changes at every call needs."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor, scale: float) -> torch.Tensor:
            return self.linear(x) * scale

    torch.manual_seed(0)
    model = Scaled()
    original = copy.deepcopy(model)
    sharded = shardgraph.compile(model, "fsdp")
    x = torch.randn(2, 4)
    for step in range(20):
        torch.testing.assert_close(sharded(x, 0.1 * step), original(x, 0.1 * step))
    return len(sharded._programs.kept)


def save(folder: str, plan: str) -> dict[str, torch.Tensor]:
    model, _ = prepared("odd-mlp", 4)
    sharded = shardgraph.compile(model, plan)
    dcp.save({"model": sharded.state_dict()}, checkpoint_id=f"{folder}/dcp")
    sharded.save_safetensors(f"{folder}/model.safetensors")
    return sharded.full_state_dict()


def load(folder: str, plan: str, mesh: dict[str, int] | None = None) -> dict[str, torch.Tensor]:
    model, _ = prepared("odd-mlp", 4)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(7.0)
    sharded = shardgraph.compile(model, plan, mesh=mesh)
    state = {"model": sharded.state_dict()}
    dcp.load(state, checkpoint_id=f"{folder}/dcp")
    return sharded.full_state_dict()


def ranks_use_other_heads(plan: str) -> dict[str, Any]:
    """Which layers have gradients if no rank's loss uses the heads, and if each rank's uses another."""
    torch.manual_seed(0)
    original = TwoHeads()
    sharded = shardgraph.compile(copy.deepcopy(original), plan=plan, progress=False)
    inputs = [torch.randn(2, 4, generator=torch.Generator().manual_seed(rank)) for rank in range(2)]
    layers: dict[str, Any] = {}

    def with_gradient() -> set[str]:
        return {name.partition(".")[0] for name, p in sharded.named_parameters() if p.grad is not None}

    hidden = sharded(inputs[dist.get_rank()])["hidden"]
    hidden.sum().backward()
    layers["neither"] = with_gradient()
    sharded.zero_grad()
    heads = ["first", "second"]
    sharded(inputs[dist.get_rank()])[heads[dist.get_rank()]].square().sum().backward()
    layers["each its own"] = with_gradient()
    for rank, head in enumerate(heads):
        (original(inputs[rank])[head].square().sum() / 2).backward()
    pairs = zip(sharded.parameters(), original.parameters(), strict=True)
    layers["worst"] = max((whole(p.grad) - q.grad).abs().max().item() for p, q in pairs)
    return layers


def dropout_per_rank() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The same input through dropout twice under one seed and once under another."""
    sharded = shardgraph.compile(nn.Sequential(nn.Dropout(0.5), nn.Identity()).train(), "fsdp")
    results = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        results.append(sharded(torch.ones(4, 8)))
    return tuple(results)


def meta_initialisation() -> float:
    """The largest difference between a model initialised shard by shard and one initialised whole."""
    from tests.zoo import OddMLP  # has parameters of its own that nothing initialises; see below

    class Initialised(OddMLP):
        def reset_parameters(self) -> None:
            with torch.no_grad():
                for parameter in (self.scale, self.unused, self.frozen, self.transposed, self.empty):
                    nn.init.normal_(parameter)

    with torch.device("meta"):
        model = Initialised()
    torch.manual_seed(3)
    sharded = shardgraph.compile(model, "fsdp")
    original = Initialised()
    torch.manual_seed(3)
    for module in original.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    return difference(sharded, original, gradients=False)


def different_models() -> None:
    torch.manual_seed(dist.get_rank())
    shardgraph.compile(nn.Linear(4, 4), "fsdp", timeout=20)


def different_plans() -> None:
    torch.manual_seed(0)
    shardgraph.compile(nn.Linear(4, 4), ["fsdp", "zero2"][dist.get_rank()], timeout=20)


def different_batches(first_alike: bool) -> None:
    torch.manual_seed(0)
    sharded = shardgraph.compile(nn.Linear(4, 4), "tp", example_inputs=(torch.ones(2, 4),), timeout=5)
    if first_alike:
        sharded(torch.ones(2, 4))
        if dist.get_rank() == 0:
            sharded(torch.ones(2, 4))
    sharded(torch.ones(2 + dist.get_rank(), 4))


def one_rank_changes_an_attribute() -> None:
    """The last call is of a model that only rank 0 has changed, of those that compute it together."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus())
    sharded = shardgraph.compile(model, "tp", example_inputs=(torch.ones(2, 4),), timeout=5)
    sharded(torch.ones(2, 4))
    if dist.get_rank() == 0:
        model[1].beta = 2.0
    sharded(torch.ones(2, 4))


def ranks_change_an_attribute_together(plan: str) -> list[float]:
    """The largest difference to the original after each change of an attribute, back and forth."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.Softplus(), nn.Linear(4, 4))
    original = copy.deepcopy(model)
    sharded, x = shardgraph.compile(model, plan), torch.ones(2, 4)
    differences = []
    for beta in (1.0, 2.0, 1.0, 2.0, 3.0):
        model[1].beta = original[1].beta = beta
        for each in (sharded, original):
            each.zero_grad()
            each(x).sum().backward()
        differences.append(difference(sharded, original, gradients=True))
    assert [len(variants) for variants in sharded._programs.kept.values()] == [3]
    return differences


def calls_after_replacing(change: str) -> list[str]:
    """The errors of two calls after a parameter was replaced."""
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    sharded = shardgraph.compile(model, "fsdp")
    sharded(torch.ones(2, 4))
    if change == "a parameter":
        model[0].weight = nn.Parameter(sharded.get_parameter("0.weight").redistribute(placements=[Replicate()]))
    if change == "its data":
        model[0].weight.data = torch.ones(4, 4)
    if change == "the dtype":
        model.double()
    errors = []
    for _ in range(2):
        with pytest.raises(shardgraph.ShardGraphError) as raised:
            sharded(torch.ones(2, 4))
        errors.append(str(raised.value))
    return errors


def attributes(plan: str) -> dict[str, float]:
    """The largest differences of what forward leaves behind, and of gradients, to those of the original by name."""
    torch.manual_seed(0)
    original = KeepsState()
    model, of_ranks = copy.deepcopy(original), [copy.deepcopy(original) for _ in range(dist.get_world_size())]
    sharded = shardgraph.compile(model, plan)
    worst: dict[str, float] = {}
    for _ in range(3):
        x = torch.randn(2 * dist.get_world_size(), 4)
        for each, part in zip(of_ranks, x.chunk(dist.get_world_size()), strict=True):
            (each(part).sum() + each.auxiliary).backward()
        mine = x.chunk(dist.get_world_size())[dist.get_rank()]
        (sharded(mine).sum() + model.auxiliary).backward()
        average = torch.stack([each.average for each in of_ranks]).mean(0)
        for each in of_ranks:
            each.average = average
        theirs = of_ranks[dist.get_rank()]
        for name in ("average", "hidden", "auxiliary", "calls", "factor", "last"):
            one, other = (torch.as_tensor(getattr(each, name)).detach() for each in (model, theirs))
            worst[name] = max(worst.get(name, 0.0), float((one - other).abs().max()))
    for name, parameter in model.named_parameters():
        gradients = [dict(each.named_parameters())[name].grad for each in of_ranks]
        gathered = parameter.grad.full_tensor() if isinstance(parameter.grad, DTensor) else parameter.grad
        worst[f"gradient of {name}"] = float((gathered - torch.stack(gradients).mean(0)).abs().max())
    return worst


def accumulation(plan: str) -> dict[str, float]:
    """The largest difference of accumulated gradients to those of the original on the whole batch, by what happens
    between backward passes under ``no_sync`` and the first one outside."""
    torch.manual_seed(0)
    original, batch = TwoHeads(), torch.randn(2, 2 * dist.get_world_size(), 4)
    model = copy.deepcopy(original)
    sharded = shardgraph.compile(model, plan)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (sharded, original)]
    mine = batch.chunk(dist.get_world_size(), 1)[dist.get_rank()]

    def loss(module: nn.Module, x: torch.Tensor, *heads: str) -> torch.Tensor:
        made = module(x)
        return torch.stack([made[head].square().mean() for head in heads]).sum()

    def after(between: Any) -> float:
        for each, x, optimizer in zip((sharded, original), (mine, batch), optimizers, strict=True):
            optimizer.zero_grad()
            with sharded.no_sync():
                loss(each, x[0], "first", "second").backward()
            between(each, optimizer)
            loss(each, x[1], "first").backward()
            each.requires_grad_(True)
        return difference(sharded, original, gradients=True)

    def clear_and_freeze(each: nn.Module, optimizer: torch.optim.Optimizer) -> None:
        optimizer.zero_grad()
        each.second.requires_grad_(False)

    facts = {
        "nothing": after(lambda each, _: None),
        "gradients are cleared and a head is frozen": after(clear_and_freeze),
        "a head is frozen": after(lambda each, _: each.second.requires_grad_(False)),
        "the body is frozen": after(lambda each, _: each.shared.requires_grad_(False)),
        "the module's gradients are cleared": after(lambda each, _: each.zero_grad()),
        "the optimizer's gradients are cleared": after(lambda _, optimizer: optimizer.zero_grad()),
    }
    with sharded.no_sync():
        value = loss(sharded, mine[0], "first")
    sharded.zero_grad()
    original.zero_grad()
    value.backward()
    loss(original, batch[0], "first").backward()
    facts["forward was inside and backward is not"] = difference(sharded, original, gradients=True)
    return facts


class OneGradient(nn.Module):
    """Two parameters whose gradients are one value where the first head is the loss, and of which the second head has
    one alone."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.a, self.b = (nn.Parameter(torch.ones(4)) for _ in range(2))

    def forward(self, x: torch.Tensor, second: bool = False) -> torch.Tensor:
        hidden = self.linear(x)
        return (hidden * self.b if second else hidden + (self.a + self.b)).square().mean()


def accumulation_of_one_gradient(plan: str) -> float:
    """The largest difference of the gradients of ``OneGradient`` to those of the original, where a backward of its
    second head under ``no_sync`` is followed by two of its first, one of which is under ``no_sync`` too."""
    torch.manual_seed(0)
    original, batch = OneGradient(), torch.randn(3, 2 * dist.get_world_size(), 4)
    sharded = shardgraph.compile(copy.deepcopy(original), plan)
    mine = batch.chunk(dist.get_world_size(), 1)[dist.get_rank()]
    for each, x in ((sharded, mine), (original, batch)):
        with sharded.no_sync():
            each(x[0], second=True).backward()
            each(x[1]).backward()
        each(x[2]).backward()
    return difference(sharded, original, gradients=True)


def mean_over_all_tokens(plan: str, mesh: dict[str, int], pipeline: Pipeline | None = None) -> float:
    """The largest difference of gradients to those of the mean over the tokens of all ranks, which have unequally many.

    Rank 0 has a row without a token to predict.
    """
    torch.manual_seed(0)
    original = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 8), nn.Linear(8, 7))
    tokens, labels = torch.randint(0, 7, (4 * mesh["dp"], 5)), torch.randint(0, 7, (4 * mesh["dp"], 5))
    labels[0] = labels[-1, :2] = -100
    model, loss_fn = copy.deepcopy(original), _token_loss
    rank = dist.get_rank() % mesh["dp"]
    mine, target = tokens.chunk(mesh["dp"])[rank], labels.chunk(mesh["dp"])[rank]
    sharded = shardgraph.compile(
        model,
        plan,
        mesh=mesh,
        pipeline=pipeline,
        loss_fn=loss_fn,
        loss_weight="tokens",
        example_inputs=(mine,),
        example_kwargs={"target": target},
    )
    sharded.train_step(mine, target=target)
    loss_fn(original(tokens), labels).backward()
    theirs = dict(original.named_parameters())
    return max((whole(p.grad) - theirs[name].grad).abs().max().item() for name, p in sharded.named_parameters())


def _token_loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return nn.functional.cross_entropy(output.flatten(0, 1), target.flatten())


def one_rank_cannot_compile() -> None:
    class Branches(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.linear(x)
            return y + 1 if dist_rank == 1 and y.sum() > 0 else y

    dist_rank = dist.get_rank()
    torch.manual_seed(0)
    shardgraph.compile(Branches(), "fsdp", timeout=20)(torch.ones(2, 4))


def killed_between_steps() -> None:
    torch.manual_seed(0)
    sharded = shardgraph.compile(nn.Linear(4, 4), "fsdp")
    sharded(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(0.5)
    sharded(torch.ones(2, 4)).sum().backward()


def lost_peer() -> str:
    """What a rank is told whose peer has left in the middle of training."""
    torch.manual_seed(0)
    sharded = shardgraph.compile(nn.Linear(4, 4, bias=False), "fsdp")
    sharded(torch.ones(2, 4)).sum().backward()
    if dist.get_rank() == 1:
        return "left"
    time.sleep(1.0)
    try:
        sharded(torch.ones(2, 4)).sum().backward()
    except shardgraph.CollectiveError as error:
        return str(error)
    return "nothing happened"


# -- mixed precision -------------------------------------------------------------------------------


def mixed_against_fsdp2(policies: list[tuple[torch.dtype, torch.dtype]]) -> dict[str, float]:
    """The largest difference to FSDP2 under each policy, ``(param_dtype, reduce_dtype)``, in four steps of training.

    Relative to each tensor's largest element, of all losses, gradients and final weights.
    """
    return {str(policy): _mixed_against_fsdp2(*policy) for policy in policies}


def _mixed_against_fsdp2(dtype: torch.dtype, reduce: torch.dtype) -> float:
    def fsdp2(model: nn.Module) -> nn.Module:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        policy = MixedPrecisionPolicy(param_dtype=dtype, reduce_dtype=reduce)
        for layer in model.model.layers:
            fully_shard(layer, mesh=mesh, mp_policy=policy)
        return fully_shard(model, mesh=mesh, mp_policy=policy)

    @contextmanager
    def unsynced(module: Any) -> Iterator[None]:
        module.set_requires_gradient_sync(False)
        yield
        module.set_requires_gradient_sync(True)

    precision = shardgraph.Precision(str(dtype), reduce=str(reduce))
    mine = _seen_in_training(lambda m: shardgraph.compile(m, "fsdp", precision=precision), lambda m: m.no_sync())
    theirs = _seen_in_training(fsdp2, unsynced)
    assert [each.dtype for each in mine] == [each.dtype for each in theirs]
    return max((a - b).abs().max().item() / b.abs().max().item() for a, b in zip(mine, theirs, strict=True))


def _seen_in_training(wrap: Any, no_sync: Any) -> list[torch.Tensor]:
    """Losses and gradients of four steps of Llama, the last of two batches, and the weights after them."""
    model, call = make("llama", 2 * dist.get_world_size())
    model.set_attn_implementation("eager")  # others skip the mask unless the model is captured, and round otherwise
    module = wrap(model)
    optimizer = torch.optim.AdamW(module.parameters(), lr=1e-2)
    args, kwargs = part(call)
    seen = []
    for step in range(4):
        if step == 3:
            with no_sync(module):
                module(*args, **kwargs).loss.backward()
        loss = module(*args, **kwargs).loss
        loss.backward()
        seen += [loss.detach(), *(whole(parameter.grad) for parameter in module.parameters())]
        optimizer.step()
        optimizer.zero_grad()
    return seen + [whole(parameter.detach()) for parameter in module.parameters()]


def overflow_on_one_rank() -> tuple[list[bool], float]:
    """Whether each of three steps changed this rank's weights, the second of which overflows on rank 1, and the scale.

    The first parameter is a scalar, of which every rank has a replica; the others are shards.
    """

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale = nn.Parameter(torch.tensor(1.0))
            self.linear = nn.Linear(4, 4, bias=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.scale

    torch.manual_seed(0)
    sharded = shardgraph.compile(Scaled(), "fsdp", precision="fp16")
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    scaling = shardgraph.GradScaler("cpu", init_scale=8.0)
    changed = []
    for step in range(3):
        scaling.scale(sharded(torch.ones(2, 4)).square().mean()).backward()
        if step == 1 and dist.get_rank() == 1:
            sharded.linear.weight.grad.to_local()[0, 0] = float("inf")
        before = sharded.linear.weight.detach().to_local().clone()
        scaling.step(optimizer)
        scaling.update()
        optimizer.zero_grad()
        changed.append(not torch.equal(before, sharded.linear.weight.detach().to_local()))
    return changed, scaling.get_scale()


# -- memory ----------------------------------------------------------------------------------------


def plan_named(name: str) -> Plan:
    """A preset over all ranks.

    ``"fsdp kept"`` keeps what it gathered, ``"fsdp bf16"`` computes in bfloat16, ``"fsdp merged"`` has buckets.
    """
    if name.startswith("tp"):
        return preset(name, {"tp": dist.get_world_size()})
    plan = preset(name.split()[0], {"dp": dist.get_world_size()})
    if name.endswith("bf16"):
        return replace(plan, precision=shardgraph.Precision.of("bf16"))
    if name.endswith("merged"):
        return replace(plan, bucket=1 << 20)
    if not name.endswith("kept"):
        return plan
    rules = tuple((pattern, replace(entry, reshard_after_forward=False)) for pattern, entry in plan.parameters)
    return replace(plan, parameters=rules)


def peak_memory(kinds: list[str], plans: list[str], batch: int = 4) -> dict[str, dict[str, tuple[int, int]]]:
    """``(predicted, measured)`` peak bytes on this rank of a training step and of a forward, by model and plan."""
    return {f"{kind}, {plan}": _peak_memory(kind, plan, batch) for kind in kinds for plan in plans}


def _peak_memory(kind: str, plan: str, batch: int) -> dict[str, tuple[int, int]]:
    model, (args, kwargs) = make(kind, batch)
    # The loss is part of the program, so that nothing runs outside of what is predicted.
    chosen = plan_named(plan)
    example = {"example_inputs": args, "example_kwargs": kwargs} if chosen.operators else {}
    sharded = shardgraph.compile(model, chosen, loss_fn=lambda output, target: scalar(output), **example)
    optimizer, target = torch.optim.AdamW(sharded.parameters(), lr=1e-3), torch.zeros(1)

    def step() -> None:
        sharded.train_step(*args, target=target, **kwargs)
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [v for state in optimizer.state.values() for v in state.values()]
    held = [*sharded.parameters(), *sharded.buffers(), *states, *tree_leaves((args, kwargs, target))]
    held = [tensor for tensor in held if isinstance(tensor, torch.Tensor)]
    trained = min(_measured(step, held) for _ in range(3))
    predicted = program_memory(sharded.program, "adamw", dist.get_rank()).peak_bytes
    with torch.no_grad():
        sharded(*args, **kwargs)
        ran = min(_measured(lambda: sharded(*args, **kwargs), held) for _ in range(3))
    alone = program_memory(sharded.program, "adamw", dist.get_rank()).peak_bytes
    beside = target.nbytes + sum(local_bytes(state) for state in states)  # what this program does not know of
    return {"train": (predicted, trained), "forward": (alone + beside, ran)}


def _measured(run: Callable[[], Any], held: list[torch.Tensor]) -> int:
    # One of several runs is taken: on a busy machine gloo's thread may let go of a buffer late.
    with PeakMemory().track(held) as memory:
        run()
    return memory.peak_bytes


def local_bytes(tensor: torch.Tensor) -> int:
    """The bytes that this rank holds of a tensor."""
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).nbytes


def automatic_plan() -> tuple[str, str]:
    """The plan that ``"auto"`` takes with example inputs, which must train, and its explanation."""
    model, (args, kwargs) = make("odd-mlp", 4)
    sharded = shardgraph.compile(model, "auto", example_inputs=args, example_kwargs=kwargs)
    scalar(sharded(*args, **kwargs)).backward()
    return sharded.plan.name, sharded.plan.explain()


def compile_without_inputs(plan: str) -> None:
    shardgraph.compile(make("odd-mlp", 2)[0], plan)


def _compiled(name: str, plan: str, mesh: dict[str, int], zero: bool) -> tuple[nn.Module, dict[str, torch.Tensor]]:
    """A model of the zoo under a plan, and the parameters that it has without ``zero``."""
    model, call = prepared(name, 4)
    values = {fqn: parameter.detach().clone() for fqn, parameter in model.named_parameters()}
    with torch.no_grad():
        for parameter in model.parameters() if zero else ():
            parameter.zero_()
    args, kwargs = part(call, preset(plan, mesh))
    return shardgraph.compile(model, plan, mesh=mesh, example_inputs=args, example_kwargs=kwargs), values


def save_sharded(name: str, plan: str, mesh: dict[str, int], path: str) -> None:
    dcp.save(_compiled(name, plan, mesh, zero=False)[0].state_dict(), checkpoint_id=path)


def load_sharded(name: str, plan: str, mesh: dict[str, int], path: str) -> list[str]:
    """The parameters that are not what they were when they were saved."""
    sharded, values = _compiled(name, plan, mesh, zero=True)
    state = sharded.state_dict()
    dcp.load(state, checkpoint_id=path)
    sharded.load_state_dict(state)
    return [fqn for fqn, parameter in sharded.named_parameters() if not torch.equal(whole(parameter), values[fqn])]


def within_memory(rows: int) -> tuple[object, bool]:
    """The recomputation that is found for a byte less than keeping everything takes, and whether the model trains."""
    torch.manual_seed(0)
    model, x = Deep(), torch.randn(rows, 32)
    everything = shardgraph.analyze(model, (x,), "fsdp", mesh={"dp": dist.get_world_size()}).peak_memory
    sharded = shardgraph.compile(model, "fsdp", example_inputs=(x,), memory=everything - 1)
    sharded(x).backward()
    return sharded.plan.recompute, all(parameter.grad is not None for parameter in sharded.parameters())


def offloaded() -> dict[str, Any]:
    """Training with parameters in host memory, and where things are then."""
    model, call = prepared("tied-transformer", 2 * dist.get_world_size())
    original = copy.deepcopy(model)
    sharded = shardgraph.compile(model, "fsdp", offload="parameters")
    found: dict[str, Any] = {"parity": train(sharded, original, call, steps=3, clip=0.5)}

    args, kwargs = part(call)
    with sharded.no_sync():
        scalar(sharded(*args, **kwargs)).backward()
    scalar(sharded(*args, **kwargs)).backward()
    (2 * scalar(original(*call[0], **call[1]))).backward()
    found["accumulated"] = difference(sharded, original, gradients=True)
    parameters = [p for p in sharded.parameters() if p.grad is not None]
    optimizer = torch.optim.AdamW(parameters)
    with PeakMemory() as memory:
        optimizer.step()
    found["places"] = {
        "parameters": all(is_on_host(p.to_local()) for p in parameters),
        "gradients": all(is_on_host(p.grad.to_local()) for p in parameters),
        "states": memory.peak_bytes <= 4 * len(parameters) < memory.host_peak_bytes,  # AdamW counts its steps apart
    }

    state = sharded.full_state_dict()
    shared: list[Any] = [state]
    dist.broadcast_object_list(shared, src=0)
    other = shardgraph.compile(prepared("tied-transformer", 2)[0], "fsdp", offload="parameters")
    other.load_state_dict(shared[0])
    pairs = zip(sharded.parameters(), other.parameters(), strict=True)
    found["reloaded"] = max((whole(a) - whole(b)).abs().max().item() for a, b in pairs)

    found["pipeline"] = _offloaded_pipeline()
    return found


def _offloaded_pipeline() -> float:
    """The largest difference of a gradient between a pipeline with parameters in host memory and the whole model."""
    torch.manual_seed(0)
    model, x = Deep(4).double(), torch.randn(4, 3, 32, dtype=torch.float64)
    original = copy.deepcopy(model)
    pipelined = shardgraph.compile(
        model, "pp", offload="parameters", example_inputs=(x,), pipeline=shardgraph.Pipeline(microbatches=2)
    )
    pipelined.train_step(x)
    original(x).backward()
    theirs = dict(original.named_parameters())
    return max((whole(p.grad) - theirs[name].grad).abs().max().item() for name, p in pipelined.named_parameters())
