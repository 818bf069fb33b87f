"""What runs on each rank of the tests of FairScale's FSDP; at module level, so that a rank finds it."""

from __future__ import annotations

import copy
from collections import namedtuple
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

import shardgraph
from shardgraph.fairscale import (
    FSDP,
    MOELayer,
    ShardedGradScaler,
    Top2Gate,
    auto_wrap,
    checkpoint_wrapper,
    enable_wrap,
    wrap,
)
from shardgraph.passes.lowering import lower
from tests.ranks import whole

Answer = namedtuple("Answer", "hidden more")


class Net(nn.Module):
    """Two parts that are wrapped under ``enable_wrap``, and a layer that is not."""

    def __init__(self, **first: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = wrap(nn.Sequential(nn.Linear(6, 16), nn.Tanh(), nn.Linear(16, 15)).double(), **first)
        self.second = auto_wrap(
            nn.Sequential(nn.Linear(15, 16), nn.Tanh(), nn.Linear(16, 4)).double(), min_num_params=300
        )
        self.last = nn.Linear(4, 3).double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(torch.tanh(self.second(torch.tanh(self.first(x)))))


def nested(first: dict[str, Any] | None = None, **options: Any) -> Net:
    with enable_wrap(wrapper_cls=FSDP, **options):
        return Net(**first or {})


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(8, 16), nn.Linear(16, 8)
        self.register_buffer("shift", torch.linspace(-1, 1, 16))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.tanh(self.up(x) + self.shift).type_as(x))


class Structured(nn.Module):
    """Returns a dict of a named tuple and a list."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        hidden = torch.tanh(self.layer(x))
        return {"answer": Answer(hidden, [hidden * 2, hidden.sum(-1)]), "doubled": x * 2}


class Reads(nn.Module):
    """A structured output, read by its names."""

    def __init__(self, offload_to_cpu: bool | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        inner = Structured()
        self.inner = inner if offload_to_cpu is None else checkpoint_wrapper(inner, offload_to_cpu)
        self.before, self.head = nn.Linear(8, 8), nn.Linear(8, 2)

    def forward(self, x: torch.Tensor) -> dict[str, Any]:
        found = self.inner(torch.relu(self.before(x)))
        return {**found, "head": self.head(found["answer"].more[0]) + found["answer"].more[1][..., None]}


def my_part(batch: torch.Tensor) -> torch.Tensor:
    return batch.chunk(dist.get_world_size())[dist.get_rank()]


def batches(count: int = 3, width: int = 6, dtype: torch.dtype = torch.float64) -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(8, width, generator=generator, dtype=dtype) for _ in range(count)]


def train(model: nn.Module, optimizer: torch.optim.Optimizer, data: list[torch.Tensor]) -> list[torch.Tensor]:
    losses = []
    for batch in data:
        optimizer.zero_grad()
        losses.append(model(batch).square().mean())
        losses[-1].backward()
        optimizer.step()
    return [loss.detach() for loss in losses]


def mean(values: list[torch.Tensor]) -> torch.Tensor:
    total = torch.stack(values)
    dist.all_reduce(total)
    return total / dist.get_world_size()


def check_like(wrapped: nn.Module, original: nn.Module) -> None:
    """Losses, gradients and weights over several steps are those of the unsharded model on the whole batch."""
    data = batches()
    ours, theirs = (torch.optim.Adam(each.parameters(), lr=1e-2) for each in (wrapped, original))
    losses = mean(train(wrapped, ours, [my_part(batch) for batch in data]))
    torch.testing.assert_close(losses, torch.stack(train(original, theirs, data)))
    expected = dict(original.named_parameters())
    for name, parameter in wrapped.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), expected[name].grad)
        torch.testing.assert_close(whole(parameter.detach()), expected[name].detach())


def trains_like_the_model(options: dict[str, Any]) -> None:
    check_like(FSDP(Net(), **options), Net())


def nested_ones_train_like_the_model(first: dict[str, Any], options: dict[str, Any]) -> tuple[list[str], list[str]]:
    model = FSDP(nested(first, **options), **options)
    check_like(model, Net())
    kinds = {type(each).__name__ for each in model.modules() if each is not model}
    return sorted(kinds), sorted(map(str, model.plan.annotations))


class Mixture(nn.Module):
    """A layer that is recomputed, and experts, whose auxiliary loss is part of the output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.dense = checkpoint_wrapper(nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)))
        experts = nn.ModuleList(nn.Sequential(nn.Linear(6, 10), nn.Tanh(), nn.Linear(10, 6)) for _ in range(4))
        self.experts = MOELayer(Top2Gate(6, 4).eval(), experts)  # whose choices are not sampled
        self.double()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mixed = self.experts(self.dense(x))
        return x + mixed + self.experts.l_aux


def mixture_trains_like_the_model() -> bool:
    """Experts have room for the tokens of a rank, so the model is called with each rank's part of the batch."""
    model, original = FSDP(Mixture()), Mixture()
    optimizers = [torch.optim.Adam(each.parameters(), lr=1e-2) for each in (model, original)]
    for batch in batches():
        parts = batch.view(2, 2, 2, 6)
        model(parts[dist.get_rank()]).square().mean().backward()
        torch.stack([original(part).square().mean() for part in parts]).mean().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    expected = dict(original.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parameter.detach()), expected[name].detach())
    return any("bmm" in str(node.target) for node in model.program.forward.graph.nodes)


def parts_without_an_outer_one_train_like_the_model() -> int:
    model = nested()
    assert isinstance(model.first, FSDP) and isinstance(model.second, FSDP)
    original = Net()
    model.load_state_dict(original.state_dict())
    data = batches()
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model.first, original.first)]
    train(model, optimizers[0], [my_part(batch) for batch in data])
    train(original, optimizers[1], data)
    for name, value in original.first.state_dict().items():
        torch.testing.assert_close(model.state_dict()[f"first.{name}"], value)
    return len(model.state_dict())


def all_gathers(model: nn.Module) -> tuple[int, int]:
    model(my_part(batches(1)[0])).sum().backward()
    alone = lower(model.program.joint, replace(model.plan, bucket=0), model.program.shapes)  # one for each parameter
    graphs = (alone.forward, alone.backward)
    forward, backward = (sum("all_gather_into" in str(node.target) for node in each.graph.nodes) for each in graphs)
    return forward, backward


def gathers_with(options: dict[str, Any], inner: dict[str, Any] | None) -> tuple[int, int]:
    return all_gathers(FSDP(Net() if inner is None else nested(**inner), **options))


def offloaded_by(options: dict[str, Any], inner: dict[str, Any] | None) -> list[str]:
    model = FSDP(Net() if inner is None else nested(**inner), **options)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    return [name for name, entry in model.plan.resolve(shapes).items() if entry.offload]


def in_mixed_precision(options: dict[str, Any]) -> dict[str, Any]:
    model, original = FSDP(Buffered(), **options), Buffered()
    batch = batches(1, 8, torch.float32)[0]
    output = model(my_part(batch))
    output.float().square().mean().backward()
    low = original.to(model.options["compute_dtype"] or torch.float32)
    low.shift = Buffered().shift.to(model.shift.dtype)
    reduced = [
        str(node.args[0].meta["val"].dtype)
        for node in model.program.backward.graph.nodes
        if "reduce_scatter" in str(node.target)
    ]
    return {
        "equal": torch.equal(output, low(my_part(batch).to(low.up.weight.dtype)).to(output.dtype)),
        "output": output.dtype,
        "buffer": model.shift.dtype,
        "gradient": model.up.weight.grad.dtype,
        "reduced": sorted(set(reduced)),
    }


def inner_in_full_precision() -> tuple[bool, Any]:
    def built(inner: Any) -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Linear(8, 8), inner(nn.Linear(8, 8)), nn.Linear(8, 8))

    original = built(lambda layer: layer)
    model = FSDP(built(FSDP), mixed_precision=True, compute_dtype=torch.bfloat16)
    batch = batches(1, 8, torch.float32)[0]
    low = copy.deepcopy(original).bfloat16()
    expected = low[2](original[1](low[0](batch.bfloat16()).float()).bfloat16())
    return torch.equal(model(batch), expected), [str(each) for _, each in model.plan.annotations]


def casts_inputs_to_full_precision() -> torch.dtype:
    batch = batches(1, 8, torch.float16)[0]
    return FSDP(Buffered(), force_input_to_fp32=True)(batch).dtype


def states(options: dict[str, Any]) -> tuple[bool, int, str]:
    model, original = FSDP(nested(), **options), Net()
    state, expected = model.state_dict(), original.state_dict()
    same = all(not value.is_meta and torch.equal(value, expected[name]) for name, value in state.items())
    plain = not any(isinstance(value, DTensor) for value in state.values())
    devices = sorted({value.device.type for value in state.values()})
    return same and plain, len(state), " ".join(devices)


def state_loads_into_another() -> None:
    trained, fresh = FSDP(nested()), FSDP(Net())
    train(trained, torch.optim.SGD(trained.parameters(), lr=0.1), batches())
    fresh.load_state_dict(trained.state_dict())
    for name, value in trained.state_dict().items():
        torch.testing.assert_close(fresh.state_dict()[name], value, rtol=0, atol=0)
    outer = nn.ModuleList([FSDP(Net())])
    outer.load_state_dict({f"0.{name}": value for name, value in trained.state_dict().items()})
    for name, value in trained.state_dict().items():
        torch.testing.assert_close(outer.state_dict()[f"0.{name}"], value, rtol=0, atol=0)


def local_state_loads_into_another() -> tuple[int, str]:
    trained, fresh = FSDP(Net()), FSDP(Net())
    train(trained, torch.optim.SGD(trained.parameters(), lr=0.1), [my_part(batch) for batch in batches()])
    state = trained.local_state_dict()
    fresh.load_local_state_dict(state)
    for name, value in trained.state_dict().items():
        torch.testing.assert_close(fresh.state_dict()[name], value, rtol=0, atol=0)
    try:
        fresh.load_local_state_dict(Net().state_dict())
    except shardgraph.CheckpointError as error:
        return sum(value.numel() for value in state.values()), str(error)
    return 0, ""


def summons() -> dict[str, Any]:
    model, original = FSDP(nested()), Net()
    sharded = model.last.weight
    found: dict[str, Any] = {}
    with model.summon_full_params():
        found["same"] = torch.equal(model.first[0].weight, original.first[0].weight)
        with torch.no_grad():
            model.first[0].weight.fill_(7.0)
    found["written"] = bool((model.state_dict()["first.0.weight"] == 7.0).all())
    with model.summon_full_params(volatile=True), torch.no_grad():
        model.first[0].weight.fill_(9.0)
    found["volatile"] = bool((model.state_dict()["first.0.weight"] == 7.0).all())
    with model.summon_full_params(recurse=False):
        found["outside"] = [n for n, p in model.named_parameters() if not isinstance(p, DTensor)]
    found["restored"] = model.last.weight is sharded
    return found


def state_of_the_optimizer() -> tuple[bool, list[str]]:
    """Whole and back, and into the unsharded optimizer; all continue alike."""
    data = batches(6)
    model, original = FSDP(nested()), Net()
    ours, theirs = (torch.optim.Adam(each.parameters(), lr=1e-2) for each in (model, original))
    train(model, ours, [my_part(batch) for batch in data[:3]])
    state = model.gather_full_optim_state_dict(ours, recipient_rank=None)
    theirs.load_state_dict(copy.deepcopy({key: state[key] for key in ("state", "param_groups")}))
    original.load_state_dict(model.state_dict())
    resumed = FSDP(Net())
    resumed.load_state_dict(model.state_dict())
    again = torch.optim.Adam(resumed.parameters(), lr=1e-2)
    again.load_state_dict(resumed.get_shard_from_optim_state_dict(state))
    train(resumed, again, [my_part(batch) for batch in data[3:]])
    train(original, theirs, data[3:])
    for name, value in original.state_dict().items():
        torch.testing.assert_close(resumed.state_dict()[name], value)
    on_first = model.gather_full_optim_state_dict(ours)
    return on_first is None, list(state["param_id_map"])


def accumulates_and_clips() -> tuple[float, float]:
    data = batches(2)
    model, original = FSDP(nested()), Net()
    with model.no_sync():
        model(my_part(data[0])).square().mean().backward()
        assert model.last.weight.grad is None
    model(my_part(data[1])).square().mean().backward()
    for batch in data:
        original(batch).square().mean().backward()
    norms = model.clip_grad_norm_(0.01), nn.utils.clip_grad_norm_(original.parameters(), 0.01)
    expected = dict(original.named_parameters())
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(whole(parameter.grad), expected[name].grad)
    return norms[0].item(), norms[1].item()


def checkpointed(offload_to_cpu: bool | None) -> dict[str, Any]:
    model, original = FSDP(Reads(offload_to_cpu)), Reads()
    batch = batches(1, 8, torch.float32)[0]
    output, expected = model(my_part(batch)), original(batch)
    torch.testing.assert_close(output["answer"].hidden, my_part(expected["answer"].hidden))
    for each in (output, expected):
        (each["head"].square().mean() + each["answer"].more[0].square().mean()).backward()
    for name, parameter in original.named_parameters():
        torch.testing.assert_close(whole(model.get_parameter(name).grad), parameter.grad)
    return {
        "type": type(output["answer"]).__name__,
        "keys": list(output),
        "recomputed": sum(
            str(node.target) in ("aten.tanh.default", "aten.tanh_.default") for node in model.backward_graph.graph.nodes
        ),
        "annotations": [str(each) for _, each in model.plan.annotations],
    }


def an_overflow_on_one_rank_skips_the_step_on_all() -> tuple[float, bool]:
    model = FSDP(nn.Linear(4, 4))
    optimizer, scaler = torch.optim.SGD(model.parameters(), lr=0.1), ShardedGradScaler(8.0)
    before = model.state_dict()["weight"].clone()
    scaler.scale(model(torch.ones(2, 4)).sum()).backward()
    if dist.get_rank() == 1:
        model.weight.grad.to_local().fill_(float("inf"))
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), torch.equal(model.state_dict()["weight"], before)
