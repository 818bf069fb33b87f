"""``shardgraph consolidate``."""

from __future__ import annotations

from typing import Annotated

import typer

from shardgraph.cli.options import Json, file_to_write
from shardgraph.cli.output import result, working


def consolidate(
    shards: Annotated[list[str], typer.Argument(help="A folder, or the files of all ranks in their order.")],
    out: Annotated[
        str, typer.Option("--out", "-o", callback=file_to_write, help="The file to write.")
    ] = "model.safetensors",
    entry: Annotated[str, typer.Option(help="The name of the model's state in them.", show_default="what fits")] = "",
    as_json: Json = False,
) -> None:
    """Make one safetensors file of the shards that ranks saved, also FairScale's."""
    with working("consolidate"):
        from shardgraph.offline import consolidate

        consolidate(shards[0] if len(shards) == 1 else shards, out, entry=entry)
    loaded = f"The original model loads it with safetensors.torch.load_model(model, {out!r})"
    result(f"Wrote {out}. {loaded}", {"wrote": out}, as_json)
