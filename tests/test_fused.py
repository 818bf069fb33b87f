"""Fused operators: equal to PyTorch's functions, whatever the kernel, in graphs that are valid on every device."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest
import torch
import torch.nn.functional as F
from torch import fx
from torch._subclasses import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils import _pytree as pytree

import shardgraph
from shardgraph import torch_api
from shardgraph.ir.attributes import VALUE
from shardgraph.ir.fake_values import Propagation, layout_of
from shardgraph.ir.fused import ATTENTION, ATTENTION_BACKWARD, OPERATORS, RMS_NORM, RMS_NORM_BACKWARD, kernel_on
from shardgraph.passes.lowering import build_program
from shardgraph.runtime.bind import bind
from shardgraph.torch_api.attention import has_flash
from tests.zoo import make, shorter

DTYPES = [torch.float64, torch.float32, torch.bfloat16]
LOOSE = {"rtol": 2e-2, "atol": 3e-2}  # of two orders of rounding in half precision


def tolerance(dtype: torch.dtype) -> dict[str, float]:
    return LOOSE if dtype is torch.bfloat16 else {}


def operands(dtype: torch.dtype, heads_of_keys: int = 4, keys: int = 8, width: int = 16) -> list[torch.Tensor]:
    """Queries in the order in which projections return them, keys and values."""
    torch.manual_seed(0)
    query = torch.randn(2, 8, 4, width, dtype=dtype).transpose(1, 2)
    pair = [torch.randn(2, heads_of_keys, keys, width, dtype=dtype) for _ in "kv"]
    return [query, *pair]


UNSEEN = torch.zeros(8, 8).masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(), -torch.inf)  # row 0 sees no key
MASKS: dict[str, dict[str, Any]] = {
    "none": {},
    "causal": {"is_causal": True},
    "a row that sees nothing": {"mask": UNSEEN},
    "of every head": {"mask": torch.randn(1, 4, 8, 8, generator=torch.Generator().manual_seed(1))},
}


@pytest.mark.parametrize("device", ["cpu", "another"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("heads_of_keys", [4, 2, 1])
@pytest.mark.parametrize("seen", MASKS)
def test_kernels_of_attention_compute_what_pytorch_does(seen, heads_of_keys, dtype, device):
    tensors = [tensor.requires_grad_() for tensor in operands(dtype, heads_of_keys)]
    mask, causal = MASKS[seen].get("mask"), MASKS[seen].get("is_causal", False)
    mask = None if mask is None else mask.to(dtype)
    expected = F.scaled_dot_product_attention(*tensors, mask, is_causal=causal, enable_gqa=heads_of_keys < 4, scale=0.3)
    grad = torch.randn_like(expected)
    kernels = torch_api.attention_on(device)
    with torch.no_grad():
        out, logsumexp = kernels.forward(*tensors, mask, causal, 0.3)
        gradients = kernels.backward(grad, *tensors, out, logsumexp, mask, causal, 0.3)
    torch.testing.assert_close(out, expected, **tolerance(dtype))
    for gradient, correct in zip(gradients, torch.autograd.grad(expected, tensors, grad), strict=True):
        torch.testing.assert_close(gradient, correct, **tolerance(dtype))


@pytest.mark.parametrize("device", ["cpu", "another"])
@pytest.mark.parametrize("seen", MASKS)
def test_all_kernels_of_attention_agree_on_the_log_sum_exp(seen, device):
    mask, causal = MASKS[seen].get("mask"), MASKS[seen].get("is_causal", False)
    query, key, value = operands(torch.float64)
    mask = None if mask is None else mask.double()
    scores = query @ key.transpose(-1, -2) * 0.3 + (0 if mask is None else mask)
    if causal:
        scores = scores.masked_fill(torch.ones(8, 8, dtype=torch.bool).triu(1), -torch.inf)
    expected = scores.logsumexp(-1)
    expected[expected == -torch.inf] = 0
    _, logsumexp = torch_api.attention_on(device).forward(query, key, value, mask, causal, 0.3)
    torch.testing.assert_close(logsumexp, expected)


@pytest.mark.parametrize("eps", [1e-6, 1e-3])
@pytest.mark.parametrize("weighted", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rms_norm_has_the_bits_of_pytorch_and_its_gradients(dtype, weighted, eps):
    tensors = [torch.randn(3, 5, 16, dtype=dtype, requires_grad=True)]
    tensors += [torch.randn(5, 16, dtype=dtype, requires_grad=True)] if weighted else []
    expected = F.rms_norm(tensors[0], (5, 16), *tensors[1:], eps=eps)
    grad = torch.randn_like(expected)
    out, _ = RMS_NORM(tensors[0], [5, 16], tensors[1] if weighted else None, eps)
    assert torch.equal(out, expected)
    ours, theirs = (torch.autograd.grad(each, tensors, grad) for each in (out, expected))
    torch.testing.assert_close(ours, theirs, **tolerance(dtype))


def calls(dtype: torch.dtype = torch.float32) -> Iterator[tuple[Any, tuple[Any, ...]]]:
    """Each operator with arguments."""
    query, key, value = operands(dtype, 2)
    sliced = torch.randn(2, 8, 4, 48, dtype=dtype).transpose(1, 2)[..., :16]
    columns = torch.randn(2, 4, 16, 8, dtype=dtype).transpose(-1, -2)
    for first in (query, sliced, columns):
        out, logsumexp = ATTENTION(first, key, value, None, True, 0.25)
        yield ATTENTION, (first, key, value, None, True, 0.25)
        yield ATTENTION_BACKWARD, (out, first, key, value, out, logsumexp, None, True, 0.25)
    x, weight = torch.randn(3, 4, 16, dtype=dtype), torch.randn(16, dtype=dtype)
    for given in (weight, None):
        _, rstd = RMS_NORM(x, [16], given, 1e-5)
        yield RMS_NORM, (x, [16], given, 1e-5)
        yield RMS_NORM_BACKWARD, (x, x, [16], rstd, given)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_operators_keep_the_contract_of_pytorchs(dtype):
    for operator, args in calls(dtype):
        torch.library.opcheck(operator, args, test_utils=("test_schema", "test_faketensor"))


class WithoutGuards(TorchFunctionMode):
    """Calls operators past the methods that select a GPU first, which a build of PyTorch for CPUs cannot."""

    METHODS: ClassVar = {
        torch.Tensor.contiguous: torch.ops.aten.contiguous.default,
        torch.Tensor.copy_: torch.ops.aten.copy_.default,
    }

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.Tensor.__getitem__ and isinstance(args[1], slice):
            return torch.ops.aten.slice.Tensor(args[0], 0, args[1].start, args[1].stop)
        return self.METHODS.get(function, function)(*args, **(kwargs or {}))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeTensorMode]:
    """A fake GPU: values of its kernels have shapes, strides and dtypes, and no elements."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    has_flash.cache_clear()
    yield FakeTensorMode()
    has_flash.cache_clear()


def moved(mode: FakeTensorMode, value: Any) -> Any:
    """Tensors and devices in a value, on the fake GPU."""
    if isinstance(value, torch.device):
        return torch.device("cuda", 0)
    if not isinstance(value, torch.Tensor):
        return value
    with mode:
        return torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device="cuda:0")


def without_device(value: Any) -> list[Any]:
    """Shapes, dtypes and strides."""
    return [(*each[:2], each[3]) if isinstance(each, tuple) else each for each in layout_of(value)]


@pytest.mark.parametrize(
    ("dtype", "shape", "mask", "causal"),
    [
        (torch.bfloat16, {}, None, True),
        (torch.bfloat16, {"width": 20}, None, False),  # no multiple of 8
        (torch.bfloat16, {"keys": 12}, None, True),  # which FlashAttention aligns at the last key
        (torch.bfloat16, {"heads_of_keys": 2}, (1, 1, 8, 8), False),
        (torch.float32, {"heads_of_keys": 1}, (2, 1, 1, 8), False),
        (torch.float32, {"keys": 12, "width": 5}, (8, 1), False),
        (torch.float64, {}, None, True),
    ],
)
def test_kernels_of_a_gpu_return_what_those_of_a_cpu_do(gpu, dtype, shape, mask, causal):
    tensors, rest = operands(dtype, **shape), (None if mask is None else torch.zeros(mask, dtype=dtype), causal, 0.3)
    results = ATTENTION(*tensors, *rest)
    gradients = ATTENTION_BACKWARD(results[0], *tensors, *results, *rest)
    there = [moved(gpu, tensor) for tensor in (*tensors, *results)]
    out = there[3]
    rest = (moved(gpu, rest[0]), *rest[1:])
    kernels = torch_api.attention_on("cuda")
    with WithoutGuards(), gpu:
        assert without_device(kernels.forward(*there[:3], *rest)) == without_device(results)
        assert without_device(kernels.backward(out, *there, *rest)) == without_device(gradients)


def values_on(gpu: FakeTensorMode, half: fx.GraphModule, values: Propagation) -> Iterator[tuple[fx.Node, Any]]:
    """The operations of a graph with their values if all its tensors are on the fake GPU."""
    known: dict[fx.Node, Any] = {}
    move = functools.partial(moved, gpu)
    for node in half.graph.nodes:
        if node.op in ("placeholder", "get_attr"):
            known[node] = pytree.tree_map(move, VALUE.get(node))
        elif node.op == "call_function":
            kernel = kernel_on(node.target, "cuda") if node.target in OPERATORS else node.target
            args, kwargs = fx.map_arg((node.args, node.kwargs), known.__getitem__)
            known[node] = values.value(kernel, *pytree.tree_map(move, (args, kwargs)))
            yield node, known[node]


@pytest.mark.slow
@pytest.mark.parametrize(("model", "plan"), [("llama", "fsdp+tp"), ("llama", "cp"), ("gpt2", "tp+sp"), ("bert", "cp")])
def test_a_program_made_on_a_cpu_is_valid_on_a_gpu(gpu, model, plan):
    mesh = {axis: 2 for axis in ("dp", "tp", "cp") if axis.replace("dp", "fsdp") in plan}
    module, call = make(model, 4)
    program = build_program(module, shardgraph.preset(plan, mesh), *shorter(call, 8))
    on_gpu = Propagation(gpu, tuple(mesh.items()))
    with WithoutGuards():
        for half in (program.forward, program.backward):
            for node, value in values_on(gpu, half, on_gpu):
                assert without_device(value) == without_device(VALUE.get(node)), node.format_node()


def test_binding_leaves_the_kernels_of_the_device():
    module, (args, kwargs) = make("llama", 2)
    program = build_program(module, shardgraph.preset("single", ()), args, kwargs)
    for half in (program.forward, program.backward):
        bound = bind(half, None)
        assert {node.target for node in half.graph.nodes} & OPERATORS
        assert not {node.target for node in bound.graph.nodes} & OPERATORS
