"""``shardgraph calibrate``."""

from __future__ import annotations

from typing import Annotated

import typer

from shardgraph.cli.options import Json, file_to_write
from shardgraph.cli.output import result


def calibrate(
    nproc: Annotated[
        int | None, typer.Option(min=1, help="Ranks that measure at once.", show_default="one per GPU, or 2 without")
    ] = None,
    seconds: Annotated[float, typer.Option(min=0.1, help="About how long to measure.")] = 40.0,
    out: Annotated[
        str, typer.Option("--out", "-o", callback=file_to_write, help="The file to write.")
    ] = "cluster.yaml",
    as_json: Json = False,
) -> None:
    """Measure how fast this machine computes and communicates, and write it to a cluster file.

    To measure the network between nodes as well, start it on all of them: torchrun ... -m shardgraph calibrate.
    """
    import torch.distributed as dist

    from shardgraph.calibration import fit, fit_table, measure

    measured = measure(nproc, seconds=seconds)
    if dist.is_initialized() and dist.get_rank() > 0:
        return
    cluster = fit(measured)
    cluster.save(out)
    wrote = f"Wrote {out}. Use it wherever a cluster is needed: cluster={out!r}, or --cluster {out}"
    result(f"{fit_table(measured, cluster)}\n\n{wrote}", {"wrote": out, "cluster": cluster}, as_json)
