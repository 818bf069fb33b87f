"""This machine as a cluster: its GPUs by their description, a CPU measured once; corrected by measured steps."""

from __future__ import annotations

import functools
import os
import platform
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import torch

from shardgraph.calibration.correction import Correction, MeasuredStep, correction_of, fitted, remember
from shardgraph.calibration.files import named, write
from shardgraph.calibration.network import on_nodes_of_run
from shardgraph.cost_models import detection
from shardgraph.cost_models.cluster import Cluster
from shardgraph.errors import ClusterError
from shardgraph.progress import Progress

_SECONDS = 5.0
_PATIENCE = 120.0  # seconds until a measurement that does not end is given up
_MOST = 4  # ranks that measure at once: each is a process that imports PyTorch
_MEASURES = 5  # of measurements: another number if they are made otherwise


def this_machine() -> Cluster:
    """The machine that a plan is priced on if no cluster is named, with all of its memory: on a CPU each core's share.

    GPUs are known by name. A CPU's rates cannot be: they are measured for some seconds the first time, in processes of
    their own, and read from :func:`measured_file` from then on; delete that file to measure again, or pass the file of
    a longer ``shardgraph calibrate`` as ``cluster``. What is measured while other programs keep the machine busy is
    remembered for as long as they do, and then measured again. Where they cannot be measured, they are
    :meth:`Cluster.detect`'s guesses, with a warning. Prices that measured steps have corrected (:func:`learn`) are
    corrected. In a run over several nodes it is as many such machines, with the network between them, corrected by
    steps of such runs.

    Raises:
        ClusterError: it has a GPU that is not described.
    """
    machine = _uncorrected()
    priced = on_nodes_of_run(machine)
    if (correction := correction_of(priced)) is not None:
        return correction.of(priced)
    inside = correction_of(machine) or Correction()  # by jobs of one node, which know nothing of the network
    return on_nodes_of_run(inside.of(machine))


def learn(steps: Sequence[MeasuredStep]) -> Correction:
    """Correct the prices of this machine, or of the nodes of this run, for next time by the measured steps of a job,
    whose predictions were made with the present prices; returns the factors between these."""
    machine = _uncorrected()
    priced = on_nodes_of_run(machine)
    present = correction_of(priced)
    if present is None:  # those of one node, as :func:`this_machine` has it
        present = replace(correction_of(machine) or Correction(), communication=1.0)
    remember([present.undone(step) for step in steps], priced)
    return fitted(steps)


def _uncorrected() -> Cluster:
    if torch.cuda.is_available():
        return Cluster.detect()
    measured, cores = _measured(measured_file()), detection.cpu_cores()
    if measured is None:
        return Cluster.detect()
    device = replace(measured.device, memory=detection.machine_memory() // cores)
    return replace(measured, device=device, devices_per_node=cores)


def measured_file() -> Path:
    """Where this CPU's rates are kept: one file for each CPU, number of cores and release of PyTorch."""
    of = detection.cpu_name(), detection.cpu_cores(), torch.__version__, platform.python_version(), _MEASURES
    return named("cpu", *of)


def busy_file() -> Path:
    """Where the rates are kept that this CPU had while other programs kept it busy."""
    return measured_file().with_suffix(".busy.yaml")


def _is_busy(ranks: int) -> bool:
    """Whether other programs leave each of so many ranks less than three quarters of a core."""
    try:
        others = os.getloadavg()[0] - 1  # this process
    except (AttributeError, OSError):  # Windows has none
        return False
    return detection.cpu_cores() - others < 0.75 * ranks


@functools.cache
def _measured(path: Path) -> Cluster | None:
    """The cluster in ``path``, measured first if there is none; None if that fails."""
    ranks = max(2, min(_MOST, detection.cpu_cores()))
    busy = _is_busy(ranks)
    for known in (path, busy_file()) if busy else (path,):
        with suppress(ClusterError):  # none yet, or of another release
            return Cluster.load(known)
    what = "measure this CPU, which is busy now, and again when it is not" if busy else "measure this CPU, once"
    # Its processes have their files in this folder too, so that none is left where they are ended amid their work.
    kept = tempfile.TemporaryDirectory(ignore_cleanup_errors=True)
    with Progress(what, 1) as progress, kept as folder:
        progress("")
        out = Path(folder) / path.name
        command = [sys.executable, "-m", "shardgraph", "calibrate", "--seconds", f"{_SECONDS}", "--nproc", f"{ranks}"]
        try:
            subprocess.run(
                [*command, "--out", out],
                env=_alone() | {"TMPDIR": folder},
                capture_output=True,
                timeout=_PATIENCE,
                check=True,
            )
            cluster, content = Cluster.load(out), out.read_text(encoding="utf-8")
        except (OSError, subprocess.SubprocessError, ClusterError) as error:
            said = (getattr(error, "stderr", None) or b"").decode(errors="replace").strip().splitlines()
            warnings.warn(
                f"this CPU could not be measured ({said[-1] if said else error}), so its rates are guesses: run "
                "`shardgraph calibrate`, and pass its file as cluster=",
                stacklevel=2,
            )
            return None
    write(busy_file() if busy else path, content)
    return cluster


def _alone() -> dict[str, str]:
    """The environment without what makes a process a rank of this run."""
    of_run = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "MASTER_ADDR", "MASTER_PORT")
    return {
        name: value for name, value in os.environ.items() if name not in of_run and not name.startswith("TORCHELASTIC")
    }
