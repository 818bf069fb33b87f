"""Timings of collectives on all ranks of a group at once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from shardgraph import torch_api
from shardgraph.calibration.timing import LEAST_ROUNDS, seconds_of, slowest, time_all
from shardgraph.calibration.timings import COLLECTIVES, Transfer
from shardgraph.runtime.backends.gloo import add_parts

_IN_FLIGHT, _IN_TURN = 6, 3  # collectives in one timing: started before others have ended, and one after another
_AHEAD = 4  # how many are in flight at once, as in the presets
_RUNS = 2 + LEAST_ROUNDS  # of each timing, at least
_STARTED = _IN_FLIGHT * (1 + _RUNS) + _IN_TURN * 2 * _RUNS
"""How often a collective of a size that is measured is started, at least."""
_MOST_BUDGETS = 8


def time_collectives(
    group: str, ranks: int, budget: float, device: torch.device, exponents: Sequence[int] = (12, 15, 18, 21, 24)
) -> list[Transfer]:
    """Timings of collectives alone, and as in a step: several in flight, overlapped with as long a computation, and
    each awaited at once after a short one, where a rank waits for the others.

    They are of 2 to the ``exponents`` bytes in the larger of input and output: of as many sizes as can be timed in some
    times the ``budget`` in seconds, of two at least.
    """
    rows = 256 if device.type == "cpu" else 2048
    x, weight = torch.ones(rows, 512, device=device), torch.ones(512, 512, device=device)

    def compute(count: int) -> None:
        for _ in range(count):
            x @ weight

    calls: dict[int, list[_Call]] = {}  # by size, as its exponent
    once: dict[int, list[float]] = {}  # seconds of the collectives of a size
    for exponent in exponents:
        calls[exponent] = _of_size(2**exponent, group, ranks, device)
        tries = [partial(_in_turn, call.start, call.finish, lambda: None, 1) for call in calls[exponent]]
        for each in tries:
            each()  # the first is slow
        once[exponent] = slowest([seconds_of(each, 1, device) for each in tries], device)
        if sum(once[exponent]) * _STARTED > _MOST_BUDGETS * budget:
            break
    timed = sizes_to_time({size: sum(seconds) * _STARTED for size, seconds in once.items()}, _MOST_BUDGETS * budget)
    (product,) = slowest([seconds_of(partial(compute, 3), 1, device) / 3], device)
    counts = [max(1, round(seconds / product)) for size in timed for seconds in once[size]]  # about as long as it
    chosen = [call for size in timed for call in calls[size]]
    runs: list[Callable[[], object]] = [partial(compute, _IN_TURN)]
    for call, count in zip(chosen, counts, strict=True):
        _overlapped(call.start, call.finish, partial(compute, count))  # the first run is slow
        runs += [
            partial(_in_turn, call.start, call.finish, lambda: None, _IN_TURN),
            partial(compute, _IN_FLIGHT * count),
            partial(_overlapped, call.start, call.finish, partial(compute, count)),
            partial(_in_turn, call.start, call.finish, partial(compute, 1), _IN_TURN),
        ]
    short, *others = time_all(runs, budget, device)
    taken = iter(others)
    return [
        Transfer(
            call.operation, call.operand, call.result,
            alone / _IN_TURN, (together - computing) / _IN_FLIGHT, (awaited - short) / _IN_TURN,
        )
        for call, alone, computing, together, awaited in zip(chosen, taken, taken, taken, taken, strict=True)
    ]  # fmt: skip


def sizes_to_time(takes: Mapping[int, float], within: float) -> list[int]:
    """The sizes to time, ascending: of those that take so many seconds to time, which is ``within`` so many in all.

    The smallest tells the latency, and the largest that there is time for the bandwidth, even if only because it takes
    little longer than the smallest; then others, from the largest on.
    """
    smallest, *others = sorted(takes)
    left = max(within - takes[smallest], 2 * takes[smallest])
    timed = [smallest]
    for size in reversed(others):
        if takes[size] <= left or (size == others[0] and len(timed) == 1):
            timed.append(size)
            left = min(left, within - takes[smallest]) - takes[size]
    return sorted(timed)


class _Call(NamedTuple):
    """A collective: its operation, the bytes of a rank's input and output, what starts it and what waits for it."""

    operation: str
    operand: int
    result: int
    start: Callable[[], torch.Tensor]
    finish: Callable[[torch.Tensor], object]


def _of_size(nbytes: int, group: str, ranks: int, device: torch.device) -> list[_Call]:
    """The collectives of about so many bytes in the larger of input and output."""
    found = []
    for operation in COLLECTIVES:
        whole = nbytes // 4 // ranks * ranks
        operand = whole // ranks if operation == "all_gather_into_tensor" else whole
        result = whole // ranks if operation == "reduce_scatter_tensor" else whole
        start, finish = _collective(operation, torch.ones(operand, device=device), group, ranks)
        found.append(_Call(operation, 4 * operand, 4 * result, start, finish))
    return found


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


def _in_turn(
    start: Callable[[], torch.Tensor],
    finish: Callable[[torch.Tensor], object],
    compute: Callable[[], None],
    count: int,
) -> None:
    for _ in range(count):
        compute()
        finish(start())


def _overlapped(
    start: Callable[[], torch.Tensor], finish: Callable[[torch.Tensor], object], compute: Callable[[], None]
) -> None:
    in_flight: deque[torch.Tensor] = deque()
    for _ in range(_IN_FLIGHT):
        in_flight.append(start())
        compute()
        if len(in_flight) > _AHEAD:
            finish(in_flight.popleft())
    for pending in in_flight:
        finish(pending)
