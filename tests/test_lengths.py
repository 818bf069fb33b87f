"""Inputs of many lengths: what is told of programs that are compiled for them, and padding to few lengths."""

from __future__ import annotations

import copy
import random
import re
import warnings

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import Lengths, Pipeline, PlanError, ShardGraphError
from shardgraph.module import programs as module
from shardgraph.module.programs import Programs
from tests import padded
from tests.standing import on_ranks
from tests.uneven import apart

EXACT = 1e-9  # double precision


def compiled(model: nn.Module, **options) -> shardgraph.ShardedModule:
    return shardgraph.compile(copy.deepcopy(model), "single", progress=False, **options)


def x(*shape: int) -> torch.Tensor:
    return torch.ones(*shape)


# -- what is told of a compilation -------------------------------------------------------------------------------


def other_mode(sharded):
    return sharded.eval()(x(2, 4))


def no_gradients(sharded):
    with torch.no_grad():
        sharded(x(2, 4))


def attribute(sharded):
    sharded.original.factor = 3
    sharded(x(2, 4))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (lambda sharded: sharded(x(2, 4, 4)), "input 0 (x): shape [2, 4, 4] instead of [2, 4]"),
        (lambda sharded: sharded(x(2, 4).requires_grad_()), "input 0 (x): it requires a gradient"),
        (lambda sharded: sharded(x(4, 2).T), "input 0 (x): other strides"),
        (lambda sharded: sharded(x=x(2, 4)), "the inputs are input 0 (x) instead of input 0 (x)"),
        (lambda sharded: sharded(x(2, 4), True), "the inputs are input 0 (x), input 1 (twice) instead of input 0 (x)"),
        (no_gradients, "no gradients instead of gradients"),
        (other_mode, "0 of 2 modules in training mode instead of 2"),
        (attribute, "no longer model.factor == 1"),
    ],
)
def test_a_program_after_the_first_is_told_with_what_differs_from_the_nearest(call, told, caplog):
    with caplog.at_level("INFO", "shardgraph"):
        sharded = compiled(padded.Told())
        sharded(x(2, 4))
        caplog.clear()
        call(sharded)
        (message,) = caplog.messages
        assert message.startswith("compiled another program in ") and message.endswith(f" s: {told}"), message
        call(sharded)
    assert len(caplog.messages) == 1


@pytest.mark.parametrize(("grad", "what"), [(True, "forward and backward"), (False, "forward alone")])
def test_the_first_program_is_told_with_what_it_is_for(grad, what, caplog):
    sharded = compiled(padded.Told())
    with caplog.at_level("INFO", "shardgraph"), torch.set_grad_enabled(grad):
        sharded(x(2, 4), True)
        sharded(x(2, 4), True)
    (message,) = caplog.messages
    assert re.fullmatch(
        rf"compiled the first program in \d+\.\d s, {what}, for input 0 \(x\): a tensor of shape \[2, 4\], "
        r"torch.float32, input 1 \(twice\): True\. Calls with other shapes, dtypes or modes have others",
        message,
    )


class Branches(nn.Module):
    def forward(self, x):
        return x * 2 if x.sum() > 0 else x


def test_a_value_by_which_forward_branches_is_told_with_its_line(caplog):
    sharded = compiled(Branches())
    sharded(x(2))
    with caplog.at_level("INFO", "shardgraph"):
        sharded(-x(2))
    assert (
        "test_lengths.py" in caplog.text
        and "if x.sum() > 0" in caplog.text
        and "is False instead of True" in caplog.text
    )


def test_a_value_that_is_asked_for_on_one_way_alone_is_told_with_its_line(caplog):
    class Further(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else x * 2 if x.max() > -1 else x * 3

    sharded = compiled(Further())
    sharded(x(2).abs() + 1)
    with caplog.at_level("INFO", "shardgraph"):
        sharded(-x(2).abs() - 2)
    assert "if x.max() > -1" in caplog.text and "is False, and was not asked for before" in caplog.text


@pytest.mark.slow
def test_many_programs_for_shapes_alone_are_warned_of_once_with_what_to_do():
    sharded = compiled(nn.Linear(4, 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for length in range(1, 11):
            sharded(x(2, length, 4))
    (told,) = [str(each.message) for each in caught if "differ in the shapes" in str(each.message)]
    assert told.startswith("8 programs have been compiled") and " s altogether: input 0 (input)" in told
    assert "[2, 1, 4], [2, 2, 4]" in told and "Lengths(multiple_of=64, fill={'input': ...})" in told


@pytest.mark.slow
def test_the_warning_of_batches_of_many_sizes_says_to_give_them_one():
    sharded = compiled(nn.Linear(4, 4))
    with pytest.warns(UserWarning, match="differ in the shapes of inputs alone.*drop_last=True"):
        for rows in range(1, 9):
            sharded(x(rows, 4))


def test_programs_that_are_dropped_are_warned_of_once(monkeypatch):
    monkeypatch.setattr(module, "_MAX_PROGRAMS", 2)
    sharded = compiled(nn.Linear(4, 4))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        warnings.filterwarnings("ignore", "Guards may run slower")  # torch's, on Python 3.13.0
        for rows in (1, 2, 3, 1, 2, 3):
            sharded(x(rows, 4))
    (told,) = map(str, (each.message for each in caught))
    assert told.startswith("more than 2 programs have been compiled, and 2 are kept") and "drop_last" in told


# -- padding to few lengths --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy", "lengths"),
    [
        ({"multiple_of": 8}, {1: 8, 8: 8, 9: 16}),
        ({"powers_of_two": True}, {1: 1, 2: 2, 3: 4, 64: 64, 65: 128}),
        ({"among": [48, 12]}, {1: 12, 12: 12, 13: 48}),
    ],
)
def test_a_policy_says_the_next_length(policy, lengths):
    lengths_of = Lengths({"x": 0}, **policy)
    assert {length: lengths_of.after(length) for length in lengths} == lengths


@pytest.mark.parametrize(
    "wrong", [{}, {"multiple_of": 8, "powers_of_two": True}, {"multiple_of": 0}, {"among": [1.5]}, {"fill": {}},
              {"multiple_of": 8, "dimension": -1}]
)  # fmt: skip
def test_a_policy_that_says_nothing_is_refused(wrong):
    with pytest.raises(PlanError, match="Lengths"):
        Lengths(**{"fill": {"x": 0}, **wrong})


@pytest.mark.slow
@pytest.mark.parametrize(("model", "tolerance"), [(padded.bert, EXACT), (padded.gpt2, 1e-6)])  # with a float32 loss
def test_batches_of_twenty_lengths_train_as_without_padding_by_two_programs(model, tolerance, monkeypatch):
    lengths = random.Random(0).sample(range(4, 33), 20)
    batches = [padded.texts(length, seed) for seed, length in enumerate(lengths)]
    compilations = []
    compile_one = Programs._compile
    monkeypatch.setattr(Programs, "_compile", lambda *call: compilations.append(call) or compile_one(*call))
    sharded, losses = padded.stepped(compiled(model(), lengths=padded.SIXTEENS), batches)
    original, expected = padded.stepped(model(), batches)
    assert losses == pytest.approx(expected, abs=tolerance) and apart(sharded, original) < tolerance
    assert len(compilations) == 2


def test_train_step_and_step_pad_as_forward_does(monkeypatch):
    batches = [padded.texts(length, length) for length in (9, 16, 5)]
    original, _ = padded.stepped(padded.bert(), batches)
    sharded = compiled(padded.bert(), lengths=padded.SIXTEENS)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-2)
    sharded.train_step(**batches[0])
    monkeypatch.setattr(Programs, "_compile", None)
    optimizer.step()
    optimizer.zero_grad()
    for batch in batches[1:]:
        sharded.step(**batch, optimizer=optimizer)
    assert apart(sharded, original) < EXACT


def test_example_inputs_are_padded_as_calls_are(monkeypatch):
    batch = padded.texts(9, 0)
    sharded = compiled(padded.bert(), lengths=padded.SIXTEENS, example_kwargs=batch)
    monkeypatch.setattr(Programs, "_compile", None)
    assert sharded(**batch).logits.shape == (3, 9, 50)


def test_outputs_are_cut_where_they_have_the_length_and_not_where_a_width_is_as_large():
    class Outputs(nn.Module):
        def forward(self, x):
            return {"states": x, "pairs": x @ x.mT, "pooled": x.sum(1), "heads": x.unsqueeze(1).repeat(1, 8, 1, 1)}

    sharded = compiled(Outputs(), lengths=Lengths({"x": 0.0}, multiple_of=8))
    for length in (5, 6, 3, 8):
        inputs = torch.randn(2, length, 8)
        torch.testing.assert_close(sharded(inputs), Outputs()(inputs))


class TwoLengths(nn.Module):
    def forward(self, source, target):
        return source * 2, target * 3, source @ target.mT


def test_outputs_of_two_lengths_are_cut_each_to_its_own(monkeypatch):
    sharded = compiled(TwoLengths(), lengths=Lengths({"source": 0.0, "target": 0.0}, multiple_of=8))
    for lengths in [(5, 5), (6, 7), (8, 4), (3, 8), (8, 8)]:
        inputs = [torch.randn(2, length, 4) for length in lengths]
        torch.testing.assert_close(sharded(*inputs), TwoLengths()(*inputs))
        monkeypatch.setattr(Programs, "_compile", None)


def test_gradients_reach_inputs_that_are_padded():
    inputs = torch.randn(2, 5, 4, requires_grad=True)
    sharded = compiled(nn.Linear(4, 4), lengths=Lengths({0: 0.0}, multiple_of=8))
    (gradient,) = torch.autograd.grad(sharded(inputs).square().sum(), inputs)
    (expected,) = torch.autograd.grad(sharded.original(inputs).square().sum(), inputs)
    torch.testing.assert_close(gradient, expected)


@pytest.mark.parametrize(
    ("forward", "told"),
    [
        (lambda x: x[:, ::2], r"output 0 is \[2, 4, 4\] with padding and \[2, 3, 4\] without"),
        (lambda x: (x * 2, x.shape[1]), "output 1 is 8 with padding and 5 without"),
        (lambda x: list(x.unbind(1)), "returns 8 values with padding and 5 without"),
        (lambda x: x if x.shape[1] > 5 else x[:, 0], r"output 0 is \[2, 8, 4\] with padding and \[2, 4\] without"),
        (lambda x: x * 2 if x.max() > -9 else x, "forward reads values"),
    ],
)
def test_outputs_that_follow_the_length_otherwise_are_refused(forward, told):
    class Model(nn.Module):
        def forward(self, x):
            return forward(x)

    sharded = compiled(Model(), lengths=Lengths({"x": 0.0}, multiple_of=8))
    sharded(torch.randn(2, 8, 4))
    with pytest.raises(ShardGraphError, match=f"{told}.*train_step"):
        sharded(torch.randn(2, 5, 4))


@pytest.mark.parametrize(
    ("call", "told"),
    [
        (
            {"token_type_ids": torch.zeros(3, 9, dtype=torch.long)},
            r"'token_type_ids' has size 9 in dimension 1.*: None",
        ),
        ({"input_ids": torch.zeros(9, dtype=torch.long)}, r"'input_ids' is padded along dimension 1.*shape \[9\]"),
        ({"attention_mask": [[1] * 9] * 3}, r"'attention_mask' is padded along dimension 1 .* it is \[\[1"),
        ({"attention_mask": torch.ones(3, 1, 9, 9)}, r"'attention_mask' has size 1 in dimension 1.* \[batch, length\]"),
        ({"attention_mask": ...}, "the call has no input 'attention_mask'.*attention_mask=None"),
        ({name: torch.ones(3, 33, dtype=torch.long) for name in padded.FILL}, r"length 33, and the longest .* is 32"),
    ],
)
def test_calls_that_a_policy_does_not_fit_are_refused_with_what_to_give(call, told):
    sharded = compiled(padded.bert(), lengths=Lengths(padded.FILL, among=[16, 32]))
    given = {name: value for name, value in (padded.texts(9, 0) | call).items() if value is not ...}
    with pytest.raises(ShardGraphError, match=told):
        sharded(**given)


def test_an_input_with_the_length_by_chance_may_stay_as_it_is():
    class Model(nn.Module):
        def forward(self, x, features):
            return x + features.sum(1)[:, None]

    sharded = compiled(Model(), lengths=Lengths({"x": 0.0, "features": None}, multiple_of=8))
    inputs = torch.randn(2, 5), torch.randn(2, 5)
    torch.testing.assert_close(sharded(*inputs), Model()(*inputs))


def test_a_name_that_forward_does_not_have_is_refused():
    with pytest.raises(ShardGraphError, match=r"'ids', which is no input of Linear.forward: it has input"):
        compiled(nn.Linear(4, 4), lengths=Lengths({"ids": 0}, multiple_of=8))


def test_a_copy_pads_as_well():
    sharded = copy.deepcopy(compiled(nn.Linear(4, 4), lengths=Lengths({"input": 0}, multiple_of=8)))
    assert sharded(x(2, 5, 4)).shape == (2, 5, 4) and sharded.program.joint.rows == 2


@pytest.mark.slow
@pytest.mark.parametrize(("plan", "weight"), [("fsdp", "ranks"), ("ddp", "tokens"), ("tp", "ranks"), ("pp", "ranks")])
def test_ranks_pad_the_lengths_of_their_own_batches(plan, weight):
    pipeline = Pipeline(microbatches=2, stages=("layers.2",)) if plan == "pp" else None
    for errors in on_ranks(padded.trained_under, args=(plan, weight, pipeline)):
        assert max(errors) < EXACT, errors
