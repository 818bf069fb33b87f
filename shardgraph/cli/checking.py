"""``shardgraph verify``."""

from __future__ import annotations

import math
from typing import Annotated

import typer

import shardgraph
from shardgraph.cli.options import (
    ClusterName,
    GlobalBatch,
    Json,
    LossChunk,
    Memory,
    Mesh,
    Model,
    Offload,
    PlanName,
    Precision,
    Recompute,
    Sequence,
    Settings,
    mesh_of,
)
from shardgraph.cli.output import result, working


def verify(
    model: Model,
    plan: PlanName = "fsdp",
    mesh: Mesh = None,
    ranks: Annotated[
        int | None,
        typer.Option(min=1, help="Number of ranks.", show_default="2, or those of the mesh or plan"),
    ] = None,
    cluster: ClusterName = None,
    batch: Annotated[
        int | None,
        typer.Option(min=1, help="Samples of a transformers model, over all ranks.", show_default="one per rank"),
    ] = None,
    sequence: Sequence = None,
    settings: Settings = None,
    global_batch: GlobalBatch = None,
    precision: Precision = None,
    steps: Annotated[int, typer.Option(min=1, help="Training steps to compare.")] = 1,
    fp64: Annotated[bool, typer.Option("--fp64", help="Compute in double precision from the start.")] = False,
    recompute: Recompute = None,
    memory: Memory = None,
    loss_chunk: LossChunk = None,
    offload: Offload = None,
    as_json: Json = False,
) -> None:
    """Train a model and its program under a plan, all ranks in one process; exits with 1 if they differ.

    The model has random weights, and has to fit in memory twice.
    """
    axes = mesh_of(mesh)
    count = ranks or (math.prod(axes.values()) if axes else 2)
    with working(f"verify {model} under {plan}"):
        from shardgraph.cli.model import is_function, job_of

        job = job_of(model, batch if batch or is_function(model) else count, sequence, settings, weights=True)
        report = shardgraph.verify(
            job.module,
            plan=plan,
            **job.call,
            world_size=ranks,
            mesh=axes,
            cluster=cluster,
            global_batch=global_batch,
            precision=precision,
            steps=steps,
            fp64=fp64,
            recompute=recompute,
            memory=memory,
            loss_chunk=loss_chunk,
            offload=offload,
        )
    data = {
        "ok": report.ok,
        "plan": report.plan.name,
        "mesh": dict(report.plan.whole_mesh),
        "worst": report.worst,
        "tolerance": report.tolerance,
        "steps": report.steps,
        "batch": report.batch,
        "share": report.coverage.share,
        "proof": report.proof.summary,
        "first_divergence": report.first_divergence,
        "errors": report.errors,
    }
    result(report, data, as_json)
    if not report.ok:
        raise typer.Exit(1)
