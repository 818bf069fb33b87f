"""Values whose strides are others than a fake tensor says."""

from __future__ import annotations

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_leaves

import shardgraph
from shardgraph.runtime.layouts import suited
from tests.diffusion import Denoiser

aten = torch.ops.aten


class Strided(nn.Module):
    """Elementwise results of operands that are laid out differently, which are viewed in backward or forward."""

    def __init__(self, body) -> None:
        super().__init__()
        self.layer, self.scale, self.body = nn.Linear(6, 6), nn.Parameter(torch.ones(6, 4)), body

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.body(self.layer(x), self.scale)  # [2, 4, 6] and [6, 4]


BODIES = {
    "softplus": lambda h, s: (F.softplus(h).transpose(1, 2) * s).square().sum(),
    "hardswish": lambda h, s: (F.hardswish(h).transpose(1, 2) * s).square().sum(),
    "elu": lambda h, s: (F.elu(h).transpose(1, 2) * s).square().sum(),
    "a loss": lambda h, s: F.mse_loss(h.transpose(1, 2).sigmoid(), (h.detach() * 2).contiguous().mT.contiguous() * s),
}


@pytest.mark.quick("softplus", "a loss")
@pytest.mark.parametrize("body", BODIES.values(), ids=BODIES)
def test_a_view_of_a_result_that_is_laid_out_otherwise_is_of_the_same_elements(body):
    torch.manual_seed(0)
    model = Strided(body)
    sharded, x = shardgraph.compile(copy.deepcopy(model), "single", progress=False), torch.randn(2, 4, 6)
    for module in (sharded, model):
        module(x).backward()
    torch.testing.assert_close(sharded(x), model(x))
    for mine, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)
    report = shardgraph.verify(model, (x,), "fsdp", mesh={"dp": 2}, loss_fn=lambda loss: loss)
    assert report.ok, str(report)


def test_a_view_by_strides_that_depend_on_the_device_is_refused_with_its_line():
    model = Strided(lambda h, s: torch.copysign(h, (h.mT * 2).contiguous().mT).as_strided((2, 24), (24, 1)).cumsum(1))
    with pytest.raises(shardgraph.CaptureError, match=r"as_strided at .*test_layouts\.py:\d+ .*contiguous\(\)"):
        shardgraph.compile(model, "single", example_inputs=(torch.randn(2, 4, 6),), progress=False)


def test_a_view_by_strides_of_a_contiguous_value_reads_its_elements():
    model = Strided(lambda h, s: torch.copysign(h, (h.mT * 2).mT).contiguous().as_strided((2, 24), (24, 1)).cumsum(1))
    sharded, x = shardgraph.compile(copy.deepcopy(model), "single", progress=False), torch.randn(2, 4, 6)
    torch.testing.assert_close(sharded(x), model(x))


class Residual(nn.Module):
    """A sum of positions last and first, as in the attention blocks of diffusion models, which is then normalised."""

    def __init__(self, group_norm) -> None:
        super().__init__()
        self.group_norm, self.scale = group_norm, nn.Parameter(torch.rand(8))
        self.project, self.conv = nn.Linear(8, 8), nn.Conv2d(8, 8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        attended = self.project(x.flatten(2).mT).mT.view(x.shape)
        return self.group_norm(attended + self.conv(x), 2, self.scale).square().mean()


@pytest.mark.parametrize("group_norm", [F.group_norm, torch.group_norm])
@pytest.mark.parametrize("samples", [1, 2])  # for each rank
def test_group_norm_takes_sums_of_any_strides_also_of_one_sample(samples, group_norm):
    report = shardgraph.verify(Residual(group_norm), (torch.randn(2 * samples, 8, 4, 4),), "fsdp", mesh={"dp": 2})
    assert report.ok, str(report)


def _turned(tensor: torch.Tensor) -> torch.Tensor:
    """The first dimension lies innermost."""
    return tensor.movedim(0, -1).contiguous().movedim(-1, 0)


def _channels_last(tensor: torch.Tensor) -> torch.Tensor:
    """The second dimension lies innermost, and strides along dimensions of size 1 say nothing."""
    if tensor.dim() < 3:
        return tensor
    lying = tensor.movedim(1, -1).contiguous().movedim(-1, 1)
    strides = [1 if size == 1 else stride for size, stride in zip(lying.shape, lying.stride(), strict=True)]
    return lying.as_strided(lying.shape, strides)


def _group_norm(x, weight):
    y, mean, rstd = aten.native_group_norm(x, weight, weight, len(x), 4, 25, 2, 1e-5)
    return aten.native_group_norm_backward, (y.sin(), x, mean, rstd, weight, len(x), 4, 25, 2, [True] * 3)


def _batch_norm(x, weight):
    y, mean, invstd = aten.native_batch_norm(x, weight, weight, None, None, True, 0.1, 1e-5)
    return aten.native_batch_norm_backward, (y.sin(), x, weight, None, None, mean, invstd, True, 1e-5, [True] * 3)


def _layer_norm(x, weight):
    y, mean, rstd = aten.native_layer_norm(x, [5], None, None, 1e-5)
    return aten.native_layer_norm_backward, (y.sin(), x, [5], mean, rstd, None, None, [True, False, False])


def _weight_norm(v, g):
    w, norms = aten._weight_norm_interface(v[..., 0, 0], g[:, None], 0)
    return aten._weight_norm_interface_backward, (w.sin(), v[..., 0, 0].contiguous(), g[:, None], norms, 0)


def _pooled(x, _):
    y, indices = aten.adaptive_max_pool3d(x[None], [2, 2, 2])
    return aten.adaptive_max_pool3d_backward, (y.sin(), x[None], indices)


def _fractional(x, _):
    y, indices = aten.fractional_max_pool2d(x, [2, 2], [3, 3], torch.rand(len(x), 4, 2).double())
    return aten.fractional_max_pool2d_backward, (y.sin(), x, [2, 2], [3, 3], indices)


def _likelihood(x, weight):
    target = torch.ones(len(x), 5, 5, dtype=torch.long)
    y, total = aten.nll_loss2d_forward(x, target, weight, 1, -100)
    return aten.nll_loss2d_backward, (y.sin(), x, target, weight, 1, -100, total)


def _distances(x, _):
    rows = torch.randn(4, 3).double()
    return aten._pdist_backward, (torch.rand(6).double(), rows, 2.0, aten._pdist_forward(rows, 2.0))


@pytest.mark.parametrize("lying", [_turned, _channels_last])
@pytest.mark.parametrize("samples", [1, 3])
@pytest.mark.parametrize(
    "case",
    [
        lambda x, w: (aten.native_group_norm, (x, w, w, len(x), 4, 25, 2, 1e-5)),
        _group_norm,
        _batch_norm,
        _layer_norm,
        lambda x, w: (aten._weight_norm_interface, (x[..., 0, 0], w[: len(x), None], 0)),
        lambda x, w: _weight_norm(x, w[: len(x)]),
        _pooled,
        _fractional,
        _likelihood,
        lambda x, w: (aten._pdist_forward, (x[0, 0], 2.0)),
        _distances,
        lambda x, w: (aten._linalg_det, (x,)),
        lambda x, w: (aten._linalg_slogdet, (x,)),
    ],
)
def test_kernels_compute_the_same_of_operands_that_lie_anyhow(case, samples, lying):
    torch.manual_seed(0)
    function, args = case(torch.randn(samples, 4, 5, 5).double(), torch.rand(4).double())
    args = [arg.contiguous() if isinstance(arg, torch.Tensor) else arg for arg in args]
    expected = tree_leaves(function.default(*args))
    for one in range(len(args)):
        moved = [lying(arg) if isinstance(arg, torch.Tensor) and i == one else arg for i, arg in enumerate(args)]
        torch.testing.assert_close(tree_leaves(suited(function.default)(*moved)), expected)


@pytest.mark.quick("fsdp")
@pytest.mark.parametrize("plan", ["tp", "tp+sp", "fsdp", "zero2", "ddp", "fsdp+tp"])
def test_a_denoiser_of_group_norm_and_attention_trains_as_the_original(plan):
    mesh = {"dp": 2, "tp": 2} if plan == "fsdp+tp" else None
    world = None if mesh else 2
    report = shardgraph.verify(Denoiser(), (torch.randn(4, 3, 8, 8),), plan, mesh=mesh, world_size=world, steps=2)
    assert report.ok, str(report)
