"""The cause of a pipeline step that fails, reported alike on every rank."""

from __future__ import annotations

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta

import torch
import torch.distributed as dist

from shardgraph.errors import CollectiveError, RankMismatchError, ShardGraphError
from shardgraph.runtime import watch
from shardgraph.runtime.agreement import Agreement

_PROBE = 1 << 20  # a tag of point-to-point messages that no schedule uses
_GRACE = 3.0  # seconds within which a living rank posts its presence after a step has failed
_PATIENCE = 10.0  # seconds that a rank without a dead neighbour waits for another rank to report one


@contextmanager
def report_failure(agreement: Agreement, group: dist.ProcessGroup | None, neighbours: Sequence[int]) -> Iterator[None]:
    """Run a step; if it fails, report on every rank which rank was the first to fail.

    A rank with an error of its own posts it and raises it. One that loses the connection to a neighbour posts its
    presence, then probes its neighbours: one that cannot be reached and does not post either has ended. (Probing a
    living neighbour may close the connection to it, so a closed connection alone is no proof.)

    Raises:
        CollectiveError: another rank has gone; the message names it.
        RankMismatchError: another rank has stopped, since it was called with something else.
    """
    agreement.go_on()
    try:
        with watch.stepping():
            yield
    except Exception as error:
        rank = dist.get_rank() if dist.is_initialized() else 0
        if not _of_communication(error) or group is None:
            agreement.first_failure(f"rank {rank} failed: {type(error).__name__}: {error}")
            raise
        if (verdict := agreement.verdict_against()) is not None:
            raise RankMismatchError(verdict) from error
        if (failure := watch.failed(error, "a step of the pipeline")) is not None:
            raise failure from error
        agreement.post_presence()
        closed = [neighbour for neighbour in neighbours if _closed(neighbour, group)]
        lost = [neighbour for neighbour in closed if not agreement.is_present(neighbour, _GRACE)]
        cause = " and ".join(f"rank {neighbour} has ended" for neighbour in lost) or (
            f"rank {rank} waited in vain for its neighbours in the pipeline, {' and '.join(map(str, neighbours))}"
        )
        first = agreement.first_failure(cause, within=0.0 if lost else _PATIENCE)
        raise CollectiveError(
            f"the pipeline stopped in the middle of a step: {first}. Look at the output of that rank first; rank "
            f"{rank} saw: {error}"
        ) from error


def _of_communication(error: BaseException) -> bool:
    """Whether it was raised while a message was started or awaited."""
    if isinstance(error, ShardGraphError) or not isinstance(error, RuntimeError):
        return False
    *_, (frame, _) = traceback.walk_tb(error.__traceback__)
    return "torch/distributed" in frame.f_code.co_filename.replace("\\", "/")


def _closed(rank: int, group: dist.ProcessGroup) -> bool:
    """Whether the connection to a rank is closed, as it is to one that has ended."""
    if dist.get_backend(group) == "nccl":
        return False
    try:
        if (work := dist.isend(torch.zeros(1, device="cpu"), rank, group=group, tag=_PROBE)) is not None:
            work.wait(timedelta(seconds=1))
    except RuntimeError as error:
        return "imed out" not in str(error)
    return False
