"""What runs on each rank of the tests that follow torch's own of FSDP2 and DDP; at module level, so that a new process
finds it."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

import shardgraph
from shardgraph.ir import collectives
from shardgraph.ir.attributes import REDUCES
from tests.ranks import difference, whole
from tests.zoo import scalar

# -- models ------------------------------------------------------------------------------------------------


class ParametersAlone(nn.Module):
    """A forward without inputs."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 4))

    def forward(self) -> torch.Tensor:
        return self.weight @ self.weight


class CalledTwice(nn.Module):
    """One layer that forward calls twice."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.outer = nn.Linear(4, 4), nn.Linear(4, 5)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.outer(self.inner(x) + self.inner(x.square()))


class PartlyWithoutGradients(nn.Module):
    """A trained and a frozen layer, called in turn, the trained one also without gradients."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.frozen, self.trained = (nn.Linear(4, 4) for _ in range(3))
        self.frozen.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(3):
            x = self.frozen(F.relu(self.trained(x)))
            with torch.no_grad():
                x += F.relu(self.trained(x))
        return x


class OtherMethod(nn.Module):
    """Calls a method of a submodule that is not its forward."""

    class Features(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.patches = nn.Conv2d(4, 6, 2, 2)

        def features(self, x: torch.Tensor) -> torch.Tensor:
            return self.patches(x.view(-1, 4, 1, 1).expand(-1, 4, 4, 4)).flatten(2).transpose(1, 2)

    def __init__(self) -> None:
        super().__init__()
        self.vision, self.projector = self.Features(), nn.Linear(6, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.projector(self.vision.features(x))


class Checkpointed(nn.Module):
    """Layers in regions of ``torch.utils.checkpoint``, one of them twice, which may share a weight."""

    def __init__(self, use_reentrant: bool, tied: bool) -> None:
        super().__init__()
        self.first, self.second, self.unused = (nn.Linear(4, 4) for _ in range(3))
        self.use_reentrant = use_reentrant
        if tied:
            self.first.weight = self.second.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for _ in range(2):
            x = checkpoint(self.second, x.tanh(), use_reentrant=self.use_reentrant)
        return x


class Frequencies(nn.Module):
    """A complex parameter."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(3, 3, dtype=torch.cdouble))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.fft.irfft(torch.fft.rfft(x) @ self.weight)


class OddDtypes(nn.Module):
    """Frozen parameters of dtypes that have no gradients."""

    def __init__(self, with_float8: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.count = nn.Parameter(torch.arange(5), requires_grad=False)
        if with_float8:
            self.eight = nn.Parameter(torch.ones(6, 4).to(torch.float8_e4m3fn), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.linear(x) * self.count[3]


@dataclass
class Found:
    """What a model returns that nobody registered with pytree."""

    first: torch.Tensor | None
    others: dict[str, torch.Tensor]


class ReturnsADataclass(nn.Module):
    """Outputs in a dataclass, one of which may be left out with the layers that it needs."""

    def __init__(self, without_first: bool) -> None:
        super().__init__()
        self.one, self.other = (nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)) for _ in range(2))
        self.without_first = without_first

    def forward(self, x: torch.Tensor) -> Found:
        return Found(None if self.without_first else self.one(x), {"a": self.other(x), "b": F.relu(self.other(x))})


class Head(nn.Module):
    """A model whose last layer a call may leave out, and which raises when it is told to."""

    def __init__(self) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, 4), nn.LayerNorm(4), nn.Linear(4, 3)
        self.armed = False

    def forward(self, x: torch.Tensor, skip_head: bool = False) -> torch.Tensor:
        if self.armed:
            raise ValueError("armed")
        x = self.norm(self.body(x))
        return x if skip_head else self.head(x)


def layers(count: int = 3) -> nn.Sequential:
    """Linear layers whose five rows two ranks do not divide."""
    return nn.Sequential(*(nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 4)) for _ in range(count)))


def biases_alone() -> nn.Module:
    model = layers()
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.endswith("bias"))
    return model


def channels_last() -> nn.Module:
    """A convolution whose weight is not contiguous; its input is made of rows of four."""
    convolution = nn.Conv2d(4, 6, 2).to(memory_format=torch.channels_last)
    return nn.Sequential(nn.Unflatten(1, (4, 1, 1)), nn.ZeroPad2d(1), convolution)


MODELS: dict[str, Callable[[], nn.Module]] = {
    "a forward without inputs": ParametersAlone,
    "a layer that is called twice": CalledTwice,
    "layers that are called with and without gradients": PartlyWithoutGradients,
    "another method than forward": OtherMethod,
    "biases alone": biases_alone,
    "a checkpointed layer": lambda: Checkpointed(use_reentrant=False, tied=False),
    "a checkpointed layer, reentrant": lambda: Checkpointed(use_reentrant=True, tied=False),
    "a checkpointed layer that shares its weight": lambda: Checkpointed(use_reentrant=False, tied=True),
    "a weight in channels last": channels_last,
    "a complex parameter": Frequencies,
    "a frozen parameter of integers": OddDtypes,
    "a dataclass": lambda: ReturnsADataclass(without_first=False),
    "a dataclass with nothing in it": lambda: ReturnsADataclass(without_first=True),
}


def made(name: str) -> nn.Module:
    torch.manual_seed(0)
    return MODELS[name]().double()


def batches(step: int = 0, rows: int = 2) -> list[torch.Tensor]:
    """The batches of all ranks in one step."""
    generator = torch.Generator().manual_seed(step)
    return [torch.randn(rows, 4, dtype=torch.double, generator=generator) for _ in range(dist.get_world_size())]


def loss_of(output: Any) -> torch.Tensor:
    if isinstance(output, Found):
        output = [each for each in (output.first, *output.others.values()) if each is not None]
    return scalar(output)


# -- training ----------------------------------------------------------------------------------------------


def training_errors(names: list[str], plan: str) -> dict[str, float]:
    """By model the largest difference of a gradient or weight from the unsharded model's in four steps of Adam, whose
    gradients are removed or set to zero in turn."""
    return {name: _training_error(name, plan) for name in names}


def _training_error(name: str, plan: str) -> float:
    original = made(name)
    sharded = shardgraph.compile(copy.deepcopy(original), plan, progress=False)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (sharded, original)]
    worst = 0.0
    for step in range(4):
        calls = [() if isinstance(original, ParametersAlone) else (batch,) for batch in batches(step)]
        loss_of(sharded(*calls[dist.get_rank()])).backward()
        for call in calls:
            (loss_of(original(*call)) / len(calls)).backward()
        worst = max(worst, difference(sharded, original, gradients=True))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    return max(worst, difference(sharded, original, gradients=False))


def sparse_error(plan: str) -> float:
    """How far a sparse embedding's gradient and what SGD makes of it are from the unsharded model's."""
    torch.manual_seed(0)
    original = nn.EmbeddingBag(10, 4, sparse=True)
    sharded = shardgraph.compile(copy.deepcopy(original), plan, progress=False)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.1) for model in (sharded, original)]
    rows = [(torch.tensor([[1, 2], [2, 9]]) + 3 * rank) % 10 for rank in range(dist.get_world_size())]
    worst = 0.0
    for _ in range(2):
        sharded(rows[dist.get_rank()]).square().sum().backward()
        for each in rows:
            (original(each).square().sum() / len(rows)).backward()
        worst = max(worst, (whole(sharded.weight.grad) - original.weight.grad.to_dense()).abs().max().item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return max(worst, difference(sharded, original, gradients=False))


def backward_after_two_forwards(plan: str) -> dict[str, float]:
    """By model how far gradients are from the unsharded model's where one loss has the outputs of two calls."""
    models = {
        "checkpointed": Checkpointed(use_reentrant=False, tied=True),
        "batch norm": nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4)),
        "head": Head(),
    }
    errors = {}
    for name, original in models.items():
        original = original.double()
        sharded = shardgraph.compile(copy.deepcopy(original), plan, progress=False)
        kwargs = {"skip_head": True} if name == "head" else {}
        pairs = list(zip(batches(0, 3), batches(1, 3), strict=True))

        def loss(model: nn.Module, pair: tuple[torch.Tensor, torch.Tensor], given: Any = kwargs) -> torch.Tensor:
            first, second = (model(x, **given) for x in pair)
            return (first.square().sum() - second.pow(3).sum()).square()

        loss(sharded, pairs[dist.get_rank()]).backward()
        for pair in pairs:
            (loss(original, pair) / len(pairs)).backward()
        errors[name] = difference(sharded, original, gradients=True)
    return errors


def ignored_outputs(plan: str) -> float:
    """How far gradients are from the unsharded model's after outputs that no backward followed."""
    original = Head().double()
    sharded = shardgraph.compile(copy.deepcopy(original), plan, progress=False)
    for step in range(3):
        sharded(batches(step)[dist.get_rank()])
    sharded(batches(3)[dist.get_rank()]).square().mean().backward()
    for batch in batches(3):
        (original(batch).square().mean() / dist.get_world_size()).backward()
    return difference(sharded, original, gradients=True)


def after_an_error_of_forward(plan: str) -> tuple[str, float]:
    """The error of a forward that raises, and how far gradients of the next call are from the unsharded model's."""
    original = Head().double()
    model = copy.deepcopy(original)
    sharded = shardgraph.compile(model, plan, progress=False)
    x = batches(0)[dist.get_rank()]
    sharded(x)
    model.armed = True
    try:
        sharded(x)
        told = ""
    except Exception as error:
        told = str(error)
    model.armed = False
    sharded(x).square().mean().backward()
    for batch in batches(0):
        (original(batch).square().mean() / dist.get_world_size()).backward()
    return told, difference(sharded, original, gradients=True)


def frozen_in_turn(plan: str) -> tuple[float, list[int]]:
    """How far weights are from the unsharded model's where every other layer is frozen after compiling, trained
    without, with no gradients at all and again with the others; and how many gradients each backward reduced."""
    original = layers().double()
    sharded = shardgraph.compile(copy.deepcopy(original), plan, progress=False)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (sharded, original)]
    reduced, worst = [], 0.0
    for step in range(4):
        for model in (sharded, original):
            for name, parameter in model.named_parameters():
                parameter.requires_grad_(step == 3 or name.endswith("bias"))
        if step == 1:
            with torch.no_grad():
                mine = sharded(batches(step)[dist.get_rank()])
                worst = max(worst, (mine - original(batches(step)[dist.get_rank()])).abs().max().item())
            continue
        sharded(batches(step)[dist.get_rank()]).square().mean().backward()
        for batch in batches(step):
            (original(batch).square().mean() / dist.get_world_size()).backward()
        worst = max(worst, difference(sharded, original, gradients=True))
        started = [node for node in collectives(sharded.program.backward) if node in REDUCES]
        reduced.append(sum(len(REDUCES.of(node).split(", ")) for node in started))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step % 2 == 0)
    return max(worst, difference(sharded, original, gradients=False)), reduced


def accumulation_errors(plans: list[tuple[str, dict[str, int]]]) -> dict[str, float]:
    """By plan how far three microbatches' gradients and weights are from the unsharded model's: with a reduction for
    each microbatch, for the last alone, clipped by our norm or torch's, and removed or set to zero after a step."""
    return {plan: _accumulation_error(plan, mesh) for plan, mesh in plans}


def _accumulation_error(plan: str, mesh: dict[str, int]) -> float:
    original = layers().double()
    sharded = shardgraph.compile(copy.deepcopy(original), plan, mesh=mesh, progress=False)
    optimizers = [torch.optim.Adam(model.parameters(), lr=1e-2) for model in (sharded, original)]
    worst = 0.0
    for step in range(4):
        for microbatch in range(3):
            given = batches(10 * step + microbatch)
            if microbatch < 2 and step % 2 == 0:
                with sharded.no_sync():
                    sharded(given[dist.get_rank()]).square().mean().backward()
            else:
                sharded(given[dist.get_rank()]).square().mean().backward()
            for batch in given:
                (original(batch).square().mean() / len(given)).backward()
        worst = max(worst, difference(sharded, original, gradients=True))
        norm = (sharded.clip_grad_norm_ if step < 2 else partial(nn.utils.clip_grad_norm_, [*sharded.parameters()]))(
            0.1
        )
        worst = max(worst, (whole(norm) - nn.utils.clip_grad_norm_(original.parameters(), 0.1)).abs().item())
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=step > 1)
    return max(worst, difference(sharded, original, gradients=False))


def compiled_again(plan: str, of: str) -> str:
    """What is said of a model that is compiled a second time."""
    model = layers()
    sharded = shardgraph.compile(model, "fsdp", progress=False)
    try:
        shardgraph.compile(model if of == "the model" else sharded, plan, progress=False)
    except shardgraph.ShardGraphError as error:
        return str(error)
    return "compiled"


# -- states ------------------------------------------------------------------------------------------------


def through_a_checkpoint(folder: str, plan: str) -> tuple[float, float]:
    """Six steps of SGD with momentum, after three of which model and optimizer are saved, overwritten and loaded:
    how far they end from six steps without, and how far the plain model that loads the file continues."""

    def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
        for step in steps:
            batch = batches(step)
            model(batch[dist.get_rank()]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

    def compiled() -> tuple[Any, torch.optim.Optimizer]:
        torch.manual_seed(0)
        sharded = shardgraph.compile(layers().double(), plan, progress=False)
        return sharded, torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)

    straight, optimizer = compiled()
    train(straight, optimizer, range(6))
    sharded, optimizer = compiled()
    train(sharded, optimizer, range(3))
    state, momentum = sharded.full_state_dict(), copy.deepcopy(optimizer.state_dict())
    if dist.get_rank() == 0:
        torch.save(state, f"{folder}/{plan}.pt")
    dist.barrier()
    with torch.no_grad():
        for parameter in sharded.parameters():
            parameter.zero_()
    loaded = torch.load(f"{folder}/{plan}.pt")
    sharded.load_state_dict(loaded)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1, momentum=0.9)
    optimizer.load_state_dict(momentum)
    plain = layers().double()
    plain.load_state_dict(loaded)
    beside = difference(sharded, plain, gradients=False)
    train(sharded, optimizer, range(3, 6))
    pairs = zip(straight.parameters(), sharded.parameters(), strict=True)
    return max((whole(a) - whole(b)).abs().max().item() for a, b in pairs), beside


def state_shares_memory(plan: str) -> list[str]:
    """Parameters of which an earlier ``state_dict`` is another memory: after training, and after loading."""
    sharded = shardgraph.compile(layers().double(), plan, progress=False)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    state = sharded.state_dict()
    before = {name: address(tensor) for name, tensor in state.items()}
    for step in range(2):
        sharded(batches(step)[dist.get_rank()]).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    sharded.load_state_dict({name: tensor.detach().clone() for name, tensor in state.items()})
    found = {name: address(parameter) for name, parameter in sharded.named_parameters()}
    return [name for name in found if found[name] != before[name]]


def address(tensor: torch.Tensor) -> int:
    return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).data_ptr()


def loaded_by_parts(plan: str) -> float:
    """How far a model on ``meta``, into which rank 0's values are loaded one by one, is from the one that has them."""
    torch.manual_seed(dist.get_rank())  # the others have to hear of them
    original = layers().double()
    for parameter in original.parameters():
        dist.broadcast(parameter.detach(), src=0)
    with torch.device("meta"):
        model = layers().double()
    sharded = shardgraph.compile(model, plan, initialize=False, progress=False)
    for name, value in original.state_dict().items():
        sharded.load_state_dict({name: value}, strict=False)
    worst = difference(sharded, original, gradients=False)
    sharded(batches()[dist.get_rank()]).square().mean().backward()
    for batch in batches():
        (original(batch).square().mean() / dist.get_world_size()).backward()
    return max(worst, difference(sharded, original, gradients=True))


def shards_are_chunks() -> list[str]:
    """Parameters of which this rank has other rows, or another shape or mesh, than torch would give it."""
    torch.manual_seed(0)
    original = nn.Sequential(layers(), nn.Linear(4, 1))
    sharded = shardgraph.compile(copy.deepcopy(original), "fsdp", progress=False)
    wrong = []
    for name, parameter in sharded.named_parameters():
        expected = original.get_parameter(name)
        chunks = [*expected.detach().chunk(dist.get_world_size()), expected.detach()[:0]]
        same = (parameter.shape, parameter.stride(), parameter.device_mesh) == (
            expected.shape,
            expected.stride(),
            sharded.mesh,
        )
        if not same or not torch.equal(parameter.to_local(), chunks[min(dist.get_rank(), len(chunks) - 1)]):
            wrong.append(name)
    return wrong


def meta_initialisation_of_divided_operators(mesh: dict[str, int], plan: str) -> float:
    """How far a model on ``meta`` under a plan that divides operators is from the unsharded initialisation."""
    with torch.device("meta"):
        model = layers()
    torch.manual_seed(3)
    sharded = shardgraph.compile(model, plan, mesh=mesh, example_inputs=(torch.zeros(4, 4),), progress=False)
    original = layers()
    torch.manual_seed(3)
    for module in original.modules():
        if hasattr(module, "reset_parameters"):
            module.reset_parameters()
    assert any("split" in entry.placements[-1] for entry in sharded.program.parameters.values())
    return difference(sharded, original, gradients=False)


def on_a_mesh_of_the_user(kind: str) -> float:
    """How far training over a DeviceMesh that was made elsewhere is from the unsharded model's."""
    original = layers().double()
    if kind == "of a group":
        mesh = DeviceMesh.from_group(dist.new_group(), "cpu", mesh_dim_names=("dp",))
    elif kind == "of two groups":
        across, _ = dist.new_subgroups_by_enumeration([[0, 2], [1, 3]])
        within, _ = dist.new_subgroups_by_enumeration([[0, 1], [2, 3]])
        names = ("dp_replicate", "dp_shard")
        mesh = DeviceMesh.from_group([across, within], "cpu", torch.arange(4).view(2, 2), mesh_dim_names=names)
    else:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    plan = "hsdp" if kind == "of two groups" else "fsdp"
    sharded = shardgraph.compile(copy.deepcopy(original), plan, mesh=mesh, progress=False)
    assert sharded.mesh == mesh
    sharded(batches()[dist.get_rank()]).square().mean().backward()
    for batch in batches():
        (original(batch).square().mean() / dist.get_world_size()).backward()
    return difference(sharded, original, gradients=True)


def on_a_mesh_without_names() -> str:
    """What is said of a DeviceMesh whose dimensions have no names."""
    try:
        shardgraph.compile(layers(), "fsdp", mesh=init_device_mesh("cpu", (dist.get_world_size(),)), progress=False)
    except shardgraph.PlanError as error:
        return str(error)
    return "compiled"


# -- mixed precision ---------------------------------------------------------------------------------------


def reductions_after_a_frozen_forward() -> tuple[set[torch.dtype], set[torch.dtype]]:
    """Dtypes of reductions and of gradients of a model that was frozen at its first forward and is no longer."""
    model = OddDtypes(with_float8=True)
    sharded = shardgraph.compile(model, "fsdp", precision="bf16", progress=False)
    model.linear.requires_grad_(False)
    with torch.no_grad():
        sharded(torch.ones(2, 4))
    model.linear.requires_grad_(True)
    sharded(torch.ones(2, 4)).sum().backward()
    nodes = [node for node in collectives(sharded.program.backward) if "reduce" in str(node.target)]
    return {node.meta["val"].dtype for node in nodes}, {p.grad.dtype for p in model.linear.parameters()}


def overflow_in_one_part(plan: str, mesh: dict[str, int]) -> tuple[list[bool], float]:
    """Whether each of three steps changed this rank's weights, the second of which overflows on the last rank alone,
    and the scale after them."""
    torch.manual_seed(0)
    x = torch.ones(2, 4)
    sharded = shardgraph.compile(layers(), plan, mesh=mesh, example_inputs=(x,), progress=False)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    scaling = shardgraph.GradScaler("cpu", init_scale=8.0)
    changed = []
    for step in range(3):
        scaling.scale(sharded(x).square().mean()).backward()
        parts = [(p.detach().to_local(), p.grad.to_local()) for p in sharded.parameters()]
        if step == 1 and dist.get_rank() == dist.get_world_size() - 1:
            next(gradient for _, gradient in parts if gradient.numel()).view(-1)[0] = float("inf")
        before = [part.clone() for part, _ in parts]
        scaling.step(optimizer)
        scaling.update()
        optimizer.zero_grad()
        changed.append(not all(torch.equal(old, part) for old, (part, _) in zip(before, parts, strict=True)))
    return changed, scaling.get_scale()
