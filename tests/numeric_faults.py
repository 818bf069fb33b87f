"""What runs on the ranks for :mod:`tests.test_numeric_faults`: steps that go wrong, and replicas that do."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph import Pipeline
from tests.ranks import whole


class Fragile(nn.Module):
    """Breaks where ``kind`` says, for rows below zero."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.up, self.positive, self.mid, self.down = nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.Linear(16, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.positive(self.up(x))
        mask = torch.full((16,), 0.0).masked_fill(torch.arange(16) > 7, -torch.inf)
        hidden = hidden + torch.softmax(self.mid(hidden) + mask, -1)  # infinities that do no harm
        if self.kind == "logarithm":
            return (self.down(hidden) * torch.log(x + 1)).square().mean()
        if self.kind == "overflow":
            return (self.down(hidden) * torch.exp(x * -400).sigmoid().sum()).mean() + torch.exp(x * -400).mean()
        if self.kind == "root":
            return self.down(hidden + torch.sqrt(self.mid(hidden).square() * torch.relu(x).sum(1, True))).mean()
        if self.kind == "masked away":
            gone = torch.where(x.mean(1, True) < 0, -torch.inf, 0.0)
            return self.down(torch.softmax(self.mid(hidden) + gone, -1)).square().mean()
        return self.down(hidden).square().mean()


def found(
    kind: str,
    plan: str,
    mesh: dict[str, int],
    bad: int | None = None,
    pipeline: Pipeline | None = None,
    microbatch: int = 1,
) -> tuple[Any, bool]:
    """What :func:`shardgraph.find_nonfinite` says, where the data rank ``bad`` has rows that break the model, in a
    pipeline of two microbatches the rows of this ``microbatch``; and whether all is as before."""
    torch.manual_seed(0)
    x = torch.rand(4, 8) + 0.1
    model = Fragile(kind)
    sharded = shardgraph.compile(model, plan, mesh=mesh, example_inputs=(x,), pipeline=pipeline)
    if bad is not None and sharded.plan.data_rank(dist.get_rank()) == bad:
        x[slice(None) if pipeline is None else slice(2 * microbatch, 2 * microbatch + 2)] *= -3
    if kind == "parameter" and dist.get_rank() == 1:
        with torch.no_grad():
            sharded.mid.weight.to_local()[0, 0] = torch.nan
    sharded.train_step(x)
    before, random = [each.grad.clone() for each in sharded.parameters()], torch.get_rng_state()
    result = shardgraph.find_nonfinite(sharded, x)
    after = [each.grad for each in sharded.parameters()]
    same = all(torch.equal(whole(a).nan_to_num(), whole(b).nan_to_num()) for a, b in zip(before, after, strict=True))
    return result, same and torch.equal(random, torch.get_rng_state())


def compared(plan: str, mesh: dict[str, int], where: str, wrong_rank: int | None) -> Any:
    """What :func:`shardgraph.check_replicas` says after a bit of one rank's ``where`` was flipped."""
    torch.manual_seed(0)
    x = torch.rand(4, 8)
    options = {"pipeline": shardgraph.Pipeline(microbatches=2)} if plan.startswith("pp") else {}
    sharded = shardgraph.compile(Fragile("nothing"), plan, mesh=mesh, example_inputs=(x,), **options)
    optimizer = torch.optim.AdamW(sharded.parameters())
    sharded.train_step(x)
    optimizer.step()
    parameter = dict(sharded.named_parameters()).get("mid.bias")
    if dist.get_rank() == wrong_rank and parameter is not None:
        tensors = {"parameter": parameter, "gradient": parameter.grad, "state": optimizer.state[parameter]["exp_avg"]}
        local = tensors[where].detach()
        local = local.to_local() if hasattr(local, "to_local") else local
        local.view(torch.int32)[-1] ^= 1  # the last bit of one number
    try:
        return str(shardgraph.check_replicas(sharded, optimizer))
    except shardgraph.ReplicaError as error:
        return str(error)


def watched(plan: str, mesh: dict[str, int], every: int) -> int | None:
    """The training call at which a difference that is there from call 3 on is told."""
    torch.manual_seed(0)
    x = torch.rand(4, 8)
    sharded = shardgraph.compile(Fragile("nothing"), plan, mesh=mesh)
    optimizer = torch.optim.SGD(sharded.parameters(), lr=0.1)
    shardgraph.check_replicas(sharded, every=every)
    for call in range(1, 10):
        try:
            sharded.step(x, optimizer=optimizer)
        except shardgraph.ReplicaError:
            return call
        if call == 2 and dist.get_rank() == 1:
            with torch.no_grad():
                whole(sharded.mid.bias)[0] += 1e-3
    return None
