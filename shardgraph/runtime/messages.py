"""Bytes from rank to rank, over a group of gloo of their own: beside the training's communication, on any thread."""

from __future__ import annotations

import atexit
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
        self._rank, self._timeout = dist.get_rank(), timedelta(seconds=timeout)
        if _made is None or _made[0] is not dist.group.WORLD:
            _made = dist.group.WORLD, torch_api.group_of_messages(self._timeout)
            watch.place.with_messages.add(str(_made[1].group_name))
            atexit.register(_forget)
        self._group = _made[1]

    def exchange(self, messages: Sequence[Message], of: Callable[[int], torch.Tensor], doing: str) -> None:
        """Send and receive. All ranks give the same ``messages``; ``of(number)`` are the bytes of one that this rank
        sends, or those that are filled by one that it receives.

        Raises:
            RankFailedError: another rank has failed meanwhile.
            RuntimeError: a connection is lost, or a message took longer than the timeout.
        """
        sent: list[tuple[Message, int, torch.Tensor]] = []
        received: list[tuple[Message, int, torch.Tensor]] = []
        rank, tag = self._rank, 0
        for number, message in enumerate(messages):
            mine = rank in (message.source, message.target)
            parts = of(number).split(_PART) if mine and message.nbytes else ()
            for offset, part in enumerate(parts):
                (sent if rank == message.source else received).append((message, tag + offset, part))
            tag += -(-message.nbytes // _PART)
        try:
            # What is received is asked for first, so that no one who sends waits for more than the network.
            with watch.agreeing(doing):
                works = [dist.irecv(part, each.source, self._group, its_tag) for each, its_tag, part in received]
                works += [dist.isend(part, each.target, self._group, its_tag) for each, its_tag, part in sent]
                for work in works:
                    assert work is not None
                    work.wait(self._timeout)
        except RuntimeError as error:
            if (cause := watch.failed(error, doing)) is not None:
                raise cause from error
            raise


def _forget() -> None:
    """A process that ends with the threads of a group aborts now and then."""
    global _made
    _made = None
