"""``shardgraph plan``, ``explain``, ``front`` and ``what-if``."""

from __future__ import annotations

from typing import Annotated, Any

import typer
import yaml

import shardgraph
from shardgraph.cli.options import (
    Backend,
    Batch,
    ClusterName,
    Devices,
    GlobalBatch,
    Json,
    LossChunk,
    Memory,
    Mesh,
    Model,
    Offload,
    Optimizer,
    Precision,
    Recompute,
    Seconds,
    Sequence,
    Settings,
    file_to_write,
    mesh_of,
    picture_to_write,
)
from shardgraph.cli.output import result, working

PlanFile = Annotated[str, typer.Argument(metavar="PLAN", help="A plan file.", show_default=False)]


def plan(
    model: Model,
    cluster: ClusterName = None,
    devices: Devices = None,
    mesh: Mesh = None,
    memory: Memory = None,
    global_batch: GlobalBatch = None,
    batch: Batch = None,
    sequence: Sequence = None,
    settings: Settings = None,
    optimizer: Optimizer = "adamw",
    precision: Precision = None,
    backend: Backend = "eager",
    recompute: Recompute = None,
    loss_chunk: LossChunk = None,
    offload: Offload = None,
    seconds: Seconds = None,
    out: Annotated[
        str | None, typer.Option("--out", "-o", callback=file_to_write, help="A file to write the plan to.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Find the fastest plan that fits, for devices that you need not have, and explain the choice."""
    job = _built(model, batch, sequence, settings)
    found = shardgraph.plan(
        job.module,
        **job.call,
        cluster=cluster,
        devices=devices,
        mesh=mesh_of(mesh),
        memory=memory,
        global_batch=global_batch,
        optimizer=optimizer,
        precision=precision,
        backend=backend,
        recompute=recompute,
        loss_chunk=loss_chunk,
        offload=offload,
        seconds=seconds,
    )
    if out is not None:
        found.save(out)
    wrote = f"\n\nWrote {out}: shardgraph.compile(model, {out!r}) on {found.world_size} ranks" if out else ""
    result(f"{_text(found)}{wrote}", _explained(found) | {"wrote": out}, as_json)


def explain(plan: PlanFile, as_json: Json = False) -> None:
    """Show a plan file and why the plan was chosen."""
    with working("load"):
        from shardgraph.plans.plan import Plan

        loaded = Plan.load(plan)
    result(_text(loaded), _explained(loaded), as_json)


def front(
    model: Model,
    devices: Annotated[
        str, typer.Option(metavar="N,N,...", help="The numbers of devices to compare, such as 8,16,32.")
    ],
    cluster: ClusterName = None,
    memory: Memory = None,
    global_batch: GlobalBatch = None,
    batch: Batch = None,
    sequence: Sequence = None,
    settings: Settings = None,
    optimizer: Optimizer = "adamw",
    precision: Precision = None,
    backend: Backend = "eager",
    seconds: Seconds = None,
    out: Annotated[
        str | None,
        typer.Option("--out", "-o", callback=picture_to_write, help="A picture to draw, such as front.svg or .html."),
    ] = None,
    as_json: Json = False,
) -> None:
    """Show the plans that no other plan beats in devices, memory and time."""
    counts = _counts(devices)
    job = _built(model, batch, sequence, settings)
    found = shardgraph.front(
        job.module,
        devices=counts,
        **job.call,
        cluster=cluster,
        memory=memory,
        global_batch=global_batch,
        optimizer=optimizer,
        precision=precision,
        backend=backend,
        seconds=seconds,
    )
    if out is not None:
        shardgraph.visualize(found, out)
    points = [
        {
            "devices": each.devices,
            "plan": each.name,
            "mesh": dict(each.mesh),
            "memory": each.memory,
            "step": each.seconds,
            "per_sample": each.per_sample,
            "fits": each.fits,
        }
        for each in found.points
    ]
    data = {"cluster": found.cluster, "budget": found.budget, "points": points, "remarks": found.remarks, "wrote": out}
    result(f"{found}\n\nWrote {out}" if out else found, data, as_json)


def what_if(
    plan: PlanFile,
    model: Annotated[str, typer.Option("--model", help="The model of the plan, as for analyze.", show_default=False)],
    sequence: Annotated[int | None, typer.Option(min=1, help="If sequences had this length.")] = None,
    global_batch: Annotated[int | None, typer.Option(min=1, help="If steps had this many samples.")] = None,
    devices: Annotated[int | None, typer.Option(min=1, help="If there were this many devices.")] = None,
    on: Annotated[str | None, typer.Option(help="If it ran on this cluster.")] = None,
    network: Annotated[float | None, typer.Option(help="If the network had this many times the bandwidth.")] = None,
    cluster: ClusterName = None,
    memory: Memory = None,
    batch: Batch = None,
    length: Annotated[int | None, typer.Option(min=1, help="The present length of sequences.")] = None,
    settings: Settings = None,
    optimizer: Optimizer = "adamw",
    backend: Backend = "eager",
    seconds: Seconds = None,
    as_json: Json = False,
) -> None:
    """Show what a plan costs under other conditions, and which would be best then; exits with 1 if it does not fit."""
    job = _built(model, batch, length, settings)
    answer = shardgraph.what_if(
        plan,
        job.module,
        **job.call,
        sequence=sequence,
        global_batch=global_batch,
        devices=devices,
        on=on,
        network=network,
        cluster=cluster,
        memory=memory,
        optimizer=optimizer,
        backend=backend,
        seconds=seconds,
    )
    costs = {name: getattr(answer, name) for name in ("now", "same", "best")}
    data: dict[str, Any] = {"conditions": answer.conditions, "fits": answer.fits, "why": answer.why}
    data |= {name: None if each is None else each.summary() for name, each in costs.items()}
    result(answer, data, as_json)
    if not answer.fits:
        raise typer.Exit(1)


def _built(model: str, batch: int | None, sequence: int | None, settings: list[str] | None) -> Any:
    """What is planned, as :func:`shardgraph.cli.model.job_of` makes it, with a line meanwhile."""
    with working(f"build {model}"):
        from shardgraph.cli.model import job_of

        return job_of(model, batch, sequence, settings)


def _counts(text: str) -> tuple[int, ...]:
    counts = text.split(",")
    if not all(each.strip().isdecimal() for each in counts):
        raise typer.BadParameter(f"{text!r} is not numbers of devices, such as 8,16,32", param_hint="--devices")
    return tuple(int(each) for each in counts)


def _text(plan: Any) -> str:
    """A plan and why it was chosen."""
    from shardgraph.plans.explanation import reasons

    return f"{plan}\n\n{reasons(plan.name, plan.considered, plan.remarks)}"


def _explained(plan: Any) -> dict[str, Any]:
    return {"plan": yaml.safe_load(plan.to_yaml()), "text": str(plan), "explanation": plan.explain()}
