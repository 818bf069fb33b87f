"""``shardgraph run``: a script on several local ranks."""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from shardgraph.cli.output import working

_LOOK = 0.05  # seconds between two looks at the ranks
_PATIENCE = 3.0  # seconds for ranks to end when they are asked to
_GRACE = 5.0  # seconds for the others to end by themselves when a rank has failed
_PR_SET_PDEATHSIG = 1


def run(
    script: Annotated[Path, typer.Argument(exists=True, dir_okay=False, help="A Python file.", show_default=False)],
    ranks: Annotated[int, typer.Option(min=1, help="Number of ranks.")] = 2,
    arguments: Annotated[
        list[str] | None, typer.Argument(metavar="[ARGUMENTS]...", help="The script's own, after -- if need be.")
    ] = None,
) -> None:
    """Run a script on local ranks, as torchrun does; when one fails, stops all of them and exits with 1.

    In the script, shardgraph.launch(main) calls main on each rank.
    """
    with working("start"):
        from shardgraph.cost_models.detection import cpu_cores
        from shardgraph.runtime.launch import rank_environment, serve_store

        store = serve_store(timeout=600.0)  # served from here, so that it outlives every rank
    threads = {"OMP_NUM_THREADS": str(max(1, cpu_cores() // ranks))} | dict(os.environ)
    command = [sys.executable, str(script), *(arguments or ())]
    signal.signal(signal.SIGTERM, _end_with_signal)
    die_with_us = _die_with(os.getpid())
    running: list[subprocess.Popen[bytes]] = []
    try:
        for rank in range(ranks):
            environment = rank_environment(rank, ranks, store.port, threads)
            # A session of its own: an interrupt of the terminal is answered here, once.
            options: Any = {"start_new_session": True, "preexec_fn": die_with_us}
            running.append(subprocess.Popen(command, env=environment, **options))
        failed = _first_failure(running)
        if failed is not None:  # the others are told, and have their finally
            _wait(running, _GRACE)
    finally:
        _end(running)
    if failed is not None:
        rank, code = failed
        how = f"died of {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        others = ", so the others were stopped" if ranks > 1 else ""
        typer.secho(f"shardgraph: rank {rank} of {ranks} {how}{others}", fg="red", err=True)
        raise typer.Exit(1)


def _first_failure(ranks: Sequence[subprocess.Popen[bytes]]) -> tuple[int, int] | None:
    """The first rank that fails, with its exit code; None when all have ended well."""
    while True:
        codes = [rank.poll() for rank in ranks]
        for rank, code in enumerate(codes):
            if code:
                return rank, code
        if None not in codes:
            return None
        time.sleep(_LOOK)


def _end(ranks: Sequence[subprocess.Popen[bytes]]) -> None:
    """End the ranks that still run, with the processes that they have started."""
    left = [rank for rank in ranks if rank.poll() is None]
    for how in (signal.SIGTERM, signal.SIGKILL):
        for rank in left:
            os.killpg(rank.pid, how)
        left = _wait(left, _PATIENCE)


def _wait(ranks: Sequence[subprocess.Popen[bytes]], seconds: float) -> list[subprocess.Popen[bytes]]:
    """Wait for ranks to end; returns those that still run then."""
    deadline = time.monotonic() + seconds
    while (left := [rank for rank in ranks if rank.poll() is None]) and time.monotonic() < deadline:
        time.sleep(_LOOK)
    return left


def _die_with(process: int) -> Callable[[], None] | None:
    """What a child does before its program starts, so that the system ends it when this process is killed."""
    if sys.platform != "linux":
        return None
    library = ctypes.CDLL(None)

    def ask() -> None:
        library.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != process:  # it was killed before
            os._exit(1)

    return ask


def _end_with_signal(number: int, _: FrameType | None) -> None:
    sys.exit(128 + number)
