"""What runs on the ranks for :mod:`tests.test_uneven`: ranks with batches of unlike sizes, beside torch's own."""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel as DDP

import shardgraph
from shardgraph import Pipeline
from shardgraph.errors import ShardGraphError
from tests.ranks import whole
from tests.zoo import Deep

ROWS = [(4, 4), (3, 4), (4, 1), (2, 3), (4, 4)]  # of the ranks in each step
Batch = tuple[torch.Tensor, torch.Tensor]


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.LayerNorm(16), nn.Linear(16, 3)).double()


def batches(step: int, rows: Sequence[int]) -> list[Batch]:
    """The batches of all data ranks: of the first, the second, the first number of rows and so on."""
    generator = torch.Generator().manual_seed(step)
    sizes = [rows[rank % len(rows)] for rank in range(dist.get_world_size())]
    made = [torch.randn(size, 9, generator=generator, dtype=torch.float64) for size in sizes]
    return [(each[:, :6], each[:, 6:]) for each in made]


def trained_alone(by_rows: bool = False) -> nn.Module:
    """The model after steps on the mean of the ranks' mean losses, or on the mean over all rows."""
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    for step, rows in enumerate(ROWS):
        parts = batches(step, rows)
        losses = torch.stack([F.mse_loss(trained(x), y) for x, y in parts])
        weights = torch.tensor([float(len(x)) for x, _ in parts], dtype=torch.float64)
        ((losses * weights).sum() / weights.sum() if by_rows else losses.mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return trained


def trained_by(wrapped: nn.Module, way: str = "backward") -> nn.Module:
    """``wrapped`` after the same steps of all ranks, each with its own rows."""
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    for step, rows in enumerate(ROWS):
        x, y = batches(step, rows)[dist.get_rank()]
        if way == "step":
            wrapped.step(x, target=y, optimizer=optimizer)  # type: ignore[operator]
            continue
        if way == "train_step":
            wrapped.train_step(x, target=y)  # type: ignore[operator]
        else:
            F.mse_loss(wrapped(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return wrapped


def apart(one: nn.Module, other: nn.Module) -> float:
    """The largest difference of a weight."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return max((whole(a.detach()) - whole(b.detach())).abs().max().item() for a, b in pairs)


def unlike_batches(plan: str, mesh: dict[str, int] | None = None) -> dict[str, float]:
    """Weights after training with unequal batches, less those of the unsharded model, of DDP and of FSDP2."""
    expected = trained_alone()
    found = {}
    for way in ("backward", "train_step", "step"):
        found[way] = apart(trained_by(shardgraph.compile(model(), plan, mesh=mesh, loss_fn=F.mse_loss), way), expected)
    found["DDP"] = apart(trained_by(DDP(model())), expected)
    found["FSDP2"] = apart(trained_by(fully_shard(model())), expected)
    return found


def weighted_by_rows(plan: str) -> float:
    """The same where losses are weighted by their elements: the mean over all rows of all ranks."""
    sharded = shardgraph.compile(model(), plan, loss_fn=F.mse_loss, loss_weight="tokens")
    return apart(trained_by(sharded, "train_step"), trained_alone(by_rows=True))


class Words(nn.Module):
    """Layers whose collectives are ordered by the time that the computation of a batch takes."""

    def __init__(self) -> None:
        super().__init__()
        layers = (nn.TransformerEncoderLayer(32, 2, 64, batch_first=True, dropout=0.0) for _ in range(3))
        self.embedding, self.layers, self.head = nn.Embedding(50, 32), nn.ModuleList(layers), nn.Linear(32, 50)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        return self.head(x).logsumexp(-1).mean()


SHORT, LONG = (1, 2), (4, 64)
ONE_BY_ONE = replace(shardgraph.preset("fsdp", {"dp": 2}), bucket=0)


def short_beside_long() -> tuple[float, bool]:
    """The largest difference of a gradient to the mean of both ranks', one of which has a long sequence in its first
    call; and whether the last program has an order of collectives that ranks have agreed on."""
    torch.manual_seed(0)
    words = Words().double()
    original, worst = copy.deepcopy(words), 0.0
    sharded = shardgraph.compile(words, ONE_BY_ONE)
    for shapes in ([SHORT, LONG], [LONG, SHORT], [LONG, (1, 9)]):
        parts = [torch.randint(50, shape) for shape in shapes]
        sharded.zero_grad()
        original.zero_grad()
        sharded(parts[dist.get_rank()]).backward()
        (sum(original(part) for part in parts) / 2).backward()
        pairs = zip(sharded.parameters(), original.parameters(), strict=True)
        worst = max([worst, *((whole(a.grad) - b.grad).abs().max().item() for a, b in pairs)])
    return worst, sharded.program.communication in sharded._programs.switches._orders.values()


def compiled_by_one_rank() -> list[int]:
    """How many programs this rank has after each call, in which one rank after the other gets a new shape."""
    sharded, counts = shardgraph.compile(model(), "fsdp"), []
    for step, rows in enumerate([(4, 4), (3, 4), (3, 2), (4, 4)]):
        x, y = batches(step, rows)[dist.get_rank()]
        F.mse_loss(sharded(x), y).backward()
        counts.append(len(sharded._programs.kept))
    return counts


def synchronized_batch_norm() -> float:
    """The largest difference of a gradient or of a statistic to those of the rows of all ranks together."""
    torch.manual_seed(0)
    original = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    sharded = shardgraph.compile(nn.SyncBatchNorm.convert_sync_batchnorm(copy.deepcopy(original)), "fsdp")
    parts = batches(0, (2, 5))
    sharded(parts[dist.get_rank()][0]).square().sum().backward()
    (original(torch.cat([x for x, _ in parts])).square().sum() / 2).backward()
    pairs = list(zip(sharded.parameters(), original.parameters(), strict=True))
    worst = max((whole(a.grad) - b.grad).abs().max().item() for a, b in pairs)
    statistics = zip(sharded.buffers(), original.buffers(), strict=True)
    return max([worst, *((a - b).abs().max().item() for a, b in statistics)])


class OneOfTwo(nn.Module):
    """Which of two equal layers it uses is a keyword of a call."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: torch.Tensor, second: bool = False) -> torch.Tensor:
        return self.second(x) if second else self.first(x)


def _told(call: Any) -> tuple[str, float]:
    """The error of a call, and the seconds after which it came."""
    began = time.monotonic()
    try:
        call()
    except ShardGraphError as error:
        return f"{type(error).__name__}: {error}", time.monotonic() - began
    return "", time.monotonic() - began


def other_parameters(plan: str) -> tuple[str, float]:
    """What a rank is told if the ranks use different parameters of one shape."""
    sharded = shardgraph.compile(OneOfTwo(), plan)
    sharded(torch.ones(2, 4)).sum().backward()
    return _told(lambda: sharded(torch.ones(2, 4), second=dist.get_rank() == 1).sum().backward())


def unlike_batches_that_are_shared(known: bool) -> tuple[str, float]:
    """What a rank is told under tensor parallelism if one has a batch of its own size, ``known`` to all or not."""
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Linear(4, 8), nn.GELU(), nn.Linear(8, 4))
    sharded = shardgraph.compile(layers, "tp", mesh={"tp": 2}, example_inputs=(torch.ones(2, 4),))
    for rows in (3, 2) if known else (2,):
        sharded(torch.ones(rows, 4)).sum().backward()
    return _told(lambda: sharded(torch.ones(2 + dist.get_rank(), 4)).sum().backward())


def unlike_batches_in_a_pipeline() -> tuple[str, float]:
    torch.manual_seed(0)
    x = torch.ones(4, 3, 32)
    sharded = shardgraph.compile(Deep(4), "pp", example_inputs=(x,), pipeline=Pipeline(microbatches=2))
    sharded.train_step(x)
    return _told(lambda: sharded.train_step(torch.ones(4 + 2 * dist.get_rank(), 3, 32)))


class Refuses(nn.Module):
    """Cannot be captured for batches of three rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(x) == 3:
            raise ValueError("three rows are too many")
        return self.linear(x)


def one_rank_cannot_compile() -> tuple[str, float]:
    """What a rank is told if one of them cannot compile for the batch that it alone has."""
    sharded = shardgraph.compile(Refuses(), "fsdp")
    sharded(torch.ones(2, 4)).sum().backward()
    return _told(lambda: sharded(torch.ones(2 + dist.get_rank(), 4)).sum().backward())


def one_rank_evaluates(plan: str) -> tuple[str, float]:
    """What a rank is told if one of them leaves the loop a step early and evaluates."""
    sharded = shardgraph.compile(model(), plan)
    x, _ = batches(0, (4, 4))[dist.get_rank()]

    def evaluated() -> None:
        with torch.no_grad():
            sharded(x)

    def trained() -> None:
        sharded(x).sum().backward()

    for call in (trained, evaluated, trained):
        call()
    return _told(trained if dist.get_rank() else evaluated)


# -- ranks with unequally many batches -------------------------------------------------------------------------

STEPS = (5, 3)  # of the ranks, in turn


def _steps(rank: int | None = None) -> int:
    return STEPS[(dist.get_rank() if rank is None else rank) % len(STEPS)]


def normed() -> nn.Module:
    """A model whose batch norm has statistics."""
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.GELU(), nn.BatchNorm1d(16), nn.Linear(16, 3)).double()


def _stepped(wrapped: nn.Module, way: str) -> None:
    """The steps of this rank, with a schedule and clipped gradients."""
    optimizer = torch.optim.AdamW(wrapped.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
    for step in range(_steps()):
        x, y = batches(step, (4, 3))[dist.get_rank()]
        if way == "step":
            wrapped.step(x, target=y, optimizer=optimizer, max_norm=0.1)  # type: ignore[operator]
        else:
            with wrapped.no_sync():  # type: ignore[operator]
                F.mse_loss(wrapped(x), y).backward()
            F.mse_loss(wrapped(2 * x), y).backward()
            if isinstance(wrapped, DDP):
                nn.utils.clip_grad_norm_(wrapped.parameters(), 0.1)
            else:
                wrapped.clip_grad_norm_(0.1)  # type: ignore[operator]
            optimizer.step()
            optimizer.zero_grad()
        schedule.step()


def _alone(over_all: bool, accumulated: bool) -> nn.Module:
    """The unsharded model after the same steps."""
    trained = model()
    optimizer = torch.optim.AdamW(trained.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.8)
    for step in range(max(STEPS)):
        parts = batches(step, (4, 3))
        present = [part for rank, part in enumerate(parts) if step < _steps(rank)]
        count = len(parts) if over_all else len(present)
        for scale in (1, 2) if accumulated else (1,):
            (sum(F.mse_loss(trained(scale * x), y) for x, y in present) / count).backward()
        nn.utils.clip_grad_norm_(trained.parameters(), 0.1)
        optimizer.step()
        optimizer.zero_grad()
        schedule.step()
    return trained


def unequally_many(plan: str, mesh: dict[str, int] | None = None) -> dict[str, float]:
    """Weights after training with unequally many batches, less those of the unsharded model and of DDP."""
    found = {}
    for over_all in (True, False):
        for way in ("backward", "step"):
            sharded = shardgraph.compile(model(), plan, mesh=mesh, loss_fn=F.mse_loss)
            with sharded.join(divide_by_initial_world_size=over_all):
                _stepped(sharded, way)
            found[f"{way}, {over_all}"] = apart(sharded, _alone(over_all, way == "backward"))
        replicated = DDP(model())
        with replicated.join(divide_by_initial_world_size=over_all):
            _stepped(replicated, "backward")
        found[f"DDP, {over_all}"] = apart(replicated, _alone(over_all, True))
    return found


def without_any(plan: str) -> float:
    """The largest difference of a weight from the unsharded model's after training of which the last rank has no batch
    at all: it has compiled for an example, and has an optimizer."""
    sharded = shardgraph.compile(model(), plan, loss_fn=F.mse_loss, example_inputs=(torch.ones(4, 6).double(),))
    alone = model()
    optimizers = [torch.optim.AdamW(module.parameters(), lr=1e-2) for module in (sharded, alone)]
    with sharded.join():
        for step in range(3 if dist.get_rank() == 0 else 0):
            F.mse_loss(sharded(batches(step, (4, 3))[0][0]), batches(step, (4, 3))[0][1]).backward()
            optimizers[0].step()
            optimizers[0].zero_grad()
    for step in range(3):
        x, y = batches(step, (4, 3))[0]
        (F.mse_loss(alone(x), y) / dist.get_world_size()).backward()
        optimizers[1].step()
        optimizers[1].zero_grad()
    return apart(sharded, alone)


def evaluated_beside(plan: str) -> tuple[float, float]:
    """The largest difference of a weight, and of a statistic between ranks, where ranks train a batch norm, and
    evaluate after each step, unequally often."""
    sharded = shardgraph.compile(normed(), plan)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1e-2)
    with sharded.join():
        for step in range(_steps()):
            x, y = batches(step, (4, 3))[dist.get_rank()]
            sharded.train()
            F.mse_loss(sharded(x), y).backward()
            optimizer.step()
            optimizer.zero_grad()
            sharded.eval()
            with torch.no_grad():
                sharded(x)
    alone = normed()
    optimizer = torch.optim.SGD(alone.parameters(), lr=1e-2)
    for step in range(max(STEPS)):
        present = [part for rank, part in enumerate(batches(step, (4, 3))) if step < _steps(rank)]
        (sum(F.mse_loss(alone(x), y) for x, y in present) / dist.get_world_size()).backward()
        optimizer.step()
        optimizer.zero_grad()
    mine = torch.cat([buffer.double().flatten() for buffer in sharded.buffers()])
    both = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
    dist.all_gather(both, mine)
    return apart(sharded, alone), (both[0] - both[1]).abs().max().item()


def half_precision_beside() -> list[float]:
    """The loss of each rank on one batch after training in bfloat16 with unequally many batches: of shards of one
    model, so equal."""
    sharded = shardgraph.compile(model().float(), "fsdp", precision="bf16")
    optimizer = torch.optim.SGD(sharded.parameters(), lr=1e-2)
    with sharded.join():
        for step in range(_steps()):
            x, y = batches(step, (4, 3))[dist.get_rank()]
            F.mse_loss(sharded(x.float()).float(), y.float()).backward()
            optimizer.step()
            optimizer.zero_grad()
    x, _ = batches(9, (4, 4))[0]
    with torch.no_grad():
        return sharded(x.float()).flatten().tolist()


def weighted_beside() -> float:
    """The largest difference of a weight to training on the mean over the rows that there are in each step."""
    sharded = shardgraph.compile(model(), "fsdp", loss_fn=F.mse_loss, loss_weight="tokens")
    optimizer, alone = torch.optim.SGD(sharded.parameters(), lr=1e-2), model()
    with sharded.join():
        for step in range(_steps()):
            x, y = batches(step, (4, 3))[dist.get_rank()]
            sharded.train_step(x, target=y)
            optimizer.step()
            optimizer.zero_grad()
    optimizer = torch.optim.SGD(alone.parameters(), lr=1e-2)
    for step in range(max(STEPS)):
        present = [part for rank, part in enumerate(batches(step, (4, 3))) if step < _steps(rank)]
        x, y = (torch.cat(each) for each in zip(*present, strict=True))
        F.mse_loss(alone(x), y).backward()
        optimizer.step()
        optimizer.zero_grad()
    return apart(sharded, alone)


class Heads(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.one, self.other = nn.Linear(6, 8), nn.Linear(8, 3), nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = self.body(x).tanh()
        return self.one(hidden), self.other(hidden)


def heads_beside(plan: str) -> float:
    """The largest difference of a weight where ranks use one of two outputs each, and one rank has no more data."""
    torch.manual_seed(0)
    alone = Heads().double()
    sharded = shardgraph.compile(copy.deepcopy(alone), plan)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    with sharded.join():
        for step in range(_steps()):
            x, y = batches(step, (4, 3))[rank := dist.get_rank()]
            F.mse_loss(sharded(x)[(step + rank) % 2], y).backward()
            optimizer.step()
            optimizer.zero_grad()
    optimizer = torch.optim.AdamW(alone.parameters(), lr=1e-2)
    for step in range(max(STEPS)):
        for rank, (x, y) in enumerate(batches(step, (4, 3))):
            if step < _steps(rank):
                (F.mse_loss(alone(x)[(step + rank) % 2], y) / 2).backward()
        optimizer.step()
        optimizer.zero_grad()
    return apart(sharded, alone)


def left_over() -> None:
    """The last backward of a rank that still has batches does not train what an earlier one has accumulated."""
    sharded = shardgraph.compile(OneOfTwo(), "fsdp")
    for second in (False, True):
        sharded(torch.ones(2, 4), second=second).sum().backward()
    with sharded.join():
        if dist.get_rank() == 1:
            with sharded.no_sync():
                sharded(torch.ones(2, 4)).sum().backward()
            sharded(torch.ones(2, 4), second=True).sum().backward()


def refusals_of_join() -> dict[str, str]:
    """What ranks are told where ``join`` cannot be, or is asked to stop."""
    told = {}
    divided = shardgraph.compile(model(), "tp", example_inputs=(torch.ones(2, 6).double(),))
    told["tp"] = _told(lambda: divided.join().__enter__())[0]
    sharded = shardgraph.compile(model(), "fsdp")

    def stopped() -> None:
        with sharded.join(throw_on_early_termination=True):
            for step in range(_steps()):
                sharded(batches(step, (4, 3))[dist.get_rank()][0]).sum().backward()

    def never_called() -> None:
        fresh = shardgraph.compile(model(), "fsdp")
        with fresh.join():
            for _ in range(dist.get_rank()):
                fresh(torch.ones(2, 6).double()).sum().backward()

    def never_stepped() -> None:
        fresh = shardgraph.compile(model(), "fsdp")
        first, second = (torch.optim.SGD(fresh.parameters(), lr=0.1) for _ in range(2))
        fresh(torch.ones(2, 6).double()).sum().backward()
        with fresh.join():
            for _ in range(dist.get_rank()):
                fresh(torch.ones(2, 6).double()).sum().backward()
                first.step(), second.step()

    def as_written() -> None:
        with sharded.join():
            sharded[0](torch.ones(2, 6).double())

    def twice() -> None:
        with sharded.join(), sharded.join():
            pass

    for name, call in (
        ("twice", twice),
        ("stopped", stopped),
        ("never called", never_called),
        ("never stepped", never_stepped),
        ("as written", as_written),
    ):
        try:
            call()
        except (RuntimeError, ShardGraphError) as error:
            told[name] = str(error)
    return told
