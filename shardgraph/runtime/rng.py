"""Random numbers on data-parallel ranks: different on each, reproducible on all.

Users seed every rank alike, but dropout must differ between ranks with different data. So each forward draws one number
from the default generator, the same on every rank, and derives the seed of its rank from it. What draws by NumPy is
seeded with it, so that ranks agree without NumPy being seeded alike.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

import numpy
import torch

_GOLDEN = 0x9E3779B97F4A7C15


def rank_seed(seed: int, rank: int) -> int:
    """The seed of ``rank``, or of anything else that draws independently, in a step whose common draw was ``seed``."""
    return (seed + _GOLDEN * rank) % 2**63


def rank_generator(rank: int, world_size: int, device: torch.device) -> AbstractContextManager[None]:
    """Run the body with ``device``'s (and the CPU's) generator seeded for ``rank`` of ``world_size``.

    With one rank the default generators are used unchanged, so that the body draws what the original model would.
    """
    return seeded(None if world_size == 1 else rank_seed(common_draw(), rank), device, on_host=True)


def common_draw() -> int:
    """A number from the default generator: the same on every rank, since all are seeded alike."""
    return int(torch.randint(2**62, (), device="cpu").item())


@contextmanager
def seeded(seed: int | None, device: torch.device, on_host: bool) -> Iterator[None]:
    """Run the body with ``device``'s (and the CPU's) generator seeded, then restore it; None changes nothing.

    ``on_host``: NumPy's too, which takes longer than torch's.
    """
    if seed is None:
        yield
        return
    accelerators = [device] if device.type != "cpu" else []
    numbers = numpy.random.get_state() if on_host else None
    with torch.random.fork_rng(accelerators, device_type=device.type):
        (seed_all if on_host else torch.manual_seed)(seed)
        try:
            yield
        finally:
            if numbers is not None:
                numpy.random.set_state(numbers)


def seed_all(seed: int) -> None:
    """Seed torch's default generators and NumPy's."""
    torch.manual_seed(seed)
    numpy.random.seed(seed % 2**32)


@dataclass(frozen=True)
class HostState:
    """The states of torch's default generator of the CPU, and of NumPy's."""

    torch: torch.Tensor
    numpy: Any

    @classmethod
    def now(cls) -> HostState:
        """As they are."""
        return cls(torch.get_rng_state(), numpy.random.get_state())

    def same(self, other: HostState) -> bool:
        """Whether the same numbers come next."""
        kind, keys, *rest = self.numpy
        its_kind, its_keys, *its_rest = other.numpy
        of_numpy = (kind, rest) == (its_kind, its_rest) and numpy.array_equal(keys, its_keys)
        return of_numpy and torch.equal(self.torch, other.torch)

    def set(self) -> None:
        """Have the generators go on from here."""
        torch.set_rng_state(self.torch)
        numpy.random.set_state(self.numpy)
