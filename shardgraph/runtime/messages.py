"""Bytes from rank to rank, over a group of gloo of their own: beside the training's communication, on any thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch
import torch.distributed as dist

from shardgraph import torch_api
from shardgraph.runtime import watch

_PART = 1 << 28  # bytes of one message
_made: tuple[dist.ProcessGroup | None, dist.ProcessGroup] | None = None  # and the default group that it is beside


class Message(NamedTuple):
    """``nbytes`` that the rank ``source`` sends to the rank ``target``."""

    source: int
    target: int
    nbytes: int


class Messages:
    """Messages between the ranks of the default group. All ranks must make it, on their main threads."""

    def __init__(self, timeout: float) -> None:
        global _made
        self._timeout = timedelta(seconds=timeout)
        if _made is None or _made[0] is not dist.group.WORLD:
            _made = dist.group.WORLD, torch_api.group_of_messages(self._timeout)
            watch.place.with_messages.add(str(_made[1].group_name))
        self._group = _made[1]

    def exchange(self, messages: Sequence[Message], of: Callable[[int], torch.Tensor], doing: str) -> None:
        """Send and receive. All ranks give the same ``messages``; ``of(number)`` are the bytes of one that this rank
        sends, or those that are filled by one that it receives.

        Raises:
            RankFailedError: another rank has failed meanwhile.
            RuntimeError: a connection is lost, or a message took longer than the timeout.
        """
        rank, tag, sent, received = dist.get_rank(), 0, [], []
        for number, message in enumerate(messages):
            mine = rank in (message.source, message.target)
            parts = of(number).split(_PART) if mine and message.nbytes else ()
            for offset, part in enumerate(parts):
                (sent if rank == message.source else received).append((message, tag + offset, part))
            tag += -(-message.nbytes // _PART)
        try:
            # What is received is asked for first: no one who sends waits for more than the network. Of the group
            # itself: a save may be under way when the job has left all groups.
            works = [self._group.recv([part], each.source, number) for each, number, part in received]
            works += [self._group.send([part], each.target, number) for each, number, part in sent]
            for work in works:
                work.wait(self._timeout)
        except RuntimeError as error:
            if (cause := watch.failed(error, doing)) is not None:
                raise cause from error
            raise
