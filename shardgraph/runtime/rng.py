"""Random numbers on data-parallel ranks: different on each, reproducible on all.

Users seed every rank alike, but dropout must differ between ranks with different data. So each forward draws one number
from the default generator, the same on every rank, and derives the seed of its rank from it.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager

import torch

_GOLDEN = 0x9E3779B97F4A7C15


def rank_seed(seed: int, rank: int) -> int:
    """The seed of ``rank``, or of anything else that draws independently, in a step whose common draw was ``seed``."""
    return (seed + _GOLDEN * rank) % 2**63


def rank_generator(rank: int, world_size: int, device: torch.device) -> AbstractContextManager[None]:
    """Run the body with ``device``'s (and the CPU's) generator seeded for ``rank`` of ``world_size``.

    With one rank the default generators are used unchanged, so that the body draws what the original model would.
    """
    return seeded(None if world_size == 1 else rank_seed(common_draw(), rank), device)


def common_draw() -> int:
    """A number from the default generator: the same on every rank, since all are seeded alike."""
    return int(torch.randint(2**62, (), device="cpu").item())


@contextmanager
def seeded(seed: int | None, device: torch.device) -> Iterator[None]:
    """Run the body with ``device``'s (and the CPU's) generator seeded, then restore it; None changes nothing."""
    if seed is None:
        yield
        return
    accelerators = [device] if device.type != "cpu" else []
    with torch.random.fork_rng(accelerators, device_type=device.type):
        torch.manual_seed(seed)
        yield
