"""``shardgraph lint``."""

from __future__ import annotations

from dataclasses import asdict

import typer

import shardgraph
from shardgraph.cli.options import (
    Batch,
    ClusterName,
    Json,
    Mesh,
    Model,
    PlanName,
    Precision,
    Sequence,
    Settings,
    mesh_of,
)
from shardgraph.cli.output import result, working


def lint(
    model: Model,
    plan: PlanName = "fsdp",
    mesh: Mesh = None,
    cluster: ClusterName = None,
    batch: Batch = None,
    sequence: Sequence = None,
    settings: Settings = None,
    precision: Precision = None,
    as_json: Json = False,
) -> None:
    """Find what would train differently than on one device, or wastes time; exits with 1 on a warning."""
    axes = mesh_of(mesh)
    with working(f"look at {model} under {plan}"):
        from shardgraph.cli.model import job_of

        job = job_of(model, batch, sequence, settings)
        found = shardgraph.lint(job.module, plan=plan, **job.call, mesh=axes, cluster=cluster, precision=precision)
    result(found, {"findings": [asdict(each) for each in found]}, as_json)
    if found.warnings:
        raise typer.Exit(1)
