"""The commands of ``shardgraph``, and how they end."""

from __future__ import annotations

import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

import shardgraph
from shardgraph.cli.checking import verify
from shardgraph.cli.checkpoints import checkpoint
from shardgraph.cli.demo import demo
from shardgraph.cli.doctor import doctor
from shardgraph.cli.drawing import report, visualize
from shardgraph.cli.emitting import emit
from shardgraph.cli.flight import flight
from shardgraph.cli.linting import lint
from shardgraph.cli.measuring import calibrate
from shardgraph.cli.planning import explain, front, plan, what_if
from shardgraph.cli.pricing import analyze, compare
from shardgraph.cli.running import run
from shardgraph.cli.tensors import consolidate
from shardgraph.errors import ShardGraphError


class _Commands(TyperGroup):
    """Commands that tell an error that is meant for users in its own words, and end quietly when interrupted."""

    def invoke(self, ctx: Any) -> Any:
        try:
            with warnings.catch_warnings():
                warnings.showwarning = _warn
                # Autograd shows a traceback beside any error amid a trace, and an interrupt too: the error says enough.
                warnings.filterwarnings("ignore", "Error detected in ")
                return super().invoke(ctx)
        except KeyboardInterrupt:
            raise typer.Exit(130) from None
        except BrokenPipeError:
            raise  # what reads the output has enough of it
        except (ShardGraphError, OSError) as error:
            if ctx.params.get("traceback"):
                traceback.print_exc()
            typer.secho(f"shardgraph: {error}", fg="red", err=True)
            raise typer.Exit(2) from error


def _warn(message: Warning | str, *_: Any, **__: Any) -> None:
    """A warning without the line of code that it is shown with elsewhere: nobody here wrote one."""
    typer.secho(f"shardgraph: {message}", fg="yellow", err=True)


app = typer.Typer(
    name="shardgraph",
    cls=_Commands,
    no_args_is_help=True,
    pretty_exceptions_enable=False,  # what is no error of a user is a fault, and its traceback is for a report
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"shardgraph {shardgraph.__version__}")
        raise typer.Exit


@app.callback()
def options(
    traceback: Annotated[bool, typer.Option("--traceback", help="Show where an error comes from.")] = False,
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """A compiler for distributed training with PyTorch.

    Exits with 0 if all is well, 1 if the answer is a bad one, 2 if the request is refused, 130 if interrupted.
    """


COMMANDS: tuple[Callable[..., None], ...] = (
    *(demo, doctor, plan, explain, front, what_if, analyze, compare, visualize, report, lint, verify, emit),
    *(calibrate, checkpoint, consolidate, flight),
)
for command in COMMANDS:
    app.command()(command)
# What is no option of `run` itself is the script's.
app.command(context_settings={"ignore_unknown_options": True})(run)


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    try:
        app(arguments if arguments is None else list(arguments), prog_name="shardgraph")
    except SystemExit as ended:
        return ended.code if isinstance(ended.code, int) else int(ended.code is not None)
    except KeyboardInterrupt:  # before a command began
        return 130
    return 0
