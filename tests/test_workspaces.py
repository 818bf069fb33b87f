"""What CPU kernels take for themselves, against the events of the allocator while a whole step runs."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

import shardgraph
from benchmarks.allocator_events import allocator_peak
from shardgraph.passes.analysis.workspaces import workspace
from shardgraph.report.step import program_memory
from tests.machines import toy_cluster


def workspaces(function: Callable, *shapes: tuple[int, ...]) -> list[int]:
    """The workspace of each operation of ``function`` that has one; nothing is allocated for its values."""
    with FakeTensorMode():
        graph = make_fx(function)(*[torch.empty(shape) for shape in shapes]).graph
        return [nbytes for node in graph.nodes if node.op == "call_function" and (nbytes := workspace(node))]


def convolution(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return F.conv2d(x, weight, padding=1, stride=2)


def test_a_convolution_takes_what_the_allocator_gives_while_it_runs():
    shapes = (16, 12, 20, 20), (24, 12, 3, 3)
    operands = [torch.zeros(shape) for shape in shapes]
    with torch.no_grad():
        measured = allocator_peak(lambda: convolution(*operands)) - 16 * 24 * 10 * 10 * 4
    assert sum(workspaces(convolution, *shapes)) == measured > 0


def test_a_mask_of_dropout_is_made_in_floating_point():
    assert workspaces(lambda x: torch.ops.aten.native_dropout(x, 0.1, True)[0], (8, 1000)) == [8 * 1000 * 4]


def test_a_norm_copies_an_operand_that_is_not_contiguous():
    assert workspaces(lambda x: F.layer_norm(x.mT, (64,)), (4, 64, 512)) == [4 * 64 * 512 * 4]


def test_matrix_products_and_pointwise_operations_take_nothing():
    assert workspaces(lambda x, y: F.gelu(x @ y) + 1, (64, 64), (64, 64)) == []


def test_an_operation_that_an_analysis_must_not_have_the_memory_for_is_not_run():
    assert workspaces(lambda x: torch.ops.aten.native_dropout(x, 0.1, True)[0], (2**20, 2**20)) == []


def test_other_devices_kernels_are_not_known():
    with FakeTensorMode():
        operands = [torch.empty(shape, device="meta") for shape in ((16, 12, 20, 20), (24, 12, 3, 3))]
        graph = make_fx(convolution)(*operands).graph
    assert not any(workspace(node) for node in graph.nodes if node.op == "call_function")


def test_they_are_measured_inside_of_a_profiler_and_leave_random_numbers_alone():
    state = torch.random.get_rng_state()
    with torch.profiler.profile():
        assert workspaces(lambda x: torch.ops.aten.native_dropout(x, 0.2, True)[0], (3, 7)) == [3 * 7 * 4]
    assert torch.equal(torch.random.get_rng_state(), state)


class Images(nn.Module):
    """Convolutions over whole images, one channel at a time and in patches, with dropout and batch norm."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(3, 24, 3, padding=1), nn.BatchNorm2d(24), nn.ReLU(inplace=True), nn.Dropout(0.1),
            nn.Conv2d(24, 24, 7, padding=3, groups=24), nn.GELU(),
            nn.Conv2d(24, 32, 4, stride=4), nn.ConvTranspose2d(32, 4, 2, stride=2),
        )  # fmt: skip

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layers(x).square().mean()


def test_the_predicted_peak_of_a_step_is_that_of_the_allocators_events():
    images = torch.randn(4, 3, 32, 32)
    sharded = shardgraph.compile(Images(), "single", loss_fn=lambda loss, target: loss + target)
    optimizer, call = torch.optim.AdamW(sharded.parameters()), {"target": torch.zeros(())}

    def step() -> None:
        sharded.train_step(images, **call)
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    held = [*sharded.parameters(), *sharded.buffers(), *states, images, *call.values()]
    measured = sum(tensor.nbytes for tensor in held) + allocator_peak(step)
    without, predicted = (
        program_memory(sharded.program, "adamw", workspaces=each).peak_bytes for each in (False, True)
    )
    assert predicted == pytest.approx(measured, rel=0.001)
    assert without < 0.9 * measured


def test_they_are_part_of_an_analysis_for_a_cpu_and_of_no_other():
    call = Images(), (torch.zeros(4, 3, 32, 32),), "single"
    on_cpu, elsewhere = (
        shardgraph.analyze(*call, cluster=each).peak_memory for each in (shardgraph.Cluster.detect(), toy_cluster())
    )
    assert elsewhere < 0.9 * on_cpu
