"""``shardgraph analyze`` and ``compare``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any

import typer

import shardgraph
from shardgraph.cli.options import (
    Backend,
    Batch,
    ClusterName,
    GlobalBatch,
    Json,
    LossChunk,
    Memory,
    Mesh,
    Model,
    Offload,
    Optimizer,
    PlanName,
    Precision,
    Recompute,
    Sequence,
    Settings,
    mesh_of,
)
from shardgraph.cli.output import result, working

if TYPE_CHECKING:
    from shardgraph.cli.model import Job


def analyze(
    model: Model,
    plan: PlanName = "fsdp",
    mesh: Mesh = None,
    cluster: ClusterName = None,
    batch: Batch = None,
    sequence: Sequence = None,
    settings: Settings = None,
    global_batch: GlobalBatch = None,
    precision: Precision = None,
    optimizer: Optimizer = "adamw",
    backend: Backend = "eager",
    recompute: Recompute = None,
    memory: Memory = None,
    loss_chunk: LossChunk = None,
    offload: Offload = None,
    as_json: Json = False,
) -> None:
    """Predict the memory and time of a training step; exits with 1 if it does not fit."""
    sizes = {"batch": batch, "sequence": sequence, "settings": settings}
    options = {"precision": precision, "optimizer": optimizer, "backend": backend, "recompute": recompute}
    limits = {"memory": memory, "loss_chunk": loss_chunk, "offload": offload, "global_batch": global_batch}
    _, analysis = priced(f"analyze {model} under {plan}", model, plan, mesh, cluster, sizes, **options, **limits)
    result(analysis, analysis.summary(), as_json)
    if not analysis.fits:
        raise typer.Exit(1)


def compare(
    first: Annotated[str, typer.Argument(help="A plan's file, or its name, such as fsdp+tp.", show_default=False)],
    second: Annotated[str, typer.Argument(help="Another of the same job.", show_default=False)],
    model: Annotated[str, typer.Option("--model", help="The model of both, as for analyze.", show_default=False)],
    mesh: Mesh = None,
    cluster: ClusterName = None,
    batch: Batch = None,
    sequence: Sequence = None,
    settings: Settings = None,
    optimizer: Optimizer = "adamw",
    backend: Backend = "eager",
    as_json: Json = False,
) -> None:
    """Show what two plans decide differently, and what that costs or saves; the mesh is of plans given by name."""
    axes = mesh_of(mesh)
    with working(f"read {first}, {second} and {model}"):
        from shardgraph.cli.model import job_of
        from shardgraph.plans.resolve import named_or_loaded

        plans = named_or_loaded(first), named_or_loaded(second)
        job = job_of(model, batch, sequence, settings)
    _measure_machine(cluster)
    with working(f"compare {first} and {second}"):
        comparison = shardgraph.compare(
            *plans, model=job.module, **job.call, cluster=cluster, mesh=axes, optimizer=optimizer, backend=backend
        )
    data = {"decisions": comparison.decisions, "costs": comparison.parts, "ratio": comparison.ratio}
    result(comparison, data, as_json)


def priced(
    what: str, model: str, plan: str, mesh: str | None, cluster: str | None, sizes: Mapping[str, Any], **options: Any
) -> tuple[Job, Any]:
    """The job of a command line, whose ``sizes`` are those of :func:`job_of`, and its analysis; ``what`` is shown."""
    axes = mesh_of(mesh)
    with working(f"build {model}"):
        from shardgraph.cli.model import job_of

        job = job_of(model, **sizes)
    _measure_machine(cluster)
    with working(what):
        return job, shardgraph.analyze(job.module, plan=plan, **job.call, cluster=cluster, mesh=axes, **options)


def _measure_machine(cluster: str | None) -> None:
    """Have the prices of this machine, if they are needed: the first time they are measured, with a line of its own."""
    if cluster is None:
        with working("start"):
            from shardgraph.calibration import this_machine
        this_machine()
