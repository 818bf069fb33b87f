"""Masks known from lengths alone: causal ones become causal kernels, without computing squares; all others stay."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx

import shardgraph
from shardgraph.capture import known_values
from shardgraph.capture.capture import capture
from shardgraph.ir.fused import ATTENTION, ATTENTION_BACKWARD

LENGTH = 6


class Attention(nn.Module):
    """Self-attention under the mask that ``mask(length)`` makes."""

    def __init__(self, mask, keys: int = 0) -> None:
        super().__init__()
        self.project, self.mask, self.keys = nn.Linear(8, 24), mask, keys
        self.register_buffer("table", torch.ones(LENGTH, LENGTH, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor, *others: torch.Tensor) -> torch.Tensor:
        q, k, v = self.project(x).view(*x.shape[:2], 2, 12).transpose(1, 2).chunk(3, -1)
        queries = q[:, :, self.keys :]
        return F.scaled_dot_product_attention(queries, k, v, self.mask(self, x.shape[1], *others))


def positions(length: int) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.arange(length)[:, None], torch.arange(length)


def compared(_, length):
    query, key = positions(length)
    return (key <= query)[None, None].expand(1, 1, length, length)


def of_equal_segments(_, length):
    """As libraries write it for packed documents, where there is one document."""
    query, key = positions(length)
    document = torch.cat([torch.ones(1, dtype=torch.int64), torch.arange(length).diff()]).ne(1).cumsum(0)
    return (key <= query) & (document[query] == document[key])


CAUSAL = {
    "positions compared": compared,
    "ones below the diagonal": lambda _, n: torch.ones(n, n, dtype=torch.bool).tril(),
    "infinity above it": lambda _, n: torch.full((n, n), -torch.inf).triu(1),
    "the least number": lambda _, n: torch.zeros(n, n).masked_fill(~compared(_, n)[0, 0], torch.finfo().min),
    "a window of all": lambda _, n: compared(_, n) & (positions(n)[0] - positions(n)[1] < n),
    "and what hides nothing": lambda _, n: torch.logical_and(compared(_, n), torch.ones(n, dtype=torch.bool)),
    "one document": of_equal_segments,
    "differences": lambda _, n: torch.where(positions(n)[1] - positions(n)[0] > 0, -torch.inf, 0.0)[None, None],
}
NONE = {
    "ones": lambda _, n: torch.ones(2, 1, n, n, dtype=torch.bool),
    "zeros": lambda _, n: torch.zeros(n, n),
    "each key after some": lambda _, n: positions(n)[1] - positions(n)[0] < n,
}
OTHER = {
    "a short window": lambda _, n: compared(_, n) & (positions(n)[0] - positions(n)[1] < n - 1),
    "not itself": lambda _, n: torch.full((n, n), -torch.inf).triu(0).masked_fill(torch.eye(n).bool()[:, :1], 0.0),
    "one more": lambda _, n: torch.ones(n, n, dtype=torch.bool).tril(1),
    "the later ones": lambda _, n: torch.ones(n, n, dtype=torch.bool).triu(),
    "not quite hidden": lambda _, n: torch.full((n, n), -3.0).triu(1),
    "a buffer": lambda model, n: model.table[:n, :n],
    "two documents": lambda _, n: compared(_, n) & ((positions(n)[0] < 3) == (positions(n)[1] < 3)),
    "of the first alone": lambda _, n: torch.stack([torch.ones(n, n).tril(), torch.ones(n, n)])[:, None].bool(),
}


def attentions(model: nn.Module, *args: torch.Tensor) -> set[tuple[bool, bool]]:
    """(has a mask, is causal) of all attention in the captured graph."""
    graph = capture(model, args, {}, device=torch.device("cpu")).module.graph
    found = [node.args[-3:-1] for node in graph.nodes if node.target in (ATTENTION, ATTENTION_BACKWARD)]
    assert len(found) == 2
    return {(mask is not None, causal) for mask, causal in found}


X = torch.randn(2, LENGTH, 8, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("mask", CAUSAL)
def test_a_causal_mask_becomes_a_causal_kernel_and_is_not_made(mask):
    model = Attention(CAUSAL[mask])
    assert attentions(model, X) == {(False, True)}
    graph = capture(model, (X,), {}, device=torch.device("cpu")).module.graph
    assert not [node for node in graph.nodes if "arange" in node.name or "tri" in node.name]
    assert shardgraph.verify(model, (X,), "ddp", world_size=2).ok


@pytest.mark.parametrize("mask", NONE)
def test_a_mask_that_hides_nothing_is_dropped(mask):
    assert attentions(Attention(NONE[mask]), X) == {(False, False)}


@pytest.mark.parametrize("mask", OTHER)
def test_any_other_mask_stays(mask):
    assert attentions(Attention(OTHER[mask]), X) == {(True, False)}


def test_a_mask_that_depends_on_the_call_stays():
    model = Attention(lambda _, n, padding: compared(_, n) & padding[:, None, None])
    assert attentions(model, X, torch.ones(2, LENGTH, dtype=torch.bool)) == {(True, False)}


def test_fewer_queries_than_keys_keep_their_mask():
    """A causal kernel's first query would see the first key alone."""
    last = Attention(lambda _, n: torch.ones(n - 2, n, dtype=torch.bool).tril(2), keys=2)
    assert attentions(last, X) == {(True, False)}


def test_a_length_whose_square_no_machine_holds_is_known_too():
    with torch.device("meta"):
        model, x = Attention(of_equal_segments), torch.empty(1, 2**20, 8)
    assert attentions(model, x) == {(False, True)}


@pytest.mark.skipif(torch.__version__ < "2.12", reason="torch 2.11 traces slices with indices on the default device")
def test_values_are_known_whatever_the_default_device_is():
    model = Attention(lambda _, n: torch.ones(n, n, dtype=torch.bool, device="cpu").tril())
    with torch.device("meta"):
        assert attentions(model, X) == {(False, True)}


FORMULAS = {
    "compared": lambda: torch.arange(5)[:, None] >= torch.arange(1, 8),
    "compared, transposed": lambda: torch.arange(5) >= torch.arange(1, 8)[:, None],
    "in the middle": lambda: (torch.arange(3)[:, None, None] - torch.arange(4, 9)[:, None]).expand(3, 5, 2),
    "a triangle": lambda: torch.ones(2, 5, 7).triu(1).tril(3),
    "sliced": lambda: (torch.arange(5)[:, None] >= torch.arange(7))[None].expand(4, 5, 7)[1:3],
    "cut through": lambda: (torch.arange(5)[:, None] >= torch.arange(7))[1:, 2:],
    "permuted": lambda: (torch.arange(5)[:, None] >= torch.arange(7)).transpose(0, 1),
    "two of them": lambda: (torch.arange(5)[:, None] > torch.arange(7)) | (torch.arange(5)[:, None] < torch.arange(7)),
    "with a row": lambda: (torch.arange(5)[:, None] > torch.arange(7)).float() + torch.arange(7),
    "across": lambda: (torch.arange(5)[:, None] > torch.arange(5)) & (torch.arange(5)[:, None] > torch.arange(5)).T,
    "not consecutive": lambda: torch.arange(0, 10, 2)[:, None] >= torch.arange(7),
    "products": lambda: torch.arange(5)[:, None] * torch.arange(7),
    "a choice": lambda: torch.where(torch.arange(5)[:, None] >= torch.arange(5), 1.5, torch.full((5, 5), -2.0).triu(2)),
    "of one element": lambda: torch.ones(1, 1).tril() + torch.arange(3)[:, None, None],
    "a triangle of one row": lambda: torch.ones(1, 4).triu(1).expand(3, 4),
    "reshaped": lambda: (torch.arange(5)[:, None] >= torch.arange(7)).view(1, 5, 1, 7).squeeze(),
    "flattened": lambda: (torch.arange(5)[:, None] >= torch.arange(7)).flatten(),
}


ONLY_WHOLE = {"cut through", "permuted", "with a row", "across", "not consecutive", "products", "flattened"}


@pytest.mark.parametrize("formula", FORMULAS)
def test_what_is_known_is_what_is_computed(formula):
    gm = make_fx(FORMULAS[formula], tracing_mode="fake")()
    value = known_values.known(gm.graph.output_node().args[0], {})
    torch.testing.assert_close(value.whole(), FORMULAS[formula](), rtol=0, atol=0)


@pytest.mark.parametrize("formula", FORMULAS)
def test_what_is_too_large_to_compute_is_known_from_differences_or_not_at_all(formula, monkeypatch):
    gm = make_fx(FORMULAS[formula], tracing_mode="fake")()
    with monkeypatch.context() as small:
        small.setattr(known_values, "LARGEST", 14)
        value = known_values.known(gm.graph.output_node().args[0], {})
    assert (value is None) == (formula in ONLY_WHOLE)
    if value is not None:
        torch.testing.assert_close(value.whole(), FORMULAS[formula](), rtol=0, atol=0)


def test_random_numbers_are_not_known():
    gm = make_fx(lambda: torch.rand(4) > 2, tracing_mode="fake")()
    assert known_values.known(gm.graph.output_node().args[0], {}) is None
