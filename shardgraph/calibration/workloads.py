"""The operations that calibration times, by kind of work: those that models run, in their sizes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

from shardgraph.cost_models.compute import causal_part

aten = torch.ops.aten


@dataclass(frozen=True)
class Work:
    """``count`` operations, each of ``work`` FLOPs or bytes."""

    work: float
    run: Callable[[], object]
    count: int = 1


@dataclass(frozen=True)
class Maker:
    """Makes the inputs of operations on one device in one dtype."""

    device: torch.device
    dtype: torch.dtype

    def __call__(self, *shape: int) -> torch.Tensor:
        return torch.randn(*shape, device=self.device).to(self.dtype)

    def indices(self, count: int, below: int) -> torch.Tensor:
        return torch.randint(below, (count,), device=self.device)


def rows_for(device: torch.device, rows: int) -> int:
    return rows if device.type == "cpu" else 8 * rows  # a GPU is not full before


def _counted(run: Callable[[], object]) -> Work:
    with FlopCounterMode(display=False) as counter:
        run()
    return Work(counter.get_total_flops(), run)


def _matmul(new: Maker) -> Iterator[Work]:
    """A linear layer's forward and the two products of its backward."""
    for rows, inner, outer in (
        (8, 64, 64),
        (128, 64, 64),
        (128, 256, 256),
        (512, 128, 512),
        (512, 512, 512),
        (512, 512, 2048),
        (2048, 512, 512),
        (1024, 1024, 2048),
    ):
        x, weight, bias = new(rows_for(new.device, rows), inner), new(outer, inner), new(outer)
        grad = new(rows_for(new.device, rows), outer)
        yield _counted(partial(torch.addmm, bias, x, weight.t()))
        yield _counted(partial(torch.mm, grad, weight))
        yield _counted(partial(torch.mm, grad.t(), x))


def _attention(new: Maker) -> Iterator[Work]:
    for batch, heads, length, width in (
        (1, 2, 32, 32),
        (4, 4, 64, 32),
        (4, 4, 128, 64),
        (2, 8, 256, 64),
        (1, 8, 512, 64),
    ):
        shape = (rows_for(new.device, batch), heads, length, width)
        for causal in (False, True):
            query, key, value = (new(*shape).requires_grad_() for _ in range(3))
            attend = partial(F.scaled_dot_product_attention, query, key, value, is_causal=causal)
            out, inputs, grad = attend(), (query, key, value), new(*shape)
            # The formulas, not the counter: it has none for the CPU's kernel.
            part = causal_part(length) if causal else 1.0
            yield Work(part * sdpa_flop_count(shape, shape, shape), attend)
            yield Work(
                part * sdpa_backward_flop_count(shape, shape, shape, shape),
                partial(torch.autograd.grad, out, inputs, grad, retain_graph=True),
            )


def _convolution(new: Maker) -> Iterator[Work]:
    for batch, inside, outside, size, kernel in (
        (1, 3, 8, 8, 3),
        (4, 3, 16, 32, 3),
        (8, 16, 32, 32, 3),
        (8, 64, 64, 16, 1),
        (8, 64, 64, 16, 3),
        (8, 128, 128, 14, 3),
    ):
        x, weight = new(rows_for(new.device, batch), inside, size, size), new(outside, inside, kernel, kernel)
        settings: tuple[Any, ...] = ([1, 1], [kernel // 2] * 2, [1, 1], False, [0, 0], 1)
        grad = torch.ones_like(aten.convolution(x, weight, None, *settings))
        yield _counted(partial(aten.convolution, x, weight, None, *settings))
        yield _counted(partial(aten.convolution_backward, grad, x, weight, [0], *settings, [True, True, False]))


_SHAPES = ((4, 64), (64, 128), (128, 512), (512, 512), (512, 2048), (2048, 2048))  # 1 KiB to 16 MiB of float32


def _moving(operation: Callable[..., Any], *args: Any) -> Work:
    """One operation by the bytes of its inputs and outputs, once each; its result is allocated each time."""
    return Work(_bytes(args) + _bytes(operation(*args)), lambda: operation(*args))


def _bytes(values: Any) -> int:
    return sum(leaf.nbytes for leaf in tree_leaves(values) if isinstance(leaf, torch.Tensor))


def _pointwise(new: Maker) -> Iterator[Work]:
    for rows, width in _SHAPES:
        x, y = new(rows_for(new.device, rows), width), new(rows_for(new.device, rows), width)
        yield _moving(torch.add, x, y)
        yield _moving(torch.mul, x, y)
        yield _moving(torch.clone, x)
        heads = x.view(-1, 4, width // 4).transpose(0, 1)  # as attention brings its heads to the front
        yield _moving(partial(torch.clone, memory_format=torch.contiguous_format), heads)


def _transcendental(new: Maker) -> Iterator[Work]:
    for rows, width in _SHAPES[:-1]:
        x, grad = new(rows_for(new.device, rows), width), new(rows_for(new.device, rows), width)
        yield _moving(torch.exp, x)
        for forward, backward in ((aten.gelu, aten.gelu_backward), (aten.silu, aten.silu_backward)):
            yield _moving(forward, x)
            yield _moving(backward, grad, x)
        for forward, backward in (
            (aten._softmax, aten._softmax_backward_data),
            (aten._log_softmax, aten._log_softmax_backward_data),
        ):
            yield _moving(forward, x, -1, False)
            yield _moving(backward, grad, forward(x, -1, False), -1, new.dtype)


def _reduction(new: Maker) -> Iterator[Work]:
    # Without var: its CPU kernel is 20 times slower than all others, and models have layer norm instead.
    for rows, width in _SHAPES:
        x, grad = new(rows_for(new.device, rows), width), new(rows_for(new.device, rows), width)
        weight, bias = new(width), new(width)
        yield _moving(torch.sum, x)
        yield _moving(torch.sum, x, 0)  # the gradient of a bias
        yield _moving(torch.mean, x, -1)
        yield _moving(aten.native_layer_norm, x, [width], weight, bias, 1e-5)
        _, mean, rstd = aten.native_layer_norm(x, [width], weight, bias, 1e-5)
        yield _moving(aten.native_layer_norm_backward, grad, x, [width], mean, rstd, weight, bias, [True] * 3)


def _gather(new: Maker) -> Iterator[Work]:
    for rows, width, entries in ((8, 32, 64), (64, 128, 256), (256, 256, 1024), (512, 512, 2048), (1024, 1024, 4096)):
        rows = rows_for(new.device, rows)
        table, chosen = new(entries, width), new.indices(rows, entries)
        yield _selecting(aten.embedding, table, chosen)
        yield _selecting(torch.index_select, table, 0, chosen)
        yield _moving(aten.embedding_dense_backward, new(rows, width), chosen, entries, -1, False)
        logits, target = new(rows, entries), new.indices(rows, entries)
        loss = (logits, target, None, 1, -100)
        yield _selecting(aten.nll_loss_forward, *loss)
        mean, total = aten.nll_loss_forward(*loss)
        yield _moving(aten.nll_loss_backward, mean, *loss, total)


def _selecting(operation: Callable[..., Any], *args: Any) -> Work:
    """As :func:`_moving`, for what reads as much of its table as it writes: as programs are priced."""
    return Work(2 * _bytes(operation(*args)) + _bytes(args[1:]), lambda: operation(*args))


def _optimizer(new: Maker) -> Iterator[Work]:
    """A step of AdamW: reads parameter, gradient and two moments, writes all but the gradient.

    On several ranks parameters are DTensors, as a compiled module's are: of small ones that is most of the time.
    """
    count = 8  # parameters, so that what a step costs besides them is shared as in a model
    mesh = init_device_mesh(new.device.type, (dist.get_world_size(),)) if dist.is_initialized() else None
    for size in (64, 4096, 32768, 262144, 1048576):
        parameters = [new(rows_for(new.device, size)) for _ in range(count)]
        if mesh is not None:
            parameters = [DTensor.from_local(parameter, mesh, [Shard(0)]) for parameter in parameters]
        for parameter in parameters:
            parameter.requires_grad_()
            parameter.grad = torch.ones_like(parameter)
        nbytes = parameters[0].nbytes // (1 if mesh is None else mesh.size())
        yield Work(7 * nbytes, torch.optim.AdamW(parameters).step, count)


WORKLOADS: dict[str, Callable[[Maker], Iterator[Work]]] = {
    "matmul": _matmul,
    "attention": _attention,
    "convolution": _convolution,
    "pointwise": _pointwise,
    "transcendental": _transcendental,
    "reduction": _reduction,
    "gather": _gather,
    "optimizer": _optimizer,
}
