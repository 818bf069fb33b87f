"""``shardgraph flight``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from shardgraph.cli.options import Json
from shardgraph.cli.output import result
from shardgraph.errors import ShardGraphError, one_line


def flight(
    file: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A flight record.", show_default=False)],
    last: Annotated[int, typer.Option(min=0, help="Collectives of each rank to show.")] = 5,
    as_json: Json = False,
) -> None:
    """Say which rank was late or did something else, from the last collectives of all ranks.

    The file is written after a failure, and the error names it; or by shardgraph.flight_record(FILE) on all ranks.
    """
    from shardgraph.runtime.watch.compared import findings, table

    try:
        record = json.loads(file.read_text())
        ranks = {int(rank): records for rank, records in record["ranks"].items()}
        found, rows = findings(ranks), table(ranks, last)
    except Exception as error:  # of any kind: the file may have anything in it
        told = one_line(f"{type(error).__name__}: {error}", 200)
        raise ShardGraphError(f"{file} is no flight record, as shardgraph.flight_record writes: {told}") from error
    widths = [max(map(len, column)) for column in zip(("rank", "", "", "", ""), *rows, strict=True)]
    header = ("rank", "start", "place", "collective", "took")
    lines = [f"Failure: {record['failure']}"] if record.get("failure") else []
    lines += [*found, ""]
    for row in [header, *rows] if rows else []:
        lines.append("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())
    result("\n".join(lines).rstrip(), {"failure": record.get("failure"), "findings": found, "ranks": ranks}, as_json)
