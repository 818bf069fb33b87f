"""What went wrong when a step of a pipeline fails in the middle, told alike on every rank."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from shardgraph.errors import CollectiveError, ShardGraphError
from shardgraph.runtime.agreement import Agreement

_PROBE = 1 << 20  # a tag of point-to-point messages that no schedule uses
_GRACE = 3.0  # seconds in which a rank that lives posts that it does, once the step has failed around it
_PATIENCE = 10.0  # seconds for which a rank that knows of no rank that ended waits for one that does


@contextmanager
def told(agreement: Agreement, group: dist.ProcessGroup | None, neighbours: Sequence[int]) -> Iterator[None]:
    """Run a step; if it fails, say on every rank which rank was the first to fail.

    A rank that has an error of its own says so to the others and raises it. One that loses the connection to a
    neighbour posts that it is there itself, then probes its neighbours: one that cannot be reached and does not post
    either has ended. (To probe a neighbour that lives may close the connection to it, so being closed is no proof.)

    Raises:
        CollectiveError: another rank has gone; the message names it.
    """
    try:
        yield
    except Exception as error:
        if not _of_communication(error) or group is None:
            agreement.first_failure(f"rank {_rank()} failed: {type(error).__name__}: {error}")
            raise
        agreement.post_presence()
        closed = [rank for rank in neighbours if _closed(rank, group)]
        lost = [rank for rank in closed if not agreement.is_present(rank, _GRACE)]
        who = " and ".join(f"rank {rank} has ended" for rank in lost) or (
            f"rank {_rank()} waited in vain for its neighbours in the pipeline, {' and '.join(map(str, neighbours))}"
        )
        first = agreement.first_failure(who, within=0.0 if lost else _PATIENCE)
        raise CollectiveError(
            f"the pipeline stopped in the middle of a step: {first}. Look at the output of that rank first; rank "
            f"{_rank()} saw: {error}"
        ) from error


def _rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def _of_communication(error: BaseException) -> bool:
    """Whether it was raised by waiting for, or starting, a message."""
    if isinstance(error, ShardGraphError) or not isinstance(error, RuntimeError):
        return False
    trace, last = error.__traceback__, ""
    while trace is not None:
        last, trace = trace.tb_frame.f_code.co_filename, trace.tb_next
    return "torch/distributed" in last.replace("\\", "/")


def _closed(rank: int, group: dist.ProcessGroup) -> bool:
    """Whether the connection to a rank is closed, which it is for one that has ended."""

    def ask(operation: Callable[..., dist.Work | None]) -> bool:
        try:
            work = operation(torch.zeros(1), rank, group=group, tag=_PROBE)
            if work is not None:
                work.wait(timedelta(seconds=1))
        except RuntimeError as error:
            return "imed out" not in str(error)
        return False

    return dist.get_backend(group) != "nccl" and ask(dist.isend)
