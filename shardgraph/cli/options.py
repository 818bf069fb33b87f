"""Options that several commands have."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import typer
import yaml

from shardgraph.errors import PlanError, ShardGraphError


def _devices(incomplete: str) -> list[str]:
    from shardgraph.cost_models.cluster import known_devices

    return [name for name in known_devices() if name.startswith(incomplete)]


def _plans(incomplete: str) -> list[str]:
    names = ("auto", "single", "ddp", "zero1", "zero2", "fsdp", "hsdp", "tp", "tp+sp", "cp", "ep", "fsdp+tp", "pp")
    return [name for name in names if name.startswith(incomplete)]


Model = Annotated[
    str,
    typer.Argument(
        metavar="MODEL",
        help="package.module:function, which returns a module or (module, inputs, keyword inputs); or a model type of "
        "transformers, such as gpt2; or a config.json of one, or its folder.",
        show_default=False,
    ),
]
Batch = Annotated[int | None, typer.Option(min=1, help="Samples per call, of a transformers model.")]
Sequence = Annotated[
    int | None, typer.Option(min=1, help="Length of its sequences, likewise.", show_default="1024 or its longest")
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="A field of its config, such as num_hidden_layers=2."),
]
PlanName = Annotated[
    str, typer.Option("--plan", help="A plan's name, such as fsdp+tp, or its file.", autocompletion=_plans)
]
Mesh = Annotated[str | None, typer.Option(metavar="AXIS=SIZE,...", help="Ranks along each axis, outermost first.")]
ClusterName = Annotated[
    str | None,
    typer.Option(
        "--cluster",
        help="A device such as H100, or a cluster file.",
        autocompletion=_devices,
        show_default="this machine",
    ),
]
Memory = Annotated[str | None, typer.Option(help="Bytes that a rank may use, such as 80GiB.")]
Optimizer = Annotated[str, typer.Option(help="The optimizer whose state and update are counted.")]
Precision = Annotated[str | None, typer.Option(help="Compute in bf16, fp16 or fp8; weights stay in float32.")]
Backend = Annotated[str, typer.Option(help="eager, or inductor, which fuses operations.")]
Recompute = Annotated[str | None, typer.Option(help="What backward recomputes: none, selective or full.")]
LossChunk = Annotated[
    str | None, typer.Option(help="Compute the loss in chunks of logits of this size, such as 64MiB.")
]
Offload = Annotated[str | None, typer.Option(help="What is kept in host memory: parameters, activations or all.")]
GlobalBatch = Annotated[int | None, typer.Option(help="Samples per step, over all ranks.")]
Devices = Annotated[int | None, typer.Option(help="Number of ranks.", show_default="all of the cluster")]
Seconds = Annotated[float | None, typer.Option(help="A limit on the search.", show_default="none")]
Json = Annotated[bool, typer.Option("--json", help="Print the result as JSON.")]


def file_to_write(path: str | None) -> str | None:
    """The callback of an option that names a file to write: refuses what cannot be, before the work for it."""
    if path is not None and Path(path).is_dir():
        raise typer.BadParameter(f"{path!r} is a folder: name a file in it")
    if path is not None and not Path(path).parent.is_dir():
        raise typer.BadParameter(f"there is no folder {str(Path(path).parent)!r}: make it, or write elsewhere")
    if path is not None and not os.access(Path(path).parent, os.W_OK):
        raise typer.BadParameter(f"the folder {str(Path(path).parent)!r} may not be written to: write elsewhere")
    return path


def picture_to_write(path: str | None) -> str | None:
    """The same of a picture, whose suffix is that of a format."""
    if file_to_write(path) is not None:
        from shardgraph.pictures.picture import Picture

        Picture(path).format()
    return path


def folder_to_write(path: str) -> str:
    """The same of a folder, which is made."""
    there = next(each for each in (Path(path), *Path(path).absolute().parents) if each.exists())
    if not there.is_dir():
        raise typer.BadParameter(f"{str(there)!r} is a file: name a folder, which need not be there")
    if not os.access(there, os.W_OK):
        raise typer.BadParameter(f"the folder {str(there)!r} may not be written to: write elsewhere")
    return path


def mesh_of(text: str | None) -> dict[str, int] | None:
    """The sizes of ``"dp=4,tp=2"`` by axis.

    Raises:
        PlanError: it is not written so.
    """
    if text is None:
        return None
    pairs = [each.partition("=") for each in text.split(",")]
    sizes = {axis.strip(): size.strip() for axis, _, size in pairs}
    if len(sizes) < len(pairs) or not all(axis and size.isdecimal() and int(size) for axis, size in sizes.items()):
        raise PlanError(f"the mesh {text!r} has no sizes by axis: write the ranks along each, as in --mesh dp=4,tp=2")
    return {axis: int(size) for axis, size in sizes.items()}


def settings_of(texts: Iterable[str] | None) -> dict[str, Any]:
    """The values of ``["hidden_size=64"]`` by name, read as YAML.

    Raises:
        ShardGraphError: one is not written so.
    """
    values: dict[str, Any] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not name or not equals:
            raise ShardGraphError(f"--set {text} sets nothing: write a field of the config, as num_hidden_layers=2")
        try:
            values[name] = yaml.safe_load(value)
        except yaml.YAMLError as error:
            raise ShardGraphError(f"--set {text} has no value that could be read: {error}") from error
    return values
