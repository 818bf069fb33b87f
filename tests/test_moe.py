"""The mixture-of-experts layer: equal to a loop over tokens, alone in its groups, and sharded like any other module."""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import shardgraph
from shardgraph.capture.capture import capture
from shardgraph.module.materialize import materialize
from shardgraph.nn import MoE, TopKGate
from shardgraph.passes.analysis.costs import node_costs

ACTIVATIONS = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}


def expert(moe: MoE, number: int, token: Tensor) -> Tensor:
    """One expert on one token [d_model], as a formula."""
    parts = moe.experts

    def affine(kind: str, value: Tensor) -> Tensor:
        weight, bias = getattr(parts, f"w_{kind}"), getattr(parts, f"b_{kind}")
        return value @ weight[number] + (0 if bias is None else bias[number])

    if parts.activation == "swiglu":
        return affine("out", F.silu(affine("gate", token)) * affine("in", token))
    return affine("out", ACTIVATIONS[parts.activation](affine("in", token)))


def by_loops(moe: MoE, x: Tensor) -> tuple[Tensor, Tensor, int]:
    """What a MoE is, one token and choice at a time; the last result counts the choices that were dropped."""
    gate, dropped = moe.gate, 0
    outputs, losses = [], []
    for group in x:
        probabilities = [(gate.weight @ token).softmax(0) for token in group]
        choices = [sorted(range(gate.num_experts), key=lambda e, p=p: -p[e].item())[: gate.k] for p in probabilities]
        room = [gate.capacity(len(group))] * gate.num_experts
        kept: list[list[int]] = [[] for _ in group]
        for choice in range(gate.k):
            for token, chosen in enumerate(choices):
                if room[chosen[choice]]:
                    room[chosen[choice]] -= 1
                    kept[token].append(chosen[choice])
                else:
                    dropped += 1
        for token, (p, taken) in enumerate(zip(probabilities, kept, strict=True)):
            total = sum(p[e] for e in taken) if gate.normalize_gates and gate.k > 1 else 1
            weighted = [p[e] / total * expert(moe, e, group[token]) for e in taken]
            outputs.append(torch.stack(weighted).sum(0) if weighted else torch.zeros_like(group[token]))
        for e in range(gate.num_experts):
            fraction = sum(chosen[0] == e for chosen in choices) / len(group)
            losses.append(gate.num_experts * fraction * torch.stack(probabilities)[:, e].mean())
    return torch.stack(outputs).view_as(x), torch.stack(losses).sum() / len(x), dropped


def gradients(output: Tensor, aux_loss: Tensor, inputs: list[Tensor]) -> tuple[Tensor, ...]:
    return torch.autograd.grad(
        (output * torch.linspace(-1, 1, output[0].numel()).view_as(output[0])).sum() + 0.3 * aux_loss, inputs
    )


def check_equals_loops(moe: MoE, groups: int = 2, tokens: int = 7) -> int:
    """Output, auxiliary loss and all gradients; returns how many choices were dropped."""
    moe.double()
    x = torch.randn(groups, tokens, moe.gate.d_model, dtype=torch.float64, requires_grad=True)
    inputs = [x, *moe.parameters()]
    output, aux_loss = moe(x)
    expected_output, expected_loss, dropped = by_loops(moe, x)
    torch.testing.assert_close(output, expected_output)
    torch.testing.assert_close(aux_loss, expected_loss)
    torch.testing.assert_close(
        gradients(output, aux_loss, inputs), gradients(expected_output, expected_loss, inputs), rtol=1e-9, atol=1e-12
    )
    return dropped


@pytest.mark.parametrize("capacity_factor", [0.5, 1.0, None])
@pytest.mark.parametrize("normalize_gates", [True, False])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_output_loss_and_gradients_equal_a_loop_over_tokens(k, normalize_gates, capacity_factor):
    torch.manual_seed(k)
    moe = MoE(5, 6, 4, k, capacity_factor, "silu", normalize_gates=normalize_gates)
    dropped = check_equals_loops(moe)
    assert (dropped > 0) == (capacity_factor is not None)


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("activation", ["gelu", "silu", "relu", "swiglu"])
def test_every_activation_equals_a_loop_over_tokens(activation, bias):
    torch.manual_seed(0)
    check_equals_loops(MoE(5, 6, 3, activation=activation, bias=bias))


def test_one_expert_is_a_feed_forward_network():
    torch.manual_seed(0)
    moe = MoE(5, 6, 1, k=1, activation="gelu")
    x = torch.randn(2, 3, 5)
    output, aux_loss = moe(x)
    torch.testing.assert_close(output, F.gelu(x @ moe.experts.w_in[0]) @ moe.experts.w_out[0])
    assert aux_loss.item() == pytest.approx(1)


def test_all_experts_with_room_are_a_weighted_sum_of_dense_networks():
    torch.manual_seed(0)
    moe = MoE(5, 6, 3, k=3, capacity_factor=None)
    x = torch.randn(2, 8, 5)
    dense = torch.stack(
        [F.gelu(x @ w_in) @ w_out for w_in, w_out in zip(moe.experts.w_in, moe.experts.w_out, strict=True)]
    )
    weights = (x @ moe.gate.weight.T).softmax(-1)
    torch.testing.assert_close(moe(x)[0], torch.einsum("gse,egsd->gsd", weights, dense))


# -- groups and capacity ---------------------------------------------------------------------------


def test_a_group_comes_out_the_same_whatever_the_others_hold():
    torch.manual_seed(0)
    moe = MoE(5, 6, 4, capacity_factor=0.7).double()
    x = torch.randn(3, 8, 5, dtype=torch.float64)
    together, loss = moe(x)
    apart = [moe(group.unsqueeze(0)) for group in x]
    torch.testing.assert_close(together, torch.cat([output for output, _ in apart]), rtol=1e-12, atol=0)
    torch.testing.assert_close(loss, torch.stack([aux for _, aux in apart]).mean())


def steered(moe: MoE, *preferences: list[int]) -> Tensor:
    """One group of tokens that prefer experts in the given orders."""
    with torch.no_grad():
        moe.gate.weight.copy_(torch.eye(*moe.gate.weight.shape))
    x = torch.zeros(1, len(preferences), moe.gate.d_model)
    for token, order in enumerate(preferences):
        for rank, number in enumerate(order):
            x[0, token, number] = -float(rank)
    return x


def test_first_choices_are_served_before_earlier_tokens_second_choices():
    moe = MoE(3, 4, 3, k=2, capacity_factor=0.5)  # 4 tokens: room for 2 in each expert
    x = steered(moe, [0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 0, 2])
    kept = moe.gate(x).kept[0].tolist()
    assert moe.gate.capacity(4) == 2
    assert kept[0] == [True, True, False, True]  # expert 0 is full when the third comes
    assert kept[1] == [True, False, False, False]  # expert 1 has the fourth token's first choice already


def test_a_token_that_lost_all_its_choices_comes_out_as_zero():
    moe = MoE(3, 4, 3, k=1, capacity_factor=1.0, bias=True)
    output, _ = moe(steered(moe, [0, 1, 2], [0, 1, 2], [0, 1, 2]))
    assert output[0, 0].any() and not output[0, 1:].any()


def test_weights_add_up_to_one_over_the_choices_that_were_kept():
    moe = MoE(3, 4, 3, k=2, capacity_factor=0.5)
    routing = moe.gate(steered(moe, [0, 1, 2], [0, 1, 2], [0, 1, 2], [1, 0, 2]))
    torch.testing.assert_close(routing.weights.sum(1), torch.tensor([[1.0, 1.0, 0.0, 1.0]]))


def test_equal_logits_choose_the_first_experts():
    gate = TopKGate(4, 5, k=3)
    assert gate(torch.zeros(1, 2, 4)).experts.tolist() == [[[0, 0], [1, 1], [2, 2]]]


@pytest.mark.parametrize(
    ("factor", "k", "tokens", "experts", "rows"),
    [(1.0, 2, 8, 4, 4), (1.25, 2, 8, 4, 5), (1.1, 2, 10, 2, 10), (1.1, 1, 100, 10, 11), (0.01, 1, 8, 4, 1)],
)
def test_capacity_is_a_share_of_the_choices_between_one_row_and_one_per_token(factor, k, tokens, experts, rows):
    assert TopKGate(3, experts, k, factor).capacity(tokens) == rows
    assert TopKGate(3, experts, k, None).capacity(tokens) == tokens


def test_the_auxiliary_loss_is_one_when_even_and_the_number_of_experts_at_worst():
    moe = MoE(4, 4, 4)
    even = steered(moe, [0, 1, 2, 3], [1, 2, 3, 0], [2, 3, 0, 1], [3, 0, 1, 2])
    assert moe(even)[1].item() == pytest.approx(1)
    assert moe(1e3 * steered(moe, *[[0, 1, 2, 3]] * 4))[1].item() == pytest.approx(4)


# -- choices that are drawn ------------------------------------------------------------------------


def test_second_choices_are_drawn_in_proportion_to_their_probabilities():
    torch.manual_seed(0)
    gate = TopKGate(4, 4, k=2, sampled=True)
    x = torch.tensor([4.0, 1.0, 0.0, -1.0]).expand(1, 20000, 4)
    with torch.no_grad():
        gate.weight.copy_(torch.eye(4))
    experts = gate(x).experts[0]
    assert (experts[0] == 0).all()
    drawn = experts[1].bincount(minlength=4) / 20000
    torch.testing.assert_close(drawn, torch.cat([torch.zeros(1), x[0, 0, 1:].softmax(0)]), rtol=0, atol=0.015)


def test_nothing_is_drawn_in_evaluation():
    moe = MoE(4, 4, 4, sampled=True).eval()
    x = torch.randn(2, 8, 4)
    state = torch.get_rng_state()
    moe(x)
    assert torch.equal(torch.get_rng_state(), state)


# -- precision and gradients -----------------------------------------------------------------------


def test_the_gate_decides_in_single_precision_in_a_half_precision_model():
    torch.manual_seed(0)
    moe = MoE(16, 8, 8).bfloat16()
    x = torch.randn(2, 32, 16).bfloat16()
    routing = moe.gate(x)
    exact = (x.float() @ moe.gate.weight.float().T).softmax(-1).topk(2)
    assert torch.equal(routing.experts, exact.indices.transpose(1, 2))
    output, aux_loss = moe(x)
    assert (output.dtype, routing.weights.dtype, aux_loss.dtype) == (torch.bfloat16, torch.float32, torch.float32)


def test_the_gate_decides_in_single_precision_under_autocast():
    torch.manual_seed(0)
    moe = MoE(16, 8, 8, bias=True)
    x = torch.randn(2, 32, 16)
    expected = moe.gate(x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        routing, (output, _) = moe.gate(x), moe(x)
    assert output.dtype == torch.bfloat16  # the experts do follow autocast
    for ours, theirs in zip(routing, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=0)


@pytest.mark.parametrize("k", [1, 2])
def test_the_gate_learns_from_the_output_and_from_the_auxiliary_loss(k):
    torch.manual_seed(0)
    moe = MoE(5, 6, 4, k)
    output, aux_loss = moe(torch.randn(2, 8, 5))
    for source in (output.square().mean(), aux_loss):
        (gradient,) = torch.autograd.grad(source, [moe.gate.weight], retain_graph=True)
        assert gradient.abs().max() > 1e-4


# -- sharded ---------------------------------------------------------------------------------------


class Block(nn.Module):
    """A transformer's block with experts for its feed-forward part, and its loss."""

    def __init__(self, **options) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)
        self.norms = nn.ModuleList([nn.LayerNorm(8), nn.LayerNorm(8)])
        self.moe = MoE(8, 12, 4, **options)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        normed = self.norms[0](x)
        x = x + self.attention(normed, normed, normed, need_weights=False)[0]
        out, aux_loss = self.moe(self.norms[1](x))
        out = x + out
        return {"out": out, "loss": out.square().mean() + 0.01 * aux_loss}


@pytest.mark.quick("options2")
@pytest.mark.parametrize("options", [{"activation": "swiglu", "bias": True, "k": 3}, {"sampled": True}, {"k": 1}])
def test_a_block_with_experts_is_sharded_and_equal(options):
    torch.manual_seed(0)
    report = shardgraph.verify(Block(**options), (torch.randn(4, 6, 8),), "fsdp", world_size=2, steps=2, fp64=True)
    assert report.ok, str(report)
    assert "cut among the ranks" in str(report)


def test_the_ranks_gradients_average_to_those_of_the_whole_batch():
    torch.manual_seed(0)
    model = Block(capacity_factor=0.6).double()
    x = torch.randn(4, 6, 8, dtype=torch.float64)

    def of(part: Tensor) -> tuple[Tensor, ...]:
        return torch.autograd.grad(model(part)["loss"], list(model.parameters()))

    halves = zip(*(of(part) for part in x.chunk(2)), strict=True)
    torch.testing.assert_close(tuple(torch.stack(pair).mean(0) for pair in halves), of(x))


@pytest.mark.parametrize("autocast", [False, True])
def test_it_is_captured_as_one_graph_of_operations_that_have_a_cost(autocast):
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
        graph = capture(Block(), (torch.randn(4, 6, 8),), {}, device=torch.device("cpu")).module
    costs = node_costs(graph)
    assert [node.name for node, cost in costs.items() if not cost.known] == []
    assert sum(node.target is torch.ops.aten.bmm.default for node in costs) == 6  # 2 matrices, forward and backward


def test_a_rule_for_experts_means_the_parameters_with_experts_in_dim_0():
    moe = MoE(5, 6, 4, activation="swiglu", bias=True)
    assert {name.split(".")[0]: parameter.shape[0] for name, parameter in moe.named_parameters()} == {
        "gate": 4,
        "experts": 4,
    }
    assert sum(name.startswith("experts.") for name, _ in moe.named_parameters()) == 6


# -- building --------------------------------------------------------------------------------------


def test_on_meta_it_is_initialised_with_the_values_of_the_unsharded_one():
    torch.manual_seed(3)
    real = MoE(5, 6, 4, activation="swiglu", bias=True)
    values: dict[str, Tensor] = {}
    torch.manual_seed(3)
    meta = MoE(5, 6, 4, activation="swiglu", bias=True, device="meta")
    materialize(
        meta, torch.device("cpu"), store=lambda fqn, full: values.update({fqn: full.clone()}), fetch=values.__getitem__
    )
    torch.testing.assert_close(values, dict(real.state_dict()), rtol=0, atol=0)


def test_on_meta_it_says_the_shapes_of_its_results():
    output, aux_loss = MoE(5, 6, 4, device="meta")(torch.randn(2, 3, 5, device="meta"))
    assert (output.shape, aux_loss.shape) == ((2, 3, 5), ())


def test_initial_values_are_those_of_linear_layers():
    torch.manual_seed(0)
    moe = MoE(64, 256, 4, bias=True)
    with torch.no_grad():
        for parameter in moe.parameters():
            parameter.fill_(math.nan)
    moe.reset_parameters()
    bounds = {name: parameter.abs().max().item() for name, parameter in moe.named_parameters()}
    expected = {name: 1 / 16 if name.endswith("_out") else 1 / 8 for name in bounds}
    assert bounds == pytest.approx(expected, rel=0.03)


def test_it_prints_what_it_was_built_with():
    text = repr(MoE(5, 6, 4, 3, None, "swiglu"))
    assert "TopKGate(5, num_experts=4, k=3, capacity_factor=None" in text
    assert "Experts(4, 5, 6, activation='swiglu', bias=False)" in text


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"k": 5}, r"k=5 asks for 5 different experts.*num_experts=4: take k up to 4"),
        ({"k": 0}, r"k=0.*must be at least 1"),
        ({"num_experts": 0}, r"num_experts=0.*must be at least 1"),
        ({"d_hidden": 0}, r"d_hidden=0.*must be at least 1"),
        ({"capacity_factor": 0.0}, r"capacity_factor=0.0.*above 0 and finite.*None"),
        ({"capacity_factor": math.inf}, r"capacity_factor=inf.*None"),
        ({"activation": "swigelu"}, r"no activation 'swigelu'; there are gelu, .*; did you mean 'swiglu'"),
    ],
)
def test_what_cannot_be_built_is_refused(arguments, message):
    with pytest.raises(shardgraph.ShardGraphError, match=message):
        MoE(**{"d_model": 5, "d_hidden": 6, "num_experts": 4} | arguments)


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((7, 5), r"given \[7, 5\], and takes \[groups, tokens, d_model\].*x.view\(groups, -1, 5\)"),
        ((2, 7, 6), r"d_model=5 was given \[2, 7, 6\], whose tokens are 6 wide"),
    ],
)
def test_an_input_that_does_not_fit_is_refused(shape, message):
    with pytest.raises(shardgraph.ShardGraphError, match=message):
        MoE(5, 6, 4)(torch.randn(shape))


def test_a_forward_that_asks_whether_there_is_autocast_is_captured():
    class Asks(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) if torch.amp.is_autocast_available(x.device.type) else x

    joint = capture(Asks(4, 4), (torch.randn(2, 4),), {}, device=torch.device("cpu"))
    assert any("addmm" in str(node.target) for node in joint.module.graph.nodes)
