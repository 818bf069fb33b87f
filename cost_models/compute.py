"""Seconds of an operation on a device: a roofline whose attained rates depend on size, dtype and kind of work.

The roofline is S. Williams, A. Waterman, D. Patterson, "Roofline: an insightful visual performance model for multicore
architectures", Communications of the ACM 52(4), 2009.
"""

from __future__ import annotations

from shardgraph.cost_models.arithmetic import NUMBERS, Arithmetic
from shardgraph.cost_models.device import FLOP_KINDS, Device
from shardgraph.errors import ClusterError

ALIGNED = 16  # bytes: a GPU's widest load, to which every tensor is allocated
_KEYS, _KEYS_ON_CPU = 128, 512
"""Keys per block of a flash kernel. GPU: T. Dao, "FlashAttention-2", arXiv:2307.08691, section 3.3; CPU:
``kvSplitSize`` of PyTorch's ``aten/src/ATen/native/cpu/FlashAttentionKernel.cpp``."""


def causal_part(length: int, on_cpu: bool, on: Arithmetic = NUMBERS) -> float:
    """The fraction of attention's FLOPs that a flash kernel executes for ``length`` positions under a causal mask.

    It skips blocks of keys that are fully masked, whereas FLOPs are counted for all blocks.
    """
    return on.minimum(1.0, (1 + (_KEYS_ON_CPU if on_cpu else _KEYS) / length) / 2)


def seconds(
    device: Device,
    kind: str,
    dtype: str,
    flops: float,
    moved: float,
    on: Arithmetic = NUMBERS,
    alignment: int = ALIGNED,
) -> float:
    """Seconds for one operation of ``flops`` FLOPs that reads and writes ``moved`` bytes.

    Work counted in FLOPs takes the longer of its arithmetic and its memory traffic; everything else is memory traffic.
    ``on`` is the arithmetic of the type of ``flops`` and ``moved``, numbers or expressions. Rows of the matrices of a
    product begin at multiples of ``alignment`` bytes.

    Raises:
        ClusterError: the device has no rate for this kind of work in this dtype.
    """
    memory = device.rate("pointwise" if kind in FLOP_KINDS else kind)
    assert memory is not None
    if kind not in FLOP_KINDS:
        return memory.seconds(moved)
    if (rate := device.rate(kind, dtype)) is None:
        have = sorted(name for name in device.rates if "/" in name)
        raise ClusterError(
            f"device {device.name!r} has no rate for {kind} in {dtype}; it has {', '.join(have)}. Add "
            f"'{kind}/{dtype}' to its rates, or measure it with `shardgraph calibrate`"
        )
    if (part := device.aligned(kind, dtype, alignment)) < 1:  # else an expression stays exact
        flops = flops / part
    return on.maximum(rate.seconds(flops, moved, on), memory.seconds(moved))
