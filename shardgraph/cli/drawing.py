"""``shardgraph visualize`` and ``report``."""

from __future__ import annotations

from typing import Annotated

import typer

import shardgraph
from shardgraph.cli.options import (
    Backend,
    Batch,
    ClusterName,
    Json,
    Mesh,
    Model,
    Optimizer,
    PlanName,
    Precision,
    Recompute,
    Sequence,
    Settings,
    file_to_write,
    picture_to_write,
)
from shardgraph.cli.output import result, working
from shardgraph.cli.pricing import priced
from shardgraph.errors import ShardGraphError


def visualize(
    model: Model,
    out: Annotated[
        str,
        typer.Option(
            "--out", "-o", callback=picture_to_write, help="The picture to write: .svg, .html, .png, .pdf, .dot or .gv."
        ),
    ],
    plan: PlanName = "fsdp",
    mesh: Mesh = None,
    cluster: ClusterName = None,
    batch: Batch = None,
    sequence: Sequence = None,
    settings: Settings = None,
    precision: Precision = None,
    optimizer: Optimizer = "adamw",
    backend: Backend = "eager",
    recompute: Recompute = None,
    as_json: Json = False,
) -> None:
    """Draw a plan applied to a model, and the memory of a rank over a step."""
    sizes = {"batch": batch, "sequence": sequence, "settings": settings}
    options = {"precision": precision, "optimizer": optimizer, "backend": backend, "recompute": recompute}
    _, analysis = priced(f"analyze {model} under {plan}", model, plan, mesh, cluster, sizes, **options)
    with working(f"draw {model} under {plan}"):
        shardgraph.visualize(analysis, out)
    result(f"Wrote {out}", {"wrote": out}, as_json)


def report(
    model: Model,
    out: Annotated[
        str, typer.Option("--out", "-o", callback=file_to_write, help="The page to write: .html.")
    ] = "report.html",
    plan: PlanName = "fsdp",
    mesh: Mesh = None,
    cluster: ClusterName = None,
    batch: Batch = None,
    sequence: Sequence = None,
    settings: Settings = None,
    precision: Precision = None,
    optimizer: Optimizer = "adamw",
    backend: Backend = "eager",
    recompute: Recompute = None,
    as_json: Json = False,
) -> None:
    """Write a self-contained page about a plan: figures, modules, pictures, streams, alternatives."""
    if not out.lower().endswith(".html"):
        raise ShardGraphError(f"a report is a page, {out!r} does not end in .html: `visualize` writes other pictures")
    visualize(
        model, out, plan, mesh, cluster, batch, sequence, settings, precision, optimizer, backend, recompute, as_json
    )
