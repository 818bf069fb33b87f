"""Measured peak memory on CPU, against bytes counted by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from shardgraph.runtime.measure import PeakMemory

KB = 1024


def floats(kilobytes: int) -> torch.Tensor:
    return torch.ones(kilobytes * KB // 4)


def test_a_result_is_counted() -> None:
    a, b = floats(4), floats(4)
    with PeakMemory() as memory:
        _ = a + b
    assert memory.peak_bytes == 4 * KB


def test_what_was_live_before_is_not_counted() -> None:
    a = floats(4)
    with PeakMemory() as memory:
        a.view(2, -1).mul_(2)
    assert memory.peak_bytes == 0


def test_tracked_tensors_are_counted_once_and_until_they_die() -> None:
    a = floats(4)
    memory = PeakMemory().track([a, a.view(2, -1)])
    assert memory.peak_bytes == 4 * KB
    with memory:
        del a
        _ = floats(3)
    assert memory.peak_bytes == 4 * KB


def test_freed_temporaries_make_room() -> None:
    a = floats(4)
    with PeakMemory() as memory:
        b = a + 1
        del b
        _ = a + 2
    assert memory.peak_bytes == 4 * KB


def test_temporaries_that_live_together_add_up() -> None:
    a = floats(4)
    with PeakMemory() as memory:
        _ = (a + 1) * (a + 2)
    assert memory.peak_bytes == 12 * KB


def test_views_cost_nothing_and_keep_their_base() -> None:
    with PeakMemory() as memory:
        view = floats(4)[:1]
        _ = floats(4)
    assert memory.peak_bytes == 8 * KB
    assert view.numel() == 1


def test_in_place_operations_cost_nothing() -> None:
    with PeakMemory() as memory:
        a = floats(4)
        a += 1
        a.relu_()
    assert memory.peak_bytes == 4 * KB


def test_empty_and_meta_tensors_cost_nothing() -> None:
    with PeakMemory() as memory:
        _ = torch.empty(0), torch.empty(1000, device="meta")
    assert memory.peak_bytes == 0


def test_a_block_counts_no_more_after_it_ends() -> None:
    with PeakMemory() as memory:
        a = floats(4)
    _ = floats(8)
    del a
    assert memory.peak_bytes == 4 * KB


def test_custom_functions_are_seen_in_forward_and_backward() -> None:
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            _ = x.new_empty(2 * KB)  # 8 KB beside the 4 KB result
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            _ = grad.new_empty(4 * KB)  # 16 KB
            return grad * 2

    x = floats(4).requires_grad_()
    with PeakMemory() as forward:
        y = Twice.apply(x)
    tangent = torch.ones_like(y)
    with PeakMemory() as backward:
        y.backward(tangent)
    assert (forward.peak_bytes, backward.peak_bytes) == (12 * KB, 20 * KB)


def test_a_linear_layer_matches_bytes_counted_by_hand() -> None:
    layer, x = nn.Linear(32, 16, bias=False), torch.ones(8, 32)
    with PeakMemory() as memory:
        layer(x).backward(torch.ones(8, 16))
    result = tangent = 8 * 16 * 4
    gradient = 32 * 16 * 4
    assert memory.peak_bytes == result + tangent + gradient


@pytest.mark.timeout(60)
def test_of_a_dtensor_the_local_shard_is_counted(tmp_path) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        tensor = distribute_tensor(floats(4), init_device_mesh("cpu", (1,)), [Replicate()])
        memory = PeakMemory().track([tensor])
        with memory:
            _ = tensor + 1
        assert memory.peak_bytes == 8 * KB
    finally:
        dist.destroy_process_group()
