"""Measures the machine at hand: what a cluster file says of it, from timings of its own operations.

:func:`measure` times operations on every rank at once, since the ranks of one machine share its cores and its memory;
:func:`fit` turns the timings into the rates of a :class:`~shardgraph.cost_models.cluster.Cluster`; :func:`calibrate`
is both.
"""

from __future__ import annotations

from collections.abc import Sequence

from shardgraph.calibration.fitting import fit, fit_table
from shardgraph.calibration.measuring import measure
from shardgraph.calibration.timings import Measurements
from shardgraph.cost_models.cluster import Cluster

__all__ = ["Measurements", "calibrate", "fit", "fit_table", "measure"]


def calibrate(
    nproc: int | None = None,
    dtypes: Sequence[str] = ("float32",),
    seconds: float = 40.0,
    progress: bool | None = None,
) -> Cluster:
    """The cluster that this machine is, measured on ``nproc`` ranks that all work at once.

    Args:
        nproc: number of ranks; by default one for each GPU, or 2 without.
        dtypes: dtypes to measure arithmetic in; memory traffic is measured in the first.
        seconds: about how long to measure, besides the start of the ranks. Each operation is timed a few times
            however short this is.
        progress: whether to show a progress line; None shows it on a terminal.

    Raises:
        ClusterError: a dtype is not a floating-point one, or this process is a rank of a run already.
    """
    return fit(measure(nproc, dtypes, seconds, progress))
