"""``shardgraph emit``."""

from __future__ import annotations

from typing import Annotated

import typer

import shardgraph
from shardgraph.cli.options import (
    Batch,
    ClusterName,
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
    folder_to_write,
    mesh_of,
)
from shardgraph.cli.output import result, working


def emit(
    model: Model,
    out: Annotated[
        str, typer.Option("--out", "-o", callback=folder_to_write, help="The folder to write to.")
    ] = "program",
    plan: PlanName = "fsdp",
    mesh: Mesh = None,
    cluster: ClusterName = None,
    batch: Batch = None,
    sequence: Sequence = None,
    settings: Settings = None,
    precision: Precision = None,
    recompute: Recompute = None,
    memory: Memory = None,
    loss_chunk: LossChunk = None,
    offload: Offload = None,
    scheduled: Annotated[
        bool, typer.Option("--scheduled", help="Write operations in the order in which the compiled module runs them.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Write the program of a model under a plan as plain PyTorch, which trains without shardgraph.

    The model has random weights, which are written beside the program. If it returns no loss, the program has a
    function `criterion` for it.
    """
    axes = mesh_of(mesh)
    with working(f"write {model} under {plan}"):
        from shardgraph.cli.model import job_of

        job = job_of(model, batch, sequence, settings, weights=True)
        files = shardgraph.emit(
            job.module,
            out,
            plan,
            **job.call,
            mesh=axes,
            cluster=cluster,
            precision=precision,
            recompute=recompute,
            memory=memory,
            loss_chunk=loss_chunk,
            offload=offload,
            scheduled=scheduled,
        )
    program = next(file for file in files if file.name == "program.py")
    lines = program.read_text(encoding="utf-8").splitlines()
    command = next(line.strip() for line in lines if line.strip().endswith("program.py"))
    loss = "program" if not any(line.startswith("def criterion(") for line in lines) else "criterion"
    text = f"Wrote {', '.join(file.name for file in files)} to {out}. Train there with: {command}"
    if loss == "criterion":
        text += "\nThe model returns no loss: put that of your training loop in the function criterion of program.py."
    result(text, {"wrote": [str(file) for file in files], "command": command, "loss": loss}, as_json)
