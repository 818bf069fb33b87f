"""``shardgraph doctor``: what of this machine works, and what mends the rest."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import typer
from rich.console import Console
from rich.table import Table
from rich.text import Text

from shardgraph.cli.options import Json
from shardgraph.cli.output import result, working

_ENOUGH = 2 * 2**30  # bytes of free memory: two ranks of a small model
_SECONDS = 300.0  # for a compiler or the ranks: seconds on an idle machine, minutes on a busy one
_BUSY = 4  # processes that wait for each core


@dataclass(frozen=True)
class Finding:
    """``needed``: nothing trains without it; ``mend`` is the command that makes it work, if it does not."""

    name: str
    works: bool
    found: str
    needed: bool = False
    mend: str = ""


def doctor(as_json: Json = False) -> None:
    """Check this machine, and say how to fix what does not work; exits with 1 if nothing can train here."""
    findings = []
    for name, check in CHECKS.items():
        with working(f"check {name}"):
            try:
                findings.append(check(name))
            except Exception as error:  # a check that fails is a finding
                found = f"{type(error).__name__}: {error}"
                findings.append(Finding(name, False, found, needed=name in NEEDED, mend=_less_busy()))
    well = all(each.works or not each.needed for each in findings)
    if as_json:
        result("", {"ok": well, "checks": findings}, True)
    else:
        _show(findings)
    if not well:
        raise typer.Exit(1)


def _less_busy() -> str:
    """What may mend a check that took too long: nothing, if the machine is not busy."""
    waiting, cores = os.getloadavg()[0], os.cpu_count() or 1
    return f"again when less runs: {waiting:.0f} processes wait for {cores} cores" if waiting > _BUSY * cores else ""


def _show(findings: list[Finding]) -> None:
    table = Table.grid(padding=(0, 2, 0, 0))
    for overflow in ("ignore", "ignore", "fold"):
        table.add_column(overflow=overflow, no_wrap=overflow == "ignore")
    for each in findings:
        mark, style = ("ok", "green") if each.works else ("FAILS", "red") if each.needed else ("no", "yellow")
        table.add_row(Text(mark, style), each.name, Text(each.found))
    Console(width=None if sys.stdout.isatty() else 160).print(table)
    if mends := [each for each in findings if each.mend]:  # whole lines, to be copied, however narrow the terminal is
        typer.echo("\n".join(["", "To fix what does not work:", *(f"  {each.mend}" for each in mends)]))


def _python(name: str) -> Finding:
    works = sys.version_info >= (3, 11)
    return Finding(name, works, f"{sys.version.split()[0]}, {sys.executable}", True, "" if works else _ANOTHER_PYTHON)


def _torch(name: str) -> Finding:
    version = importlib.metadata.version("torch")
    works = (2, 11) <= tuple(int(part) for part in version.split(".")[:2]) < (2, 14)
    return Finding(name, works, version, True, "" if works else f"{_PIP} 'torch>=2.11,<2.14'")


def _backends(name: str) -> Finding:
    import torch
    import torch.distributed as dist

    there = dist.is_available() and dist.is_gloo_available()
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    missing = gpus and not dist.is_nccl_available()
    found = f"gloo{'' if there else ' is missing'}, {gpus} GPUs{' without nccl' if missing else ''}"
    return Finding(name, there and not missing, found, True, "" if there and not missing else f"{_PIP} torch")


def _ranks(name: str) -> Finding:
    from shardgraph.runtime.launch import launch

    met = launch(_meet, 2, timeout=_SECONDS)
    return Finding(name, met == [1.0, 1.0], "two ranks met over the loopback interface", True)


def _meet() -> float:
    import torch
    import torch.distributed as dist

    total = torch.tensor(float(dist.get_rank()))
    if dist.get_backend() == "nccl":
        total = total.cuda()
    dist.all_reduce(total)
    return total.item()


def _memory(name: str) -> Finding:
    from shardgraph.cost_models.detection import host_memory
    from shardgraph.sizes import format_bytes

    free = host_memory()
    mend = "" if free >= _ENOUGH else "ps -eo rss,pid,args --sort=-rss | head  # end what you do not need"
    return Finding(name, not mend, f"{format_bytes(free)} free", mend=mend)


def _prices(name: str) -> Finding:
    import torch

    from shardgraph.calibration.remembered import busy_file, measured_file

    if torch.cuda.is_available():
        from shardgraph.cost_models.cluster import Cluster

        return Finding(name, True, f"described: {Cluster.detect().name}")
    file = measured_file()
    if file.exists():
        return Finding(name, True, f"measured: {file}")
    if busy_file().exists():
        return Finding(name, True, f"measured while the machine was busy, and again when it is not: {busy_file()}")
    return Finding(name, False, "not measured yet: the first prediction does, in 20 s", mend="shardgraph calibrate")


def _compiler(name: str) -> Finding:
    command = shlex.split(os.environ.get("CXX", "")) or [shutil.which("g++") or shutil.which("clang++") or ""]
    if not shutil.which(command[0]):
        return Finding(name, False, "none, which backend='inductor' needs", mend="apt-get install g++")
    header = Path(sysconfig.get_path("include"))
    checked = subprocess.run(
        [*command, f"-I{header}", "-x", "c++", "-std=c++17", "-fsyntax-only", "-"],
        input="#include <vector>\n#include <Python.h>\n",
        capture_output=True,
        text=True,
        timeout=_SECONDS,
    )
    if checked.returncode:
        mend = "apt-get install g++ python3-dev"
        return Finding(name, False, checked.stderr.strip().splitlines()[0] if checked.stderr else "fails", mend=mend)
    return Finding(name, True, " ".join(command))


def _dot(name: str) -> Finding:
    if path := shutil.which("dot"):
        return Finding(name, True, path)
    return Finding(name, False, "none: plans are drawn as boxes", mend="apt-get install graphviz")


def _transformers(name: str) -> Finding:
    if importlib.util.find_spec("transformers") is None:
        return Finding(name, False, "none: models are named by functions only", mend=f"{_PIP} 'transformers>=5,<6'")
    return Finding(name, True, importlib.metadata.version("transformers"))


_PIP = f"{shlex.quote(sys.executable)} -m pip install"
_ANOTHER_PYTHON = "python3.11 -m venv .venv && .venv/bin/pip install shardgraph"

CHECKS: dict[str, Callable[[str], Finding]] = {
    "python": _python,
    "torch": _torch,
    "backends": _backends,
    "two ranks": _ranks,
    "free memory": _memory,
    "prices": _prices,
    "C++ compiler": _compiler,
    "graphviz": _dot,
    "transformers": _transformers,
}
NEEDED = ("python", "torch", "backends", "two ranks")
