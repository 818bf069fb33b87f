"""Models whose embeddings shorten rows of their weight (``max_norm``), and what runs of them on each rank."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph import Pipeline
from tests.ranks import difference, part, whole

ROWS, WIDTH = 21, 6


class Words(nn.Module):
    """Words looked up in a table, one by one or in bags, and scored; with ``tied``, by the table itself."""

    def __init__(self, kind: type[nn.Module] = nn.Embedding, tied: bool = False, **options: Any) -> None:
        super().__init__()
        self.embed = kind(ROWS, WIDTH, **{"max_norm": 1.5, **options})
        self.layers = nn.Sequential(nn.Linear(WIDTH, 8), nn.Tanh(), nn.Linear(8, WIDTH))
        self.head = nn.Linear(WIDTH, ROWS, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, words: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.head(self.layers(self.embed(words))).square().mean()}


MODELS: dict[str, tuple[type[nn.Module], dict[str, Any]]] = {
    "one by one": (nn.Embedding, {}),
    "bags": (nn.EmbeddingBag, {"mode": "mean"}),
    "tied": (nn.Embedding, {"tied": True}),
    "sums of sizes": (nn.Embedding, {"norm_type": 1.0, "max_norm": 3.0}),
    "largest sizes": (nn.Embedding, {"norm_type": float("inf"), "max_norm": 0.5}),
}


def make(name: str) -> Words:
    """A model in double precision, always with the same values."""
    torch.manual_seed(0)
    kind, options = MODELS[name]
    return Words(kind, **options).double()


def words(step: int) -> torch.Tensor:
    """The batch of all ranks: each of its quarters looks up rows that others do not, and rows that none does stay."""
    generator = torch.Generator().manual_seed(step)
    return torch.cat([torch.randint(4 * i, 4 * i + 6, (2, 3), generator=generator) % (ROWS - 3) for i in range(4)])


def compiled(model: nn.Module, plan: str, **options: Any) -> Any:
    mesh = {"dp": 2, "tp": 2} if plan == "fsdp+tp" else None
    if plan == "pp":
        options |= {"pipeline": Pipeline(2)}
    if plan in ("pp", "fsdp+tp", "tp"):
        options |= {"example_inputs": (words(0)[:4] if plan == "fsdp+tp" else words(0),)}
    return shardgraph.compile(copy.deepcopy(model), plan, mesh=mesh, progress=False, **options)


def trained(plan: str, name: str, steps: int = 4) -> dict[str, float]:
    """The largest differences from the model that trains alone on the whole batch: of weights after a forward, of
    losses, gradients, and weights after steps and after a forward in eval mode."""
    original = make(name)
    sharded = compiled(original, plan)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (original, sharded)]
    worst = dict.fromkeys(("shortened", "loss", "gradient", "weight", "evaluated"), 0.0)
    start = original.embed.weight.detach().clone()

    def note(what: str, error: float) -> None:
        worst[what] = max(worst[what], error)

    for step in range(steps):
        loss = original(words(step))["loss"]
        loss.backward()
        if plan == "pp":
            mine = sharded.train_step(words(step))
        else:
            mine = sharded(part(words(step), sharded.plan))["loss"]
            note("shortened", _difference(sharded, original, gradients=False))
            mine.backward()
            mine = mine.detach()
            dist.all_reduce(mine)
            mine /= dist.get_world_size()
        note("loss", (mine - loss.detach()).abs().item())
        note("gradient", _difference(sharded, original, gradients=True))
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        note("weight", _difference(sharded, original, gradients=False))
    assert not torch.equal(start[words(0)], original.embed.weight[words(0)])
    with torch.no_grad():
        original.eval()(words(steps) + 1)
        sharded.eval()(words(steps) + 1 if plan == "pp" else part(words(steps) + 1, sharded.plan))
    note("evaluated", _difference(sharded, original, gradients=False))
    return worst


def _difference(sharded: nn.Module, original: nn.Module, *, gradients: bool) -> float:
    """As :func:`tests.ranks.difference`, of the parameters that this rank has; a stage need not have all."""
    worst, theirs = 0.0, dict(original.named_parameters())
    for name, mine in sharded.named_parameters():
        one, other = (mine.grad, theirs[name].grad) if gradients else (mine.detach(), theirs[name].detach())
        worst = max(worst, (whole(one) - other).abs().max().item())
    return worst


def accumulated(plan: str) -> float:
    """The largest difference of a weight where each step adds up the gradients of two calls under ``no_sync``."""
    original = make("one by one")
    sharded = compiled(original, plan)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (original, sharded)]
    for step in range(3):
        for half in (0, 1):
            original(words(2 * step + half))["loss"].backward()
        mine = [part(words(2 * step + half), sharded.plan) for half in (0, 1)]
        with sharded.no_sync():
            sharded(mine[0])["loss"].backward()
        sharded(mine[1])["loss"].backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return difference(sharded, original, gradients=False)


def in_steps(plan: str) -> float:
    """The largest difference of a weight where the whole step is one call."""
    original = make("one by one")
    sharded = compiled(original, plan)
    optimizers = [torch.optim.AdamW(model.parameters(), lr=0.1) for model in (original, sharded)]
    for step in range(3):
        original(words(step))["loss"].backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        sharded.step(part(words(step), sharded.plan), optimizer=optimizers[1])
    return difference(sharded, original, gradients=False)


def beside_ranks_without_data(plan: str) -> float:
    """The largest difference of a weight where the first rank alone has batches at last, and evaluates more often."""
    original = make("one by one")
    sharded = compiled(original, plan)
    optimizers = [torch.optim.SGD(model.parameters(), lr=0.5) for model in (original, sharded)]
    counts = (4, 2)
    with sharded.join():
        for step in range(counts[dist.get_rank()]):
            sharded.train()(part(words(step)))["loss"].backward()
            optimizers[1].step()
            optimizers[1].zero_grad()
            with torch.no_grad():
                sharded.eval()(part(words(step)) + 1)
    for step in range(max(counts)):
        present = [words(step).chunk(2)[rank] for rank in (0, 1) if step < counts[rank]]
        losses = [original(each)["loss"] for each in (torch.cat(present), *present)][1:]
        (torch.stack(losses).sum() / 2).backward()
        optimizers[0].step()
        optimizers[0].zero_grad()
        with torch.no_grad():
            original(torch.cat(present) + 1)
    return difference(sharded, original, gradients=False)


def in_half_precision() -> float:
    """How far a stored weight is from that of the model in single precision, of which a program in bfloat16 looks up
    rows."""
    original = make("one by one").float()
    sharded = compiled(original, "fsdp", precision="bf16")
    original(words(0))
    sharded(part(words(0), sharded.plan))
    return (whole(sharded.embed.weight.detach()) - original.embed.weight).abs().max().item()
