"""Branches, numbers and checks of forward that depend on values of tensors."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph.module.programs import Programs
from tests import deciding
from tests.standing import on_ranks


def compiled(model, **options):
    return shardgraph.compile(copy.deepcopy(model), "single", progress=False, **options)


def refused(model, *inputs) -> str:
    with pytest.raises(shardgraph.CaptureError) as error:
        compiled(model, example_inputs=inputs)
    return str(error.value)


class Forward(nn.Module):
    """A layer, and what is done with its output."""

    def __init__(self, body) -> None:
        super().__init__()
        self.layer, self.body = nn.Linear(4, 4), body

    def forward(self, *inputs):
        return self.body(self.layer, *inputs)


# -- values of inputs ------------------------------------------------------------------------------------------


def test_forward_goes_the_way_that_the_values_of_its_inputs_lead_to_at_every_call():
    model = deciding.Masked()
    sharded = compiled(model)
    calls = [deciding.call(masks) for masks in (True, False)]
    calls.append((calls[1][0] + 9, calls[1][1]))
    for call in calls + calls[::-1]:
        for module in (sharded, model):
            module.zero_grad()
            module(*call).square().sum().backward()
        torch.testing.assert_close(sharded(*call), model(*call), rtol=0, atol=0)
        for mine, theirs in zip(sharded.parameters(), model.parameters(), strict=True):
            torch.testing.assert_close(mine.grad, theirs.grad)
    assert sharded.program.joint.conditions[0].value is False


def test_values_that_lead_the_same_way_need_no_new_program(monkeypatch):
    sharded = compiled(deciding.Masked())
    x, mask = deciding.call(False)
    sharded(x, mask)
    sharded(x + 9, mask)
    monkeypatch.setattr(Programs, "_compile", None)
    sharded(x * 2, mask)
    sharded(x + 8, mask)


def test_a_condition_is_the_value_that_a_tensor_has_where_it_is_asked_for():
    def body(layer, x, at):
        positions = torch.zeros(3, dtype=torch.long)
        before = int(positions[0])
        positions[0] = at.max()
        positions += 1
        return layer(x) * (before + int(positions[0]))

    model = Forward(body)
    sharded, x = compiled(model), torch.randn(2, 4)
    for at in (torch.tensor([1, 2]), torch.tensor([5, 3])):
        assert torch.equal(sharded(x, at), model(x, at))
    assert at.tolist() == [5, 3]  # which the condition computes with a copy of


def added_to(layer, x, at):
    counts = torch.zeros(3, dtype=torch.long)
    first = counts[:1]
    counts += at.max()
    return layer(x) * int(first)


def clipped(layer, x, at):
    counts = torch.zeros(3) - at.max()
    nn.functional.relu(counts[:1], True)
    return layer(x) * float(counts[0])


def of_one_element(layer, x, at):
    if (at > 4).any(0, keepdim=True):
        return layer(x)
    return x if not (at > 1).any(0, keepdim=True) else layer(x) * 2


@pytest.mark.parametrize("body", [added_to, clipped, of_one_element])
def test_a_condition_is_of_the_memory_and_the_one_element_of_its_value(body):
    model = Forward(body)
    sharded, x = compiled(model), torch.randn(2, 4)
    for at in (torch.tensor([1, 2]), torch.tensor([5, 3])):
        torch.testing.assert_close(sharded(x, at), model(x, at))


def test_a_value_that_an_earlier_layer_has_written_to_decides_nothing():
    def body(layer, x, at):
        counts = at * 1.0
        counts[:1].copy_(layer(x).sum().detach().reshape(1))
        return layer(x) if counts.max() > 3 else x

    assert "if counts.max() > 3" in refused(Forward(body), torch.randn(2, 4), torch.tensor([1, 2]))


def test_an_analysis_takes_the_way_of_its_example_inputs():
    model = deciding.Masked()
    counts = [
        len(list(compiled(model, example_inputs=deciding.call(masks)).program.joint.module.graph.nodes))
        for masks in (True, False)
    ]
    assert counts[0] != counts[1]
    for masks in (True, False):
        assert shardgraph.analyze(model, deciding.call(masks), plan="single", cluster="H100").peak_memory > 0


def test_inputs_without_values_cannot_lead_the_way():
    x, mask = (each.to("meta") for each in deciding.call(True))
    assert "give example inputs that have values" in refused(deciding.Masked(), x, mask)


@pytest.mark.parametrize("kind", ["branch", "number", "list"])
def test_a_value_of_an_earlier_layer_is_refused_with_its_line(kind):
    bodies = {
        "branch": lambda layer, x: layer(x) if layer(x).sum() > 0 else x,
        "number": lambda layer, x: layer(x)[: int(layer(x).argmax())],
        "list": lambda layer, x: x.split(layer(x).long()[0].tolist()),
    }
    assert "test_decisions.py:" in refused(Forward(bodies[kind]), torch.randn(2, 4))


def test_ranks_go_different_ways_with_the_same_parameters():
    assert max(on_ranks(deciding.ways_of_ranks, 2)) < 1e-6


def test_ranks_that_would_go_different_ways_to_other_parameters_are_told_so():
    for told in on_ranks(deciding.values_differ, 2):
        assert "if mask.all():" in told


def test_microbatches_of_a_pipeline_go_the_way_of_the_batch_or_are_refused():
    for error, told in on_ranks(deciding.through_a_pipeline, 2):
        assert error < 1e-6
        assert "forward decides by a value of its inputs" in told


# -- statistics of activations ---------------------------------------------------------------------------------


class Observing(nn.Module):
    """A layer whose outputs' range is kept: that of the first batch, then one that follows."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(4, 4), how
        self.register_buffer("low", torch.zeros(1))
        self.register_buffer("high", torch.zeros(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.layer(x)
        low, high = y.detach().aminmax()
        if self.how == "in place":
            if self.low.min() == 0 and self.high.max() == 0:
                self.low.add_(low)
                self.high.add_(high)
            else:
                self.low.lerp_(low, 0.1)
                self.high.lerp_(high, 0.1)
        elif self.how == "variables":
            kept = self.low
            if kept.max() < 0:
                kept = kept * 0.9 + low * 0.1
            self.low.copy_(torch.minimum(kept, low))
        elif self.how == "scaled":
            if self.low.max() < 0:
                y = y / self.high
        elif self.how == "checked":
            if self.low.max() < 0:
                assert self.high > 0
                self.low.add_(1)
        elif self.how == "assigned":
            if self.low.max() < 0:
                self.low = low.reshape(1)
            else:
                self.low = self.low * 0.9 + low * 0.1
        elif self.how == "told":
            if self.low.max() < 0:
                print("observed", self.low)
        else:
            while low.min() < -1e-3:
                low = low * 0.5
            self.low.copy_(low)
        return y.square().mean()


@pytest.mark.parametrize("how", ["in place", "variables"])
def test_a_branch_on_statistics_that_leaves_statistics_behind_is_computed_both_ways(how):
    report = shardgraph.verify(Observing(how), (torch.randn(8, 4),), "fsdp", steps=3)
    assert report.ok, str(report)
    assert "buffer low after step 2" in report.errors


@pytest.mark.parametrize(
    ("how", "line"),
    [
        ("scaled", "if self.low.max() < 0:"),  # of which a gradient would be that of both ways
        ("checked", "if self.low.max() < 0:"),
        ("told", "if self.low.max() < 0:"),
        ("assigned", "if self.low.max() < 0:"),
        ("in a loop", "while low.min() < -1e-3:"),
    ],
)
def test_a_branch_on_statistics_that_decides_more_is_refused_with_its_line(how, line):
    told = refused(Observing(how), torch.randn(2, 4))
    assert line in told
    assert "write buffers that it changes in place" in told and "shardgraph.assume('test_decisions.py:" in told


def test_what_a_branch_on_statistics_does_not_take_leaves_no_trace_where_it_overflows():
    class Overflowing(Observing):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.layer(x)
            scale = torch.ones(())
            if self.high.max() > 0:
                scale = 1 / self.high.max()  # infinite where it is not taken
            return (y * scale).square().mean()

    report = shardgraph.verify(Overflowing("in place"), (torch.randn(8, 4),), "fsdp", steps=2)
    assert report.ok, str(report)


# -- random numbers --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("compare", [lambda p, x: x < p, lambda p, x: not x >= p, lambda p, x: x <= p - 0.1])
def test_a_layer_that_is_dropped_with_probability_0_is_never_dropped(compare):
    model = Forward(lambda layer, x: x if compare(0.0, torch.rand([])) else layer(x))
    x = torch.randn(2, 4)
    assert torch.equal(compiled(model)(x), model(x))


def test_a_branch_on_a_random_number_of_python_is_refused_with_what_helps():
    model = Forward(lambda layer, x: x if torch.rand([]).item() < 0.5 else layer(x))
    assert "without item()" in refused(model, torch.randn(2, 4))


# -- checks ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["single", "fsdp", "tp"])
def test_the_models_own_checks_are_made_in_every_call(plan):
    mesh = {} if plan == "single" else {plan.replace("fsdp", "dp"): 2}
    found = [deciding.failing_check(plan, mesh)] if not mesh else on_ranks(deciding.failing_check, 2, args=(plan, mesh))
    for good, nan, large in found:
        assert good == ""
        assert "if torch.isnan(h).any():" in nan
        assert "assert x.max() < 50" in large


@pytest.mark.slow
def test_a_check_ends_a_pipeline_with_its_line():
    with pytest.raises(shardgraph.LaunchError, match=r"if torch\.isnan\(h\)\.any\(\):"):
        shardgraph.launch(deciding.failing_check_of_a_stage, 2, timeout=120)


def test_a_check_is_part_of_what_is_proved_and_verified():
    example = (torch.zeros(4, 4),)
    report = shardgraph.verify(deciding.Checking(), example, "fsdp", mesh={"dp": 2}, loss_fn=lambda y: y.sum())
    assert report.ok, str(report)


# -- assumptions -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "check",
    [lambda h: torch._assert((h == h).all(), "a number"), lambda h: torch._check(bool((h == h).all()))],
    ids=["torch._assert", "torch._check"],
)
def test_checks_of_torch_s_own_are_refused_with_how_to_write_them(check):
    told = refused(Forward(lambda layer, x: (check(layer(x)), layer(x))[1]), torch.randn(3, 4))
    assert "test_decisions.py:" in told and "`assert condition`" in told


def test_what_is_assumed_of_a_branch_is_checked_in_every_call():
    model = Forward(lambda layer, x: layer(x).clamp(-9, 9) if not torch.isfinite(layer(x)).all() else layer(x))
    line = model.body.__code__.co_firstlineno
    place, x = f"test_decisions.py:{line}", torch.randn(2, 4)
    assert f"shardgraph.assume('{place}', False)" in refused(model, x)
    shardgraph.assume(place, True)
    try:
        sharded = compiled(model)
        assert torch.equal(sharded(x), model(x))
        with pytest.raises(shardgraph.ModelCheckError, match=place):
            sharded(x * torch.inf)
    finally:
        shardgraph.assume(place, None)


def test_an_assumption_names_a_file_and_a_line():
    with pytest.raises(ValueError, match="by its file and line"):
        shardgraph.assume("modeling.py", False)


# -- the model's own errors ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (lambda layer, x: layer(x) @ x, "RuntimeError.*same reduction dim"),
        (lambda layer, x: layer(x).nonsense(), "no attribute 'nonsense'"),
        (lambda layer, x: {"a": layer(x)}["b"], "KeyError"),
        (lambda layer, x: layer(x) + nowhere, "NameError.*'nowhere' is not defined"),  # noqa: F821
    ],
    ids=["shapes", "attribute", "key", "name"],
)
def test_a_mistake_in_forward_is_told_as_python_tells_it(body, words):
    told = refused(Forward(body), torch.randn(3, 4))
    assert "test_decisions.py:" in told
    assert re.search(words, told)
