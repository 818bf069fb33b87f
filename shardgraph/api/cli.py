"""The command ``shardgraph``."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence

from shardgraph.errors import ShardGraphError


def calibrate(nproc: int | None, seconds: float, out: str) -> None:
    """Measure how fast this machine computes and communicates, and write it to a cluster file."""
    from shardgraph.calibration import fit, fit_table, measure

    measured = measure(nproc, seconds=seconds)
    cluster = fit(measured)
    cluster.save(out)
    print(fit_table(measured, cluster))
    print(f"\nWrote {out}. Use it wherever a cluster is needed: cluster={out!r}")


def consolidate(shards: list[str], out: str, entry: str) -> None:
    """Make one safetensors file of the shards that ranks saved, also FairScale's."""
    from shardgraph.offline import consolidate

    consolidate(shards[0] if len(shards) == 1 else shards, out, entry=entry)
    print(f"Wrote {out}. The original model loads it with safetensors.torch.load_model(model, {out!r})")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run a command line and return its exit status."""
    parser = argparse.ArgumentParser(prog="shardgraph", description="A compiler for distributed training with PyTorch.")
    commands = parser.add_subparsers(metavar="command", required=True)
    command = commands.add_parser("calibrate", help=calibrate.__doc__, description=calibrate.__doc__)
    command.add_argument("--nproc", type=int, help="ranks that measure at once (default: one per GPU, or 2 without)")
    command.add_argument("--out", default="cluster.yaml", help="the file to write (default: %(default)s)")
    command.add_argument("--seconds", type=float, default=40.0, help="about how long to measure (default: %(default)g)")
    command.set_defaults(run=calibrate)
    command = commands.add_parser("consolidate", help=consolidate.__doc__, description=consolidate.__doc__)
    command.add_argument("shards", nargs="+", help="a folder, or the files of all ranks in their order")
    command.add_argument("--out", default="model.safetensors", help="the file to write (default: %(default)s)")
    command.add_argument("--entry", default="", help="the name of the model's state in them (default: what fits)")
    command.set_defaults(run=consolidate)
    options = vars(parser.parse_args(arguments))
    run = options.pop("run")
    try:
        run(**options)
    except ShardGraphError as error:
        print(f"shardgraph: {error}", file=sys.stderr)
        return 1
    return 0
