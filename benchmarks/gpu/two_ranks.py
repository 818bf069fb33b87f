"""Two ranks that share one GPU: training and attention round a ring must equal one process with the whole batch.

NCCL has one rank for a GPU, so they communicate by gloo. Gloo's all-gather of several tensors, which functional
collectives call, has no code for CUDA tensors (``ProcessGroupGloo::allgather_coalesced`` gives their addresses to code
of the CPU); what it does with each collective is recorded. Training then copies tensors through host memory.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard

import shardgraph
from benchmarks.gpu import models
from benchmarks.gpu.cases import Cases, Machine, check
from benchmarks.gpu.training import differences, train, weights

TOLERANCE = 1e-4
STAGED = ("all_gather_into_tensor", "reduce_scatter_tensor", "all_reduce", "all_to_all_single")
COLLECTIVES: dict[str, tuple[Placement, Placement]] = {
    "all_gather": (Shard(0), Replicate()),
    "reduce_scatter": (Partial(), Shard(0)),
    "all_reduce": (Partial(), Replicate()),
    "all_to_all": (Shard(0), Shard(1)),
}


def two_ranks(cases: Cases, machine: Machine) -> None:
    """Plans over collectives that go through host memory, and collectives of gloo as they are."""
    plans = [(name, plan_against_one_process, (name, machine)) for name in ("ddp", "zero2", "fsdp", "tp")]
    report(cases, launched(machine, plans))
    plain = [(name, collective, (name, machine)) for name in COLLECTIVES]
    for name, answer in launched(machine, plain):
        with cases.case(f"gloo alone: {name}") as figures:
            figures["result"] = answer if isinstance(answer, str) else "right" if all(answer) else "wrong values"
            cases.say(f"gloo alone, {name} of {machine.kind} tensors: {figures['result'].strip().splitlines()[-1]}")


def context_parallel(cases: Cases, machine: Machine) -> None:
    """Attention round a ring: verified in one process where that takes this device, and on two ranks that share it."""
    with cases.case("verify on this device") as figures:
        model, call = models.seeded(models.small_llama(machine.tiny, batch=2))
        try:
            told = shardgraph.verify(
                model.to(machine.device), plan="cp", mesh={"cp": 2}, example_kwargs=models.on(call, machine.device)
            )
            figures["result"] = str(told)
        except Exception as error:  # verify is documented for the CPU: what it says of a GPU is the figure
            figures["result"] = f"refused: {type(error).__name__}: {error}"
        cases.say(f"verify, plan cp, model on {machine.kind}: {figures['result'].strip().splitlines()[0][:200]}")
    report(cases, launched(machine, [("cp", plan_against_one_process, ("cp", machine))]))


def launched(machine: Machine, jobs: list[tuple[str, Callable[..., Any], tuple]]) -> list[tuple[str, Any]]:
    """What two ranks return of each job, or the text of its failure; on a GPU machine all jobs at once."""

    def run(job: tuple[str, Callable[..., Any], tuple]) -> tuple[str, Any]:
        name, function, arguments = job
        try:
            return name, shardgraph.launch(function, 2, args=arguments, timeout=80)
        except shardgraph.LaunchError as error:
            return name, str(error)

    with ThreadPoolExecutor(max_workers=4 if machine.kind == "cuda" else 1) as pool:
        return list(pool.map(run, jobs))


def report(cases: Cases, answers: list[tuple[str, Any]]) -> None:
    for plan, answer in answers:
        with cases.case(f"{plan}, through host memory") as figures:
            check(not isinstance(answer, str), str(answer))
            figures |= answer[0]
            cases.say(
                f"{plan:<6} on {figures['device']}: losses within {figures['loss_error']:.1e}, weights within "
                f"{figures['weight_error']:.1e} ({figures['worst_weight']})"
            )
            worst = max(figures["loss_error"], figures["weight_error"])
            check(worst <= TOLERANCE, f"differs from training in one process by {worst:.1e}")


# -- in the ranks ------------------------------------------------------------------------------------------


def shared_mesh(machine: Machine, axis: str) -> DeviceMesh:
    """Both ranks along ``axis``, on the same device, by gloo."""
    machine.prepare()
    if machine.kind == "cuda":
        os.environ["LOCAL_RANK"] = "0"  # as if each had a machine of its own
        torch.cuda.init()
    return init_device_mesh(machine.kind, (2,), mesh_dim_names=(axis,), backend_override={axis: "gloo"})


def collective(name: str, machine: Machine) -> bool:
    """Whether one collective over gloo gives the right values."""
    mesh, (before, after) = shared_mesh(machine, "dp"), COLLECTIVES[name]
    whole = torch.arange(16.0, device=machine.device).reshape(4, 4)
    if isinstance(before, Partial):
        local = whole * (dist.get_rank() + 1) / 3
    else:
        local = whole.chunk(2)[dist.get_rank()].contiguous()
    got = DTensor.from_local(local, mesh, [before]).redistribute(placements=[after]).to_local()
    wanted = whole if isinstance(after, Replicate) else whole.chunk(2, after.dim)[dist.get_rank()]
    return torch.allclose(got.clone(), wanted)


def through_host_memory() -> torch.library.Library:
    """Functional collectives of CUDA tensors by way of host memory, for as long as what is returned lives."""
    library = torch.library.Library("_c10d_functional", "IMPL")
    for name in STAGED:
        library.impl(name, staged(getattr(torch.ops._c10d_functional, name).default), "CUDA")
    return library


def staged(op: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """``op`` of a copy on the CPU, and its result on the device of the tensor that was given."""

    def run(tensor: torch.Tensor, *arguments: Any) -> torch.Tensor:
        made = op(tensor.contiguous().to("cpu", copy=True), *arguments)
        return torch.ops._c10d_functional.wait_tensor(made).to(tensor.device)

    return run


def plan_against_one_process(plan: str, machine: Machine) -> dict[str, Any]:
    """How two ranks under ``plan`` differ from one process that trains on the whole batch."""
    axis = plan if plan in ("tp", "cp") else "dp"
    mesh = shared_mesh(machine, axis)
    library = through_host_memory() if machine.kind == "cuda" else None
    original, whole = models.seeded(models.small_llama(machine.tiny))
    eager: nn.Module = models.seeded(models.small_llama(machine.tiny))[0].to(machine.device)
    losses = train(eager, models.on(whole, machine.device), 3)
    cut = {name: value.chunk(2)[dist.get_rank()] if axis == "dp" else value for name, value in whole.items()}
    sharded = shardgraph.compile(original, plan=plan, mesh=mesh, example_kwargs=cut, timeout=60)
    ours = torch.stack(train(sharded, models.on(cut, machine.device), 3)).cpu()
    dist.all_reduce(ours)  # data-parallel ranks have the loss of their own part, others that of the whole
    found = differences(losses, weights(eager), list(ours / 2), weights(sharded))
    del library
    return found | {"device": next(sharded.parameters()).device.type}
