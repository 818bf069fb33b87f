"""Ring attention is proved to be attention to all keys; with a fault in it, it is not."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from typing import Any

import pytest
import torch
from torch import fx

from shardgraph import ir
from shardgraph.ir import fused
from shardgraph.passes.lowering import build_program
from shardgraph.passes.program import Program
from shardgraph.plans.resolve import resolve_plan
from shardgraph.proof.prove import prove
from tests.test_context_parallel import BATCH, LENGTH, ROW, WIDTH, Attention, documents, program
from tests.zoo import make, shorter

pytestmark = pytest.mark.usefixtures("shared_captures")

aten = torch.ops.aten
X = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(0))
PACKED = documents(3, 5)
ADDED = torch.zeros(LENGTH, LENGTH).masked_fill(~PACKED, -torch.inf)
CALLS: dict[str, tuple[Attention, tuple[torch.Tensor, ...]]] = {
    "causal": (Attention(is_causal=True), (X,)),
    "everything": (Attention(), (X,)),
    "documents": (Attention(), (X, PACKED)),
    "added": (Attention(), (X, ADDED)),
    "padding": (Attention(), (X, ROW)),
    "grouped-heads": (Attention(heads_of_keys=2, is_causal=True, enable_gqa=True), (X,)),
}


@cache
def ring(call: str, ranks: int) -> Program:
    module, args = CALLS[call]
    return program(module, *args, cp=ranks)


@pytest.mark.parametrize("ranks", [2, 4])
@pytest.mark.parametrize("call", CALLS)
def test_attention_to_the_keys_of_one_rank_after_another_is_attention_to_all(call, ranks):
    made = ring(call, ranks)
    assert any(node.target is ir.send for node in made.forward.graph.nodes)
    found = prove(made)
    assert found.ok, str(found)


def _later(nodes: list[fx.Node]) -> None:
    node = next(node for node in nodes if node.target is ir.from_later)
    node.args = (node.args[0] + 1, *node.args[1:])


def _turn(target: Any) -> Callable[[list[fx.Node]], None]:
    def turn(nodes: list[fx.Node]) -> None:
        node = next(node for node in nodes if node.target is target)
        node.args = (node.args[1], node.args[0], *node.args[2:])

    return turn


def _without(target: Any, which: int = 0) -> Callable[[list[fx.Node]], None]:
    def drop(nodes: list[fx.Node]) -> None:
        node = [node for node in nodes if node.target is target][which]
        node.replace_all_uses_with(node.args[0])

    return drop


def _argument(target: Any, place: int, value: Any, which: int = 0) -> Callable[[list[fx.Node]], None]:
    def change(nodes: list[fx.Node]) -> None:
        node = [node for node in nodes if node.target is target][which]
        node.args = (*node.args[:place], value, *node.args[place + 1 :])

    return change


def _other_keys(nodes: list[fx.Node]) -> None:
    """The values of one step with the keys of another."""
    first, second = [node for node in nodes if node.target is fused.ATTENTION][:2]
    second.args = (second.args[0], first.args[1], *second.args[2:])


def _all_of_both(nodes: list[fx.Node]) -> None:
    """Queries and keys that are not cut where they should be."""
    for node in [node for node in nodes if node.target is aten.slice.Tensor][:3]:
        node.replace_all_uses_with(node.args[0])


FAULTS: dict[str, tuple[str, str, Callable[[list[fx.Node]], None]]] = {
    "another rank is the later one": ("causal", "forward", _later),
    "a later rank's keys are all seen": ("causal", "forward", _all_of_both),
    "keys of another step": ("causal", "forward", _other_keys),
    "the share of the others": ("causal", "forward", _turn(aten.sub.Tensor)),
    "averaged the other way about": ("everything", "forward", _turn(aten.lerp.Tensor)),
    "keys are not sent": ("everything", "forward", _without(ir.send)),
    "a step is left out": ("everything", "forward", _without(aten.logaddexp.default)),
    "not a share": ("everything", "forward", _without(aten.sigmoid.default)),
    "what is not seen counts as 1": ("causal", "forward", _argument(aten.constant_pad_nd.default, 2, 0.0, which=1)),
    "the last query is the one that sees nothing": (
        "causal", "forward", lambda nodes: _argument(
            aten.constant_pad_nd.default, 1, [0, 0, 0, next(n for n in nodes if n.target is ir.from_later)])(nodes)),
    "a mask of another rank's keys": ("documents", "forward", _argument(ir.local_part, 4, 0, which=-1)),
    "blind queries keep what the kernel has": ("documents", "forward", _without(aten.masked_fill.Scalar)),
    "blind queries have weight": ("documents", "forward", _without(aten.masked_fill.Scalar, 1)),
    "gradients are not sent home": ("everything", "backward", _without(ir.send, -1)),
    "a rank's own gradient is lost": ("causal", "backward", lambda nodes: _lost(nodes)),
    "a gradient of keys is padded as one of queries": (
        "causal", "backward", lambda nodes: _argument(
            aten.constant_pad_nd.default, 1, [0, 0, next(n for n in nodes if n.target is ir.from_later), 0], 1)(nodes)),
}  # fmt: skip


def _lost(nodes: list[fx.Node]) -> None:
    """What arrives is sent on without what the rank adds."""
    node = next(n for n in nodes if n.target is aten.add.Tensor and n.args[0].target is ir.WAIT)
    node.replace_all_uses_with(node.args[0])


@pytest.mark.parametrize("fault", FAULTS)
def test_a_ring_with_a_fault_is_not_proved(fault):
    call, half, change = FAULTS[fault]
    right = ring(call, 4)
    gm = ir.copy_graph(right.graphs[half])
    made = replace(right, graphs={**right.graphs, half: gm})
    before = str(gm.graph)
    change(list(gm.graph.nodes))
    assert str(gm.graph) != before, "the fault is not in the text"
    assert not prove(made).ok


@pytest.mark.slow
@pytest.mark.parametrize("name", ["fsdp+cp+tp", "fsdp+cp+tp+sp"])
def test_a_sequence_in_stripes_is_proved_in_whole_models_beside_other_axes(name):
    model, call = make("llama", 4)
    args, kwargs = shorter(call, 8)
    plan = resolve_plan(name, (("dp", 2), ("cp", 2), ("tp", 2)))
    found = prove(build_program(model, plan, args, kwargs))
    assert found.ok, str(found)


@pytest.mark.quick("llama-1")
@pytest.mark.parametrize("samples", [1, 2])  # of one, a rank's only head of keys and values has no dimension of its own
@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_stripes_that_ranks_divide_further_between_products_are_proved(model, samples):
    module, call = make(model, samples)
    args, kwargs = shorter(call, 8)
    found = prove(build_program(module, resolve_plan("cp+tp+sp", (("cp", 2), ("tp", 2))), args, kwargs))
    assert found.ok, str(found)
