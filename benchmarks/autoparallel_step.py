"""A training step of autoparallel's program beside FSDP2, shardgraph and one rank, in the rounds of ``train_step.py``.

    pip install git+https://github.com/meta-pytorch/autoparallel   # beside shardgraph, in an environment of its own
    python benchmarks/autoparallel_step.py

It plans for GPUs alone: on CPU ranks it is told that they are H100, and attention is traced as products and a softmax,
since it has no price for the kernel of CPUs. Its parameters are asked to be sharded over the ranks, as fsdp has them.
The models, batches, losses and optimizer are those of ``train_step.py``; its module computes the scores, and the loss
is taken from those of the rank's own rows. Its program runs op by op, as the module that it returns does by itself: its
backend for ``torch.compile``, which schedules collectives, asks for the bandwidth of a GPU and ends here without one.
"""

from __future__ import annotations

import argparse
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

sys.path.insert(0, str(Path(__file__).parents[1]))

from benchmarks.train_step import Contender, beside, build_model
from benchmarks.training_jobs import JOBS

CONTENDERS = ["autoparallel", "shardgraph fsdp of 8", "FSDP2", "DDP", "one rank"]


class Scores(nn.Module):
    """What a language model predicts, as one tensor."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.model(input_ids=ids).logits
        return scores


class Planned(Contender):
    """A model whose shards autoparallel has placed."""

    def __init__(self, name: str, options: argparse.Namespace, device: torch.device) -> None:
        from autoparallel.api import AutoParallel

        self.name, self.options, self.device, self.whole = name, options, device, False
        self.times, self.losses = [], []
        self.language = JOBS[options.job].loss_fn is None
        rows = self.batch(0)
        world = dist.get_world_size()

        def batch() -> torch.Tensor:
            whole = torch.zeros((len(rows) * world, *rows.shape[1:]), dtype=rows.dtype)
            return whole.to(device)

        torch.cpu.get_device_name = lambda device=None: "H100"
        started = time.perf_counter()
        mesh = init_device_mesh(device.type, (world,), mesh_dim_names=("dp",))
        with torch.device("meta"):
            meta = self._wrapped(build_model(options))
        with sdpa_kernel(SDPBackend.MATH), AutoParallel(meta, batch, mesh, cost_model=None) as planner:
            planner.add_input_constraints([(Shard(0),)])
            planner.add_output_constraints([(Shard(0),)])
            planner.add_parameter_memory_constraint()
            self.model = planner.apply_placement(planner.optimize_placement())
        self.model.to_empty(device=device.type)
        source = self._wrapped(build_model(options)).to(device)
        given = dict(source.named_parameters()) | dict(source.named_buffers())
        with torch.no_grad():
            for key, stored in (*self.model.named_parameters(), *self.model.named_buffers()):
                shard = distribute_tensor(given[key].detach(), mesh, stored.placements)
                stored.to_local().copy_(shard.to_local())
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=1e-3)
        self.loss(0).backward()
        self.optimizer.zero_grad()
        self.first_call = time.perf_counter() - started

    def _wrapped(self, model: nn.Module) -> nn.Module:
        return Scores(model) if self.language else model

    def loss(self, step: int) -> torch.Tensor:
        rows = self.batch(step)
        if not self.language:
            return JOBS[self.options.job].loss(self.model, rows)
        return F.cross_entropy(self.model(rows)[:, :-1].flatten(0, 1), rows[:, 1:].flatten())

    def step(self, number: int) -> None:
        started = time.perf_counter()
        loss = self.loss(number)
        (loss / dist.get_world_size()).backward()  # its gradients are sums over ranks
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.times.append(time.perf_counter() - started)
        self.losses.append(loss.item())


if __name__ == "__main__":
    beside("autoparallel", Planned, "autoparallel", CONTENDERS, __doc__)
