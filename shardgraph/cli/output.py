"""What a command shows: its result on standard output, and what it does meanwhile on standard error."""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import typer
from rich.console import Console
from rich.progress import Progress, SpinnerColumn, TextColumn, TimeElapsedColumn


def result(text: object, data: Mapping[str, Any], as_json: bool) -> None:
    """Print a result, for people as ``text`` or for programs."""
    typer.echo(json.dumps(_plain(data), indent=1) if as_json else str(text))


@contextmanager
def working(what: str) -> Iterator[None]:
    """A line that says what is done, and for how long, while it is; on a terminal only.

    Not around what shows its own line.
    """
    console = Console(stderr=True)
    columns = (SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        progress.add_task(what)
        yield


def _plain(value: Any) -> Any:
    """The value as JSON can have it: what is not finite as null, and what JSON does not know as text."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name)) for field in dataclasses.fields(value)}
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)
