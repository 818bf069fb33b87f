"""Attention reads the heads of keys and values that a model has, not the copies that it makes of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardgraph
from shardgraph import ir
from shardgraph.ir.fused import ATTENTION, ATTENTION_BACKWARD
from shardgraph.passes.lowering import build_program
from shardgraph.passes.program import Program
from shardgraph.plans.resolve import resolve_plan
from tests.test_analysis import llama, text

WIDTH, HEADS, LENGTH = 16, 4, 8
Repeat = Callable[[Tensor], Tensor]


class Grouped(nn.Module):
    """Causal attention whose ``HEADS`` heads of queries share two of keys and values, which ``repeat`` makes copies
    of; ``after`` has them too."""

    def __init__(self, repeat: Repeat, after: Callable[[Tensor, Tensor], Tensor] = lambda out, key: out) -> None:
        super().__init__()
        self.repeat, self.after = repeat, after
        self.queries, self.out = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.keys, self.values = (nn.Linear(WIDTH, WIDTH // 2, bias=False) for _ in range(2))

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        query, key, value = (
            each(x).unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)
            for each in (self.queries, self.keys, self.values)
        )
        key, value = self.repeat(key), self.repeat(value)
        out = F.scaled_dot_product_attention(query, key, value, attn_mask=mask, is_causal=mask is None)
        return self.out(self.after(out, key).transpose(1, 2).flatten(2))


def as_transformers_does(tensor: Tensor) -> Tensor:
    batch, heads, *rest = tensor.shape
    return tensor[:, :, None].expand(batch, heads, HEADS // heads, *rest).reshape(batch, HEADS, *rest)


def as_torch_does(tensor: Tensor) -> Tensor:
    return tensor.repeat_interleave(HEADS // tensor.shape[1], 1)


def one_after_the_other(tensor: Tensor) -> Tensor:
    """Not what attention with fewer heads means."""
    return torch.cat([tensor, tensor], 1)


def program(module: nn.Module, plan: str = "single", *args: Any, **mesh: int) -> Program:
    inputs = args or (torch.randn(2, LENGTH, WIDTH),)
    return build_program(module, resolve_plan(plan, tuple((mesh or {"dp": 1}).items())), inputs)


def heads_of_keys(made: Program) -> list[int]:
    """Of each attention, forward and then backward."""
    calls = [node for half in (made.forward, made.backward) for node in half.graph.nodes]
    at = {ATTENTION: 1, ATTENTION_BACKWARD: 2}
    return [node.args[at[node.target]].meta["val"].shape[1] for node in calls if node.target in at]


@pytest.mark.parametrize("repeat", [as_transformers_does, as_torch_does])
def test_copies_of_heads_are_not_made(repeat):
    made = program(Grouped(repeat))
    assert heads_of_keys(made) == [2, 2]
    assert not any(node.target is torch.ops.aten.expand.default for node in made.forward.graph.nodes)


def test_what_is_saved_for_backward_are_the_heads_that_there_are():
    made = build_program(llama(2), resolve_plan("single", (("dp", 1),)), (), text(2, 16))
    assert heads_of_keys(made) == [2, 2, 2, 2]


@pytest.mark.parametrize(
    ("module", "inputs"),
    [
        (Grouped(one_after_the_other), ()),
        (Grouped(as_torch_does), (torch.randn(2, LENGTH, WIDTH), torch.randn(2, 1, LENGTH, LENGTH))),
        (Grouped(as_torch_does, lambda out, key: out + key), ()),
    ],
    ids=["in another order", "under a mask", "whose copies are read elsewhere"],
)
def test_copies_stay_where_they_are_something_else(module, inputs):
    assert heads_of_keys(program(module, "single", *inputs)) == [HEADS, HEADS]


class OfOneToken(nn.Module):
    """Attention to a learned token, which is repeated otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Parameter(torch.randn(WIDTH // HEADS))

    def forward(self, x: Tensor) -> Tensor:
        query = x.unflatten(-1, (HEADS, -1)).transpose(1, 2)
        key = self.token.unsqueeze(0).expand(len(x) * HEADS * LENGTH, -1).reshape(query.shape)
        return F.scaled_dot_product_attention(query, key, key)


def test_other_repetitions_are_none_of_heads():
    assert heads_of_keys(program(OfOneToken())) == [HEADS, HEADS]


def freeze(module: Grouped) -> Grouped:
    module.keys.requires_grad_(False)
    return module


@pytest.mark.parametrize(
    "module",
    [
        Grouped(as_transformers_does),
        Grouped(as_torch_does),
        Grouped(one_after_the_other),
        Grouped(as_torch_does, lambda out, key: out + key),
        freeze(Grouped(as_torch_does)),
    ],
    ids=["transformers", "torch", "another order", "read elsewhere", "frozen keys"],
)
@pytest.mark.parametrize(("plan", "mesh"), [("fsdp", {"dp": 2}), ("tp", {"tp": 2}), ("cp+tp", {"cp": 2, "tp": 2})])
def test_training_equals_the_unsharded_model_and_is_proved(module, plan, mesh):
    x = torch.randn(2, LENGTH, WIDTH)
    report = shardgraph.verify(module, (x,), plan, mesh=mesh, fp64=True)
    assert report.ok and report.proof.ok, str(report)


def test_ranks_with_parts_of_the_heads_have_no_copies_either():
    assert heads_of_keys(program(Grouped(as_transformers_does), "tp", tp=2)) == [1, 1]


def test_more_ranks_than_heads_of_keys_have_a_copy_each():
    module = Grouped(as_transformers_does)
    assert heads_of_keys(program(module, "tp", tp=4)) == [1, 1]
    report = shardgraph.verify(module, (torch.randn(2, LENGTH, WIDTH),), "tp", mesh={"tp": 4}, fp64=True)
    assert report.ok, str(report)


def test_a_ring_passes_on_the_heads_that_there_are():
    def sent(module: nn.Module) -> int:
        made = program(module, "cp", cp=2)
        sends = (node for half in (made.forward, made.backward) for node in half.graph.nodes if node.target is ir.send)
        return sum(node.args[0].meta["val"].numel() for node in sends)

    assert 2 * sent(Grouped(as_transformers_does)) == sent(Grouped(one_after_the_other))
