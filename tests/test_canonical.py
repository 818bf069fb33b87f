"""One captured graph for every device: fused operators for what each has a kernel for, the rest written out alike."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import checkpoint

import shardgraph
from shardgraph.capture.capture import capture
from shardgraph.ir.fused import ATTENTION
from shardgraph.ir.operations import canonical, operation_name
from shardgraph.passes.lowering import build_program
from tests.zoo import make

aten = torch.ops.aten


class Attention(nn.Module):
    """Self-attention of a projection, with dropout and a mask as given."""

    def __init__(self, dropout: float = 0.0, mask: torch.Tensor | None = None) -> None:
        super().__init__()
        self.project, self.dropout = nn.Linear(8, 24), dropout
        self.mask = mask

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).view(2, 6, 2, 12).transpose(1, 2).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, self.mask, self.dropout)


def operations(model: nn.Module, *args: torch.Tensor) -> list[str]:
    graph = capture(model, args, {}, device=torch.device("cpu")).module.graph
    return [operation_name(node.target) for node in graph.nodes if node.op == "call_function"]


@pytest.mark.parametrize(
    "operator",
    [
        ATTENTION,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        aten._scaled_dot_product_cudnn_attention.default,
    ],
)
def test_attention_has_one_name_whatever_kernel_computes_it(operator):
    assert operation_name(operator) == "attention"


def test_a_name_that_no_device_changes_stays():
    assert operation_name(aten.mm.default) == canonical("mm") == "mm"


def test_attention_is_one_operation_where_every_device_has_a_kernel():
    found = operations(Attention(), torch.randn(2, 6, 8))
    assert found.count("attention") == found.count("attention_backward") == 1


class OfTorch(nn.Module):
    """PyTorch's own attention, which the tracer leaves as one call."""

    def __init__(self, dropout: float = 0.0) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, dropout, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.attention(x, x, x, need_weights=False)[0]


def test_attention_inside_a_function_of_pytorch_is_the_same_operation():
    assert "attention" in operations(OfTorch(), torch.randn(2, 6, 8))
    found = operations(OfTorch(0.1), torch.randn(2, 6, 8))
    assert "attention" not in found and "bmm" in found


def test_attention_inside_a_checkpointed_region_is_the_same_operation():
    class Checkpointed(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(super().forward, x, use_reentrant=False)

    assert "attention" in operations(Checkpointed(), torch.randn(2, 6, 8))


@pytest.mark.parametrize(
    "model", [Attention(0.1), Attention(mask=nn.Parameter(torch.zeros(6, 6)))], ids=["dropout", "trained mask"]
)
def test_attention_that_a_device_has_no_kernel_for_is_written_out_on_all(model):
    found = operations(model, torch.randn(2, 6, 8))
    assert "attention" not in found and "bmm" in found


MASKS = {"none": None, "boolean": torch.tril(torch.ones(6, 6, dtype=torch.bool)), "added": torch.randn(6, 6)}


@pytest.mark.parametrize("mask", MASKS)
def test_written_out_attention_computes_and_draws_what_the_original_does(mask):
    model = Attention(0.5, MASKS[mask])
    report = shardgraph.verify(model, (torch.randn(2, 6, 8),), "single", world_size=1)
    assert report.ok, report


def test_rms_norm_is_one_operation():
    found = operations(nn.RMSNorm(8), torch.randn(2, 8))
    assert found.count("rms_norm") == found.count("rms_norm_backward") == 1


def test_rms_norm_of_two_precisions_is_written_out_as_pytorch_does():
    assert "rms_norm" not in operations(nn.RMSNorm(8), torch.randn(2, 8, dtype=torch.bfloat16))


def test_a_mask_of_three_dimensions_means_what_it_does_to_pytorch():
    model, x = Attention(mask=torch.randn(2, 6, 6)), torch.randn(2, 6, 8)
    assert "attention" not in operations(model, x)
    assert shardgraph.verify(model, (x,), "single", world_size=1).ok


def test_a_user_who_allows_no_fused_kernel_gets_none():
    class Unfused(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with sdpa_kernel(SDPBackend.MATH):
                return super().forward(x)

    found = operations(Unfused(), torch.randn(2, 6, 8))
    assert "attention" not in found and "bmm" in found


@pytest.mark.parametrize("enabled", [True, False])
def test_attention_under_autocast_has_its_precision(enabled):
    class Cast(Attention):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                return super().forward(x)

    model, x = Cast(mask=torch.randn(6, 6)), torch.randn(2, 6, 8)
    graph = capture(model, (x,), {}, device=torch.device("cpu")).module.graph
    (attention,) = graph.find_nodes(op="call_function", target=ATTENTION)
    assert attention.meta["val"][0].dtype == model(x).dtype
    assert shardgraph.verify(model, (x,), "single", world_size=1).ok


@pytest.mark.quick("llama")
@pytest.mark.parametrize("model", ["llama", "gpt2", "bert", "vit", "t5"])
def test_no_graph_has_a_kernel_of_one_device(model):
    module, (args, kwargs) = make(model, 2)
    graph = capture(module, args, dict(kwargs), device=torch.device("cpu")).module.graph
    assert not [node for node in graph.nodes if "scaled_dot_product" in str(node.target)]


def test_capture_leaves_cudnn_as_it_was():
    before = torch.backends.cudnn.enabled
    operations(nn.BatchNorm1d(4), torch.randn(3, 4))
    assert torch.backends.cudnn.enabled is before


@pytest.mark.slow
def test_a_plan_that_names_a_kernel_of_another_device_means_what_it_computes():
    model, (args, kwargs) = make("llama", 2)
    plan = shardgraph.preset("single", ())
    texts = [
        build_program(model, replace(plan, recompute=(("**.self_attn", (name,)),)), args, kwargs).text
        for name in ("attention", "scaled_dot_product_efficient_attention")
    ]
    assert texts[0] == texts[1] != build_program(model, plan, args, kwargs).text
