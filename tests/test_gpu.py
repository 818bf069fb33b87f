"""On a CUDA device: the device of a bare process group, training over NCCL, copies on streams, memory that is saved."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch import nn

import shardgraph
from shardgraph import torch_api
from shardgraph.capture.capture import capture
from shardgraph.ir.copies import TO_DEVICE, TO_HOST, WAIT_COPY
from shardgraph.ir.operations import operation_name
from tests.zoo import make

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(150),
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
]


@pytest.fixture
def bare_group(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A process group of one rank, as a user makes it who names no backend."""
    for name, value in {"RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 0}.items():
        monkeypatch.setenv(name, str(value))
    dist.init_process_group()
    yield
    dist.destroy_process_group()


def blocks(width: int = 256, depth: int = 6) -> nn.Sequential:
    torch.manual_seed(0)

    def layer() -> nn.Module:
        return nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    return nn.Sequential(*[layer() for _ in range(depth)])


def losses(model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, eps=1e-5)
    found = []
    for _ in range(3):
        loss = model(x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return torch.stack(found)


def peak(model: nn.Module, x: torch.Tensor) -> int:
    model(x).square().mean().backward()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    model(x).square().mean().backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before


def test_a_process_group_of_no_named_backend_computes_on_the_gpu(bare_group):
    sharded = shardgraph.compile(blocks(depth=1), plan="fsdp")
    assert sharded(torch.randn(4, 256)).is_cuda


@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_training_of_one_rank_over_nccl_equals_the_eager_model(bare_group, plan):
    model, x = blocks(), torch.randn(64, 256, device="cuda")
    theirs = losses(copy.deepcopy(model).cuda(), x)
    ours = losses(shardgraph.compile(model, plan=plan), x)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=0)


def test_a_copy_to_the_host_and_back_on_streams_is_the_tensor():
    x = torch.randn(4096, 1024, device="cuda").sin()
    there = WAIT_COPY(TO_HOST(x), x)
    back = WAIT_COPY(TO_DEVICE(there, x.device), there)
    assert there.is_pinned() and torch.equal(back, x)


@pytest.mark.parametrize("options", [{"recompute": "full"}, {"offload": "activations"}], ids=str)
def test_what_is_not_kept_on_the_gpu_changes_no_loss_and_saves_memory(options):
    model, x = blocks().cuda(), torch.randn(4096, 256, device="cuda")
    plain = shardgraph.compile(copy.deepcopy(model), plan="single")
    saving = shardgraph.compile(copy.deepcopy(model), plan="single", **options)
    assert peak(saving, x) < peak(plain, x)
    torch.testing.assert_close(losses(saving, x), losses(plain, x), rtol=1e-4, atol=0)


ATTENTION_CALLS = {
    "flash": {"dtype": torch.bfloat16},
    "flash, causal, heads of an odd width": {"dtype": torch.float16, "causal": True, "width": 20},
    "flash, fewer heads of keys": {"dtype": torch.bfloat16, "heads": 2},
    "efficient": {"dtype": torch.float32, "heads": 1, "width": 12},
    "efficient, causal, more keys": {"dtype": torch.bfloat16, "keys": 57, "causal": True},
    "efficient, masked": {"dtype": torch.bfloat16, "keys": 57, "mask": (2, 1, 1, 57)},
    "formula": {"dtype": torch.float64, "mask": (41, 1)},
}


@pytest.mark.parametrize("call", ATTENTION_CALLS.values(), ids=ATTENTION_CALLS)
def test_kernels_of_attention_compute_the_formula(call):
    torch.manual_seed(0)
    dtype, width, causal = call["dtype"], call.get("width", 16), call.get("causal", False)
    query = torch.randn(2, 4, 41, width, dtype=dtype)
    key, value = (torch.randn(2, call.get("heads", 4), call.get("keys", 41), width, dtype=dtype) for _ in "kv")
    mask = torch.randn(call["mask"], dtype=dtype) if "mask" in call else None

    def computed(device: str, dtype: torch.dtype) -> list[torch.Tensor]:
        kernels = torch_api.attention_on("cuda" if device == "cuda" else "another")
        q, k, v, bias = (None if each is None else each.to(device, dtype) for each in (query, key, value, mask))
        results = kernels.forward(q, k, v, bias, causal, 0.3)
        return [each.double().cpu() for each in (*results, *kernels.backward(q, q, k, v, *results, bias, causal, 0.3))]

    half = dtype in (torch.bfloat16, torch.float16)
    tolerance = {"rtol": 2e-2, "atol": 5e-2} if half else {"rtol": 1e-3, "atol": 1e-3}
    torch.testing.assert_close(computed("cuda", dtype), computed("cpu", torch.float64), **tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_rms_norm_of_the_gpu_computes_the_formula(dtype):
    x, weight = torch.randn(3, 5, 16, dtype=dtype), torch.randn(16, dtype=dtype)

    def computed(kind: str) -> list[torch.Tensor]:
        given, scale = x.to(kind), weight.to(kind)
        kernels = torch_api.rms_norm_on(kind)
        out, rstd = kernels.forward(given, [16], scale, 1e-5)
        gradients = kernels.backward(given, given, [16], rstd, scale)
        return [each.cpu() for each in (out, rstd, *gradients) if each is not None]

    tolerance = {"rtol": 2e-2, "atol": 5e-2} if dtype is torch.bfloat16 else {}
    torch.testing.assert_close(computed("cuda"), computed("cpu"), **tolerance)


@pytest.mark.parametrize("name", ["llama", "gpt2", "conv-batch-norm", "t5"])
def test_a_graph_of_the_gpu_has_the_operations_of_one_of_the_cpu(name):
    model, (args, kwargs) = make(name, 2)

    def operations(device: str) -> list[str]:
        graph = capture(model, args, dict(kwargs), device=torch.device(device)).module.graph
        return [operation_name(node.target) for node in graph.nodes if node.op == "call_function"]

    assert operations("cuda") == operations("cpu")


@pytest.mark.parametrize("compiled", [False, True])
def test_measured_memory_has_backward_in_its_modules_and_is_within_the_allocators(compiled):
    model = shardgraph.compile(blocks().cuda(), "single") if compiled else blocks().cuda()
    optimizer, x = torch.optim.SGD(model.parameters(), lr=0.1), torch.randn(64, 256, device="cuda")
    for _ in range(2):  # the first call compiles
        with shardgraph.MemoryTracker(model, optimizer) as tracker:
            model(x).square().mean().backward()
        optimizer.zero_grad()
    trace = tracker.trace
    assert {each.module for each in trace.moments if each.half == "backward"} >= {each.module for each in trace.moments}
    assert 0 < trace.peak.live <= trace.allocated


def test_verify_compares_a_model_of_the_gpu_on_the_cpu():
    model = blocks(depth=2).cuda()
    report = shardgraph.verify(model, (torch.randn(4, 256, device="cuda"),), plan="fsdp")
    assert report.ok and all(parameter.is_cuda for parameter in model.parameters())
