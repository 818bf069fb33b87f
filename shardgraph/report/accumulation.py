"""What adding up gradients costs: of a pipeline's microbatches, and of several calls in a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from shardgraph.cost_models.device import Device
from shardgraph.passes.analysis.liveness import MemoryProfile
from shardgraph.passes.analysis.rows import Row


def accumulation_rows(
    gradients: Mapping[str, int], microbatches: int, device: Device, memory: MemoryProfile
) -> Iterator[Row]:
    """The additions of a microbatch's gradients, of so many bytes by parameter, to those of the microbatches before.

    The first microbatch adds nothing, and its additions count as a part of each one's: seconds are the mean.
    """
    if microbatches == 1:
        return
    live = {kind: line[-1] for kind, line in memory.compositions.items() if line[-1]}
    for fqn, nbytes in gradients.items():
        yield Row(
            half="backward",
            node=f"accumulate {fqn}",
            operation="accumulate",
            module=fqn.rpartition(".")[0],
            label=f"gradient of {fqn}, added up",
            kind="pointwise",
            read=2 * nbytes,
            written=nbytes,
            seconds=accumulation_seconds(device, nbytes, 1, microbatches),
            memory=live,
        )


def accumulation_seconds(device: Device, nbytes: float, tensors: float, microbatches: int) -> float:
    """Seconds to add up gradients of so many bytes in all, in the mean over the microbatches."""
    rate = device.rate("pointwise")
    assert rate is not None
    return (1 - 1 / microbatches) * (tensors * rate.overhead + 3 * nbytes / rate.per_second)


def seconds_of_calls(device: Device, calls: int, nbytes: float, on_host: float = 0.0) -> float:
    """Seconds in which all calls of a step but the first add gradients of so many bytes to those before, but for what
    it takes to start each addition. Those ``on_host`` are in host memory and are added there."""
    seconds = calls * accumulation_seconds(device, nbytes, 0, calls)
    if on_host:
        seconds += (calls - 1) * 3 * on_host / device.linked_host.optimizer.per_second
    return seconds


def holding_gradients(rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows of a call that begins with the reduced gradients of those before, which the optimizer's rows have."""
    kept = rows[-1].memory.get("gradients", 0)

    def held(row: Row) -> Row:
        if row.half == "optimizer" or not kept:
            return row
        return replace(row, memory={**row.memory, "gradients": row.memory.get("gradients", 0) + kept})

    return tuple(map(held, rows))
