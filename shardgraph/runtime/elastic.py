"""A job on local ranks that outlives them: what is left of them goes on from the last checkpoint."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

from shardgraph.arguments import CALLABLE, LIST, SECONDS, WHOLE, checked, whole
from shardgraph.errors import LaunchError
from shardgraph.runtime.launch import launch

log = logging.getLogger(__name__)


@checked(fn=CALLABLE, nproc=WHOLE, args=LIST, least=WHOLE, restarts=whole(0), timeout=SECONDS)
def elastic(
    fn: Callable[..., Any],
    nproc: int = 2,
    *,
    args: Sequence[Any] = (),
    least: int = 1,
    restarts: int = 3,
    timeout: float = 600.0,
) -> list[Any]:
    """Call ``fn(*args)`` on ``nproc`` local ranks as :func:`launch` does; when some fail, again on those that are left.

    ``fn`` begins by loading the last checkpoint, if there is one (docs/checkpoints.md), compiles for as many ranks as
    there are, and takes its part of a global batch by ``sharded.rows_of(samples)``: losses are then those of a job that
    was never interrupted, but for what is random in forward. What was done since the checkpoint is done again.

    Under ``torchrun`` this is ``launch``: the agent starts ranks again (``--max-restarts``).

    Args:
        fn, args, timeout: as for :func:`launch`; ``timeout`` is that of each start.
        nproc: number of ranks of the first start.
        least: number of ranks below which the job fails.
        restarts: how often it is started again.

    Raises:
        LaunchError: no rank is left after a failure, or too few, or it was one too many; the message is that of the
            last failure. What ``launch`` refuses is refused.
    """
    left = nproc
    while True:
        try:
            return launch(fn, left, args=args, timeout=timeout)
        except LaunchError as error:
            remain = left - len(error.failed)
            if not error.failed or remain < max(1, least) or not restarts:
                raise
            log.warning("%d of %d ranks failed, and %d go on: %s", len(error.failed), left, remain, error)
            left, restarts = remain, restarts - 1
