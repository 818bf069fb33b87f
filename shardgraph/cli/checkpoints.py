"""``shardgraph checkpoint``."""

from __future__ import annotations

from typing import Annotated

import typer

from shardgraph.cli.options import Json
from shardgraph.cli.output import result, working


def checkpoint(
    path: Annotated[str, typer.Argument(help="The folder of a job's checkpoints, or one checkpoint.")],
    verify: Annotated[bool, typer.Option("--verify", help="Read everything, and compare checksums.")] = False,
    as_json: Json = False,
) -> None:
    """List the checkpoints of a job, the newest last; exits with 1 if one is damaged.

    Without --verify, files are looked for, and their sizes.
    """
    with working(f"read {path}" if verify else f"look at {path}"):
        from shardgraph.saves.listing import listed

        entries = listed(path, verify)
    lines = [str(entry) for entry in entries] or ["no checkpoints"]
    result("\n".join(lines), {"checkpoints": [vars(entry) for entry in entries]}, as_json)
    if any(entry.damage for entry in entries):
        raise typer.Exit(1)
