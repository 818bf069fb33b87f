"""Measures this machine: the rates of a cluster file, fitted to timings of operations.

:func:`measure` times operations on all ranks at once, since the ranks of one machine share its cores and its memory;
:func:`fit` turns the timings into the rates of a :class:`~shardgraph.cost_models.cluster.Cluster`; :func:`calibrate`
does both. :func:`this_machine` is what plans are priced on by default, and :func:`learn` corrects it by measured steps.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardgraph.arguments import BOOL, SECONDS, TEXT, WHOLE, checked, sequence_of
from shardgraph.calibration.correction import MeasuredStep
from shardgraph.calibration.fitting import fit, fit_table
from shardgraph.calibration.measuring import measure
from shardgraph.calibration.remembered import learn, this_machine
from shardgraph.calibration.timings import Measurements
from shardgraph.cost_models.cluster import Cluster

__all__ = ["MeasuredStep", "Measurements", "calibrate", "fit", "fit_table", "learn", "measure", "this_machine"]


_DTYPES = sequence_of("names of floating-point dtypes, at least one, such as ('float32',)", TEXT, least=1)


@checked(nproc=WHOLE, dtypes=_DTYPES, seconds=SECONDS, progress=BOOL)
def calibrate(
    nproc: int | None = None, dtypes: Sequence[str] = ("float32",), seconds: float = 40.0, progress: bool | None = None
) -> Cluster:
    """This machine as a cluster, measured on ``nproc`` ranks that all work at once.

    Called by the ranks of a run, as under ``torchrun``, all of them measure together and have the same result: the
    nodes of the run, if it has several, with the network between them.

    Args:
        nproc: number of ranks; by default one per GPU, or 2 without GPUs. In a run it is left out.
        dtypes: dtypes to measure arithmetic in; memory traffic is measured in the first one.
        seconds: about how long to measure, in addition to starting the ranks. Each operation is timed at least a few
            times.
        progress: whether to show a progress line; None shows it on a terminal.

    Raises:
        ClusterError: a dtype is not a floating-point one, or ``nproc`` is given by a rank of a run.
    """
    return fit(measure(nproc, dtypes, seconds, progress))
