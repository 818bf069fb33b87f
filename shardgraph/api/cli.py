"""The command ``shardgraph``.

A command is a function that adds its options to a parser and returns the function that runs it, and an entry in
``COMMANDS``.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence

from shardgraph.errors import ShardGraphError

Run = Callable[[argparse.Namespace], None]


def calibrate(parser: argparse.ArgumentParser) -> Run:
    """Measure how fast this machine computes and communicates, and write it to a cluster file."""
    parser.add_argument("--nproc", type=int, help="ranks that measure at once (default: one per GPU, or 2 without)")
    parser.add_argument("--out", default="cluster.yaml", help="the file to write (default: %(default)s)")
    parser.add_argument("--seconds", type=float, default=40.0, help="about how long to measure (default: %(default)g)")

    def run(options: argparse.Namespace) -> None:
        from shardgraph.calibration import fit, fit_table, measure

        measured = measure(options.nproc, seconds=options.seconds)
        cluster = fit(measured)
        cluster.save(options.out)
        print(fit_table(measured, cluster))
        print(f"\nWrote {options.out}. Use it wherever a cluster is needed: cluster={options.out!r}")

    return run


COMMANDS: dict[str, Callable[[argparse.ArgumentParser], Run]] = {"calibrate": calibrate}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="shardgraph", description="A compiler for distributed training with PyTorch.")
    commands = parser.add_subparsers(metavar="command", required=True)
    for name, command in COMMANDS.items():
        about = command.__doc__
        chosen = commands.add_parser(name, help=about, description=about)
        chosen.set_defaults(run=command(chosen))
    options = parser.parse_args(arguments)
    try:
        options.run(options)
    except ShardGraphError as error:
        print(f"shardgraph: {error}", file=sys.stderr)
        return 1
    return 0
