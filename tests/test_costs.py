"""What each node computes and moves: equal to torch's own counter, and nothing silently free."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from shardgraph import preset
from shardgraph.cost_models import compute
from shardgraph.cost_models.device import Device, Rate
from shardgraph.errors import ClusterError
from shardgraph.passes.analysis.costs import NodeCost, node_costs
from shardgraph.passes.analysis.rows import Prices
from shardgraph.passes.lowering import build_program
from shardgraph.report.step import program_halves
from tests.machines import toy_cluster, toy_device
from tests.zoo import ZOO, make, scalar

pytestmark = pytest.mark.usefixtures("shared_captures")


ON_CPU = {  # kernels that torch's counter has no formula for
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda q, k, v, *_, **__: sdpa_flop_count(
        *equal_heads(q, k, v)
    ),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: (
        lambda grad, q, k, v, *_, **__: sdpa_backward_flop_count(*equal_heads(grad, q, k, v))
    ),
}


def equal_heads(*shapes):
    return [(batch, shapes[0][1], *rest) for batch, _, *rest in shapes]


def count_flops(gm):
    return sum(cost.flops for cost in node_costs(gm).values())


def forward_of(model, *args):
    return build_program(model, preset("single", ()), args).forward


@pytest.mark.quick("conv-batch-norm", "llama", "odd-mlp", "unet", "vit")
@pytest.mark.parametrize("name", list(ZOO))
def test_flops_of_a_step_equal_those_that_torch_counts(name):
    model, (args, kwargs) = make(name, 4)
    program = build_program(model, preset("single", ()), args, kwargs)
    ours = sum(count_flops(gm) for gm in program_halves(program).values())
    with FlopCounterMode(display=False, custom_mapping=ON_CPU) as counter:
        scalar(model(*args, **kwargs)).backward()
    assert ours == counter.get_total_flops() > 0


def test_sharding_a_model_changes_no_flops():
    model, (args, kwargs) = make("llama", 4)
    whole, sharded = (
        build_program(model, preset(name, mesh), args, kwargs) for name, mesh in (("single", ()), ("fsdp", {"dp": 4}))
    )
    assert count_flops(whole.forward) == count_flops(sharded.forward)


def test_a_matmul_reads_both_operands_and_writes_its_result():
    gm = forward_of(nn.Linear(8, 16, bias=False), torch.randn(4, 8))
    (cost,) = [cost for cost in node_costs(gm).values() if cost.kind == "matmul"]
    assert (cost.flops, cost.read, cost.written) == (2 * 4 * 8 * 16, 4 * (4 * 8 + 8 * 16), 4 * 4 * 16)


def test_views_and_waits_move_nothing():
    model, (args, kwargs) = make("llama", 4)
    program = build_program(model, preset("fsdp", {"dp": 2}), args, kwargs)
    free = [cost for node, cost in node_costs(program.forward).items() if node.name.startswith(("view", "wait"))]
    assert {cost.kind for cost in free} == {"free", "view"} and not any(cost.moved for cost in free)


class Chain(nn.Module):
    def forward(self, x):
        return F.gelu(x * 2 + 1).sum()


def test_fused_pointwise_chains_move_their_ends_only():
    gm = forward_of(Chain(), torch.randn(1024))
    apart = sum(c.moved for c in node_costs(gm).values())
    fused = sum(c.moved for c in node_costs(gm, fused=True).values())
    size = 4 * 1024
    assert apart == 7 * size + 4  # three operations that read and write, and a sum that reads and writes a scalar
    assert fused == 3 * size + 4  # read once, written once for the sum, which reads it


@torch.library.custom_op("shardgraph_tests::mystery", mutates_args=())
def mystery(x: torch.Tensor) -> torch.Tensor:
    return x.clone()


mystery.register_fake(lambda x: torch.empty_like(x))


class Mysterious(nn.Module):
    def forward(self, x):
        return mystery(x)


def test_an_operation_without_a_formula_is_priced_by_its_bytes_and_marked():
    gm = forward_of(Mysterious(), torch.randn(256))
    (cost,) = [cost for node, cost in node_costs(gm).items() if "mystery" in node.name]
    assert not cost.known and cost.moved == 2 * 4 * 256
    assert compute.seconds(toy_device(), cost.kind, cost.dtype, cost.flops, cost.moved) > 0


def test_a_matmul_takes_as_long_as_its_arithmetic_or_its_memory_whichever_is_slower():
    device = toy_device()
    assert compute.seconds(device, "matmul", "float32", flops=2e12, moved=1e9) == pytest.approx(2.0)
    assert compute.seconds(device, "matmul", "float32", flops=1e9, moved=3e11) == pytest.approx(3.0)


def test_a_matmul_of_few_rows_takes_as_long_as_it_takes_to_read_the_matrix():
    known = toy_device()
    rate = replace(known.rates["matmul/float32"], bandwidth=1e10)
    device = replace(known, rates={**known.rates, "matmul/float32": rate})
    assert compute.seconds(device, "matmul", "float32", flops=1e9, moved=3e11) == pytest.approx(30.0)
    assert compute.seconds(device, "matmul", "float32", flops=2e12, moved=1e9) == pytest.approx(2.0)


def test_causal_attention_skips_what_lies_behind_whole_blocks_of_keys_which_are_larger_on_a_cpu():
    cost = NodeCost("attention", "float32", flops=1000, causal=1024)
    assert (cost.executed(on_cpu=True), cost.executed(on_cpu=False)) == (750, 562.5)
    assert cost._replace(causal=512).executed(on_cpu=True) == 1000
    assert cost._replace(causal=0).executed(on_cpu=False) == 1000


def test_norms_read_their_input_for_statistics_and_once_more():
    images = torch.randn(4, 8, 16, 16)
    (cost,) = [cost for cost in node_costs(forward_of(nn.BatchNorm2d(8), images)).values() if cost.kind == "reduction"]
    assert cost.moved == pytest.approx(3 * images.nbytes, rel=0.05)  # read, read again and written


def test_products_in_16_bits_are_slower_where_rows_do_not_begin_at_wide_loads():
    prices = Prices(replace(toy_cluster(), device=replace(toy_device(), alignment=12)), ())

    def seconds(words: int, dtype: torch.dtype = torch.bfloat16) -> float:
        gm = forward_of(nn.Linear(64, words, bias=False).to(dtype), torch.randn(128, 64, dtype=dtype))
        (cost,) = [cost for cost in node_costs(gm).values() if cost.kind == "matmul"]
        return prices.computation(cost) / cost.flops

    assert seconds(257) == pytest.approx(6 * seconds(256))
    assert seconds(258) == pytest.approx(3 * seconds(256))
    assert seconds(264) == pytest.approx(seconds(256))
    assert seconds(257, torch.float32) == pytest.approx(seconds(256, torch.float32))


def test_small_work_costs_its_overhead():
    device = Device("d", 1, {}, {"pointwise": Rate(1e9, overhead=1e-5)})
    assert compute.seconds(device, "gather", "float32", 0, 1e3) == pytest.approx(1.1e-5)


def test_complex_products_are_four_of_their_parts_unless_they_have_been_measured():
    device = toy_device()
    assert device.rate("matmul", "complex64") == device.rate("attention", "complex128") == Rate(1e12 / 4)
    measured = replace(device, rates={**device.rates, "matmul/complex64": Rate(3e12)})
    assert measured.rate("attention", "complex64") == Rate(3e12)


def test_arithmetic_in_a_dtype_without_a_rate_is_refused_with_those_there_are():
    with pytest.raises(ClusterError, match=r"no rate for matmul in float16; it has matmul/bfloat16"):
        compute.seconds(toy_device(), "matmul", "float16", 1, 1)
