"""Timings of collectives on all ranks of a group at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch

from shardgraph import torch_api
from shardgraph.calibration.timing import LEAST_ROUNDS, seconds_of, slowest, time_all
from shardgraph.calibration.timings import COLLECTIVES, Transfer
from shardgraph.runtime.backends.gloo import add_parts

_STARTED = 6  # collectives in one timing
_AHEAD = 4  # how many of them are in flight at once, as in the presets
_TIMED = 3  # timings of a collective in a round
_LEAST_SIZES, _MOST_BUDGETS = 3, 2


def time_collectives(
    group: str, ranks: int, budget: float, device: torch.device, exponents: Sequence[int] = (12, 15, 18, 21, 24)
) -> list[Transfer]:
    """Timings of collectives alone, and as in a step: several in flight, overlapped with as long a computation, and
    each awaited at once after a short one, where a rank waits for the others.

    They are of 2 to the ``exponents`` bytes in the larger of input and output: of some sizes at least, and of those
    larger ones that do not take many times the ``budget`` in seconds.
    """
    calls: list[tuple[str, int, int]] = []
    rows = 256 if device.type == "cpu" else 2048
    x, weight = torch.ones(rows, 512, device=device), torch.ones(512, 512, device=device)

    def compute(count: int) -> None:
        for _ in range(count):
            x @ weight

    runs: list[Callable[[], object]] = [partial(compute, _STARTED)]
    of_sizes: list[float] = []  # seconds of all operations of a size, once
    for exponent in exponents:
        if len(of_sizes) >= _LEAST_SIZES and _takes(of_sizes) > _MOST_BUDGETS * budget:
            break
        of_sizes.append(0.0)
        for operation in COLLECTIVES:
            whole = 2**exponent // 4 // ranks * ranks
            operand = whole // ranks if operation == "all_gather_into_tensor" else whole
            result = whole // ranks if operation == "reduce_scatter_tensor" else whole
            calls.append((operation, 4 * operand, 4 * result))
            start, finish = _collective(operation, torch.ones(operand, device=device), group, ranks)
            _in_flight(start, finish, partial(compute, 1))  # the first run is slow
            alone = partial(_awaited, start, finish, lambda: None)
            times = [seconds_of(alone, 1, device) / _STARTED, seconds_of(partial(compute, 3), 1, device) / 3]
            sending, computing = slowest(times, device)
            of_sizes[-1] += sending
            count = max(1, round(sending / computing))  # about as long as the collective
            runs += [
                alone,
                partial(compute, _STARTED * count),
                partial(_in_flight, start, finish, partial(compute, count)),
                partial(_awaited, start, finish, partial(compute, 1)),
            ]
    short, *others = time_all(runs, budget, device)
    taken = iter(others)
    return [
        Transfer(*call, sending / _STARTED, (together - computing) / _STARTED, (awaited - short) / _STARTED)
        for call, sending, computing, together, awaited in zip(calls, taken, taken, taken, taken, strict=True)
    ]


def _takes(of_sizes: Sequence[float]) -> float:
    """Seconds of measuring all sizes and the next one, which has eight times the bytes."""
    more = of_sizes[-1] + 8 * max(0.0, of_sizes[-1] - of_sizes[-2])
    return (sum(of_sizes) + more) * _STARTED * _TIMED * LEAST_ROUNDS


def _collective(
    operation: str, tensor: torch.Tensor, group: str, ranks: int
) -> tuple[Callable[[], torch.Tensor], Callable[[torch.Tensor], object]]:
    """What starts an operation and what waits for it, as programs do (:mod:`shardgraph.runtime.backends.gloo`)."""
    functional: Any = torch.ops._c10d_functional
    wait: Callable[[torch.Tensor], torch.Tensor] = functional.wait_tensor
    if operation == "all_reduce":
        return partial(functional.all_reduce, tensor, "sum", group), wait
    on_gloo = tensor.device.type == "cpu" and torch_api.is_gloo(group)
    if operation == "reduce_scatter_tensor" and on_gloo:
        rows = [len(tensor) // ranks] * ranks
        exchange = partial(functional.all_to_all_single, tensor, rows, rows, group)
        return exchange, lambda started: add_parts(wait(started), ranks)
    if operation == "reduce_scatter_tensor":
        return partial(functional.reduce_scatter_tensor, tensor, "sum", ranks, group), wait
    if on_gloo:
        gather = functional.all_gather_into_tensor_out
        return lambda: gather(tensor, ranks, group, out=tensor.new_empty(len(tensor) * ranks)), wait
    return partial(functional.all_gather_into_tensor, tensor, ranks, group), wait


def _awaited(
    start: Callable[[], torch.Tensor], finish: Callable[[torch.Tensor], object], compute: Callable[[], None]
) -> None:
    for _ in range(_STARTED):
        compute()
        finish(start())


def _in_flight(
    start: Callable[[], torch.Tensor], finish: Callable[[torch.Tensor], object], compute: Callable[[], None]
) -> None:
    in_flight: deque[torch.Tensor] = deque()
    for _ in range(_STARTED):
        in_flight.append(start())
        compute()
        if len(in_flight) > _AHEAD:
            finish(in_flight.popleft())
    for pending in in_flight:
        finish(pending)
