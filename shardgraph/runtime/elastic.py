"""A job on local ranks that outlives them: what is left of them goes on from the last checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from shardgraph.arguments import CALLABLE, LIST, SECONDS, WHOLE, Kind, checked, whole
from shardgraph.errors import ArgumentError, LaunchError, shown
from shardgraph.runtime.launch import is_rank, launch, on_new_ranks
from shardgraph.runtime.start_again import StartAgain

log = logging.getLogger(__name__)


_AVAILABLE = Kind("a function that says how many ranks there can be now", callable)


@checked(fn=CALLABLE, nproc=WHOLE | _AVAILABLE, args=LIST, least=WHOLE, restarts=whole(0), timeout=SECONDS)
def elastic(
    fn: Callable[..., Any],
    nproc: int | Callable[[], int] = 2,
    *,
    args: Sequence[Any] = (),
    least: int = 1,
    restarts: int = 3,
    timeout: float = 600.0,
) -> list[Any]:
    """Call ``fn(*args)`` on ``nproc`` local ranks as :func:`launch` does; when some fail, again on those that are left.

    ``fn`` begins by loading the last checkpoint, if there is one (docs/checkpoints.md), compiles for as many ranks as
    there are, and takes its part of a global batch by ``sharded.rows_of(samples)``: losses are then those of a job that
    was never interrupted, what is random in forward included with ``compile(..., random="samples")``. What was done
    since the checkpoint is done again.

    Under ``torchrun`` this is ``launch``: the agent starts ranks again (``--max-restarts``).

    Args:
        fn, args, timeout: as for :func:`launch`; ``timeout`` is that of each start.
        nproc: number of ranks of the first start; or a function that says how many there can be now, which is asked
            once a second. When it says another number than run, ranks end in their next
            :func:`shardgraph.save_checkpoint`, once the checkpoint is whole, and ``fn`` is called on so many:
            so ranks that have failed come back, and new ones join. ``lambda: 4`` always has them come back.
        least: number of ranks below which the job fails.
        restarts: how often it is started again after a failure.

    Raises:
        LaunchError: no rank is left after a failure, or too few, or it was one too many; the message is that of the
            last failure. What ``launch`` refuses is refused.
        ArgumentError: an argument is not allowed, or the function ``nproc`` did not say a number.
    """
    if not callable(nproc) and least > nproc:
        raise ArgumentError(f"elastic(): least is {shown(least)}; it may be at most nproc, which is {nproc}")
    if is_rank():
        return launch(fn, args=args, timeout=timeout)  # which says so if another launch has started this rank

    def wanted() -> int:
        assert callable(nproc)
        return max(least, WHOLE.check("elastic(): what nproc() returned", nproc()))

    left = wanted() if callable(nproc) else nproc
    while True:
        try:
            results = on_new_ranks(fn, left, args, timeout, wanted if callable(nproc) else None)
        except LaunchError as error:
            remain = left - len(error.failed)
            if not error.failed or remain < max(1, least) or not restarts:
                raise
            log.warning("%d of %d ranks failed, and %d go on: %s", len(error.failed), left, remain, error)
            left, restarts = remain, restarts - 1
            continue
        if not any(isinstance(result, StartAgain) for result in results):
            return results
        before, left = left, wanted()
        log.warning("%d ranks ended after a checkpoint, and %d go on", before, left)
