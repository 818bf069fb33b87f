"""What users of PyTorch rely on: the compiled module does what the original does, or raises, at every call."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import shardgraph
from tests import ranks
from tests.standing import on_ranks
from tests.two_heads import KeepsState, TwoHeads

X = torch.randn(2, 4, generator=torch.Generator().manual_seed(0))


def compiled(model: nn.Module) -> nn.Module:
    return shardgraph.compile(model, plan="single", progress=False)


class Returns(nn.Module):
    """A linear layer, and what ``outputs`` makes of its result and its input."""

    def __init__(self, outputs: Callable[[torch.Tensor, torch.Tensor], Any]) -> None:
        super().__init__()
        self.linear, self.outputs = nn.Linear(4, 4), outputs

    def forward(self, x: torch.Tensor) -> Any:
        return self.outputs(self.linear(x), x)


# -- outputs and gradients ---------------------------------------------------------------------------------

OUTPUTS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "detached": lambda y, x: (y, y.detach()),
    "only detached": lambda y, x: (y.detach(), y * 2),
    "views of both": lambda y, x: (y, y[0], y.detach()[0], y.view(-1).detach()),
    "computed without gradients": lambda y, x: (y, y.detach().relu()),
    "an input": lambda y, x: (y, x, x.detach(), x[0], x.detach()[0]),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("outputs", OUTPUTS.values(), ids=OUTPUTS)
def test_an_output_requires_a_gradient_where_the_originals_does(outputs, requires_grad):
    model, x = Returns(outputs), X.clone().requires_grad_(requires_grad)
    expected, made = model(x), compiled(copy.deepcopy(model))(x)
    assert [each.requires_grad for each in made] == [each.requires_grad for each in expected]
    torch.testing.assert_close(made, expected)


def test_a_detached_output_passes_no_gradient_on():
    model = Returns(lambda y, x: (y, y.detach()))
    y, detached = compiled(model)(X)
    (y.sum() + (detached * 100).sum()).backward()
    torch.testing.assert_close(model.linear.bias.grad, torch.full((4,), 2.0))


def test_a_parameter_that_the_loss_does_not_reach_has_no_gradient():
    model = compiled(TwoHeads())
    model(X)["first"].sum().backward()
    with_gradient = {name for name, parameter in model.named_parameters() if parameter.grad is not None}
    assert with_gradient == {f"{layer}.{kind}" for layer in ("shared", "first") for kind in ("weight", "bias")}


def test_no_optimizer_moves_a_parameter_that_the_loss_does_not_reach():
    model = compiled(TwoHeads())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = model.second.weight.detach().clone()
    model(X)["first"].sum().backward()
    optimizer.step()
    assert torch.equal(model.second.weight, before)


@pytest.mark.parametrize("plan", ["fsdp", "ddp", "zero1"])
def test_a_gradient_is_the_mean_over_ranks_of_what_their_losses_reach(plan):
    for own, gradients in enumerate(on_ranks(ranks.ranks_use_other_heads, args=(plan,))):
        assert gradients["neither"] == {"shared"}, own
        assert gradients["each its own"] == {"shared", "first", "second"}
        assert gradients["worst"] < 1e-6


@pytest.mark.quick("ddp")
@pytest.mark.parametrize("plan", ["fsdp", "ddp", "zero1"])
def test_the_first_backward_outside_no_sync_reduces_all_since_whatever_its_program(plan):
    for differences in on_ranks(ranks.accumulation, args=(plan,)):
        assert max(differences.values()) < 1e-6, differences


@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
def test_gradients_that_are_one_value_are_added_each_to_its_own_parameter_s(plan):
    assert max(on_ranks(ranks.accumulation_of_one_gradient, args=(plan,))) < 1e-6


def test_one_hot_refuses_the_classes_that_the_original_refuses():
    class Classes(nn.Linear):
        def forward(self, x: torch.Tensor, classes: torch.Tensor) -> torch.Tensor:
            return super().forward(x) + F.one_hot(classes, 4)

    model = Classes(4, 4)
    sharded = compiled(copy.deepcopy(model))
    torch.testing.assert_close(sharded(X, torch.tensor([1, 3])), model(X, torch.tensor([1, 3])))
    for module in (model, sharded):
        with pytest.raises(RuntimeError, match=r"out of bounds|smaller than num_classes"):
            module(X, torch.tensor([1, 4]))


@pytest.mark.parametrize("training", [True, False])
def test_a_batch_norm_of_a_transposed_tensor_has_the_strides_that_its_kernel_gives(training):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            y = self.norm(x.transpose(1, 2))
            return y, self.head(y.transpose(1, 2))

    model, x = Model().train(training), torch.randn(3, 6, 4)
    expected, made = copy.deepcopy(model)(x), compiled(model)(x)
    torch.testing.assert_close(made, expected, check_stride=True)


@pytest.mark.parametrize("training", [True, False])
def test_a_gradient_through_a_batch_norm_of_transposed_positions_can_be_viewed(training):
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.enter, self.norm, self.head = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            positions = self.enter(x).unflatten(1, (2, 2)).flatten(1, 2)
            return self.head(self.norm(positions.transpose(1, 2)).transpose(1, 2))

    model, x = Model().train(training), torch.randn(3, 4, 4)
    original = copy.deepcopy(model)
    for each in (original, compiled(model)):
        each(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_what_follows_a_batch_norm_may_write_to_its_result():
    model, x = nn.Sequential(nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3), nn.ReLU(inplace=True)), torch.randn(4, 2, 5, 5)
    original = copy.deepcopy(model)
    for each in (original, compiled(model)):
        each(x).square().sum().backward()
    for mine, theirs in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


# -- autocast ----------------------------------------------------------------------------------------------


def test_a_region_without_autocast_stays_without_under_the_callers():
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inside, self.outside = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            y = self.inside(x)
            with torch.autocast("cpu", enabled=False):
                return self.outside(y.float())

    model = Model()
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(X)
        expected.sum().backward()
        gradients = [parameter.grad for parameter in model.parameters()]
        model.zero_grad()
        made = compiled(model)(X)
        made.sum().backward()
    assert made.dtype == expected.dtype == torch.float32
    assert torch.equal(made, expected)
    torch.testing.assert_close([parameter.grad for parameter in model.parameters()], gradients)


# -- parameters --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("register", ["register_hook", "register_post_accumulate_grad_hook"])
def test_hooks_of_parameters_from_before_are_kept_and_can_be_removed(register):
    model, seen = nn.Linear(4, 4), []
    handle = getattr(model.weight, register)(lambda *_: seen.append("weight"))
    sharded = compiled(model)
    sharded(X).sum().backward()
    handle.remove()
    sharded(X).sum().backward()
    assert seen == ["weight"]


def test_a_hook_changes_the_gradient_as_it_does_in_the_original():
    model = nn.Linear(4, 4)
    model.bias.register_hook(lambda gradient: gradient * 10)
    compiled(model)(X).sum().backward()
    torch.testing.assert_close(model.bias.grad, torch.full((4,), 20.0))


@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.AdamW])
def test_an_optimizer_from_before_trains_the_new_parameters(kind):
    model = nn.Linear(4, 4)
    optimizer = kind(model.parameters(), lr=0.1)
    sharded = compiled(model)
    before = sharded.weight.detach().clone()
    sharded(X).sum().backward()
    optimizer.step()
    assert not torch.equal(sharded.weight, before)
    optimizer.zero_grad()
    assert sharded.weight.grad is None


def test_an_optimizer_that_has_stepped_before_is_refused_at_its_next_step():
    model = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters())
    model(X).sum().backward()
    optimizer.step()
    compiled(model)(X).sum().backward()
    with pytest.raises(shardgraph.ShardGraphError, match=r"make a new optimizer.*give its load_state_dict"):
        optimizer.step()


def test_an_optimizer_of_another_model_is_left_alone():
    other = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(other.parameters())
    compiled(nn.Linear(4, 4))
    before = [id(parameter) for parameter in optimizer.param_groups[0]["params"]]
    other(X).sum().backward()
    optimizer.step()
    assert [id(parameter) for parameter in optimizer.param_groups[0]["params"]] == before


def test_a_parameter_changed_before_the_backward_that_needs_it_is_an_error():
    model = nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 4))
    loss = compiled(model)(X).square().sum()
    with torch.no_grad():
        model[2].weight.mul_(2)
    with pytest.raises(RuntimeError, match=r"2\.weight.*between forward and backward"):
        loss.backward()


def test_a_parameter_that_backward_does_not_need_may_change_before_it():
    model = nn.Linear(4, 4)
    loss = compiled(model)(X).square().sum()
    with torch.no_grad():
        model.weight.mul_(2)
    loss.backward()
    assert model.weight.grad is not None


def test_double_backward_is_refused_in_our_words():
    model = compiled(nn.Linear(4, 4))
    (gradient,) = torch.autograd.grad(model(X).square().sum(), [model.bias], create_graph=True)
    with pytest.raises(shardgraph.BackwardError, match=r"can be differentiated once.*in forward.*sharded\.original"):
        gradient.sum().backward()


# -- what forward leaves behind ----------------------------------------------------------------------------


class Leaves(nn.Module):
    """A forward that leaves something behind, by ``kind``."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind, self.linear = kind, nn.Linear(4, 4)
        self.aux, self.count, self.seen, self.flag = None, 0, [], False
        self.kept: dict[str, list[torch.Tensor]] = {"seen": []}
        self.register_buffer("steps", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.linear(x)
        if self.kind == "a tensor":
            self.aux = y.sum()
        if self.kind == "a count":
            self.count += 1
        if self.kind == "a count that decides":
            self.count += 1
            y = y if self.count > 2 else y * 2
        if self.kind == "a longer list":
            self.seen = [*self.seen, y]
        if self.kind == "an attribute removed" and hasattr(self, "aux"):
            del self.aux
        if self.kind == "an element of a list":
            self.seen.append(y)
        if self.kind == "an element of a list in a dictionary":
            self.kept["seen"].append(y)
        if self.kind == "a buffer replaced":
            self.steps = self.steps + 1
        if self.kind == "a buffer in place":
            self.steps += 1
        if self.kind == "a constant":
            self.flag, self.rows = True, len(x)
        if self.kind == "a constant that decides":
            y, self.flag = y if self.flag else y * 2, True
        if self.kind == "a flag, restored":
            self.flag = True
            y = y * 2 if self.flag else y
            self.flag = False
        return y


@pytest.mark.parametrize(
    ("kind", "attribute"),
    [
        ("an element of a list", "seen"),
        ("an element of a list in a dictionary", "kept"),
        ("a longer list", "seen"),
        ("a count that decides", "count"),
        ("an attribute removed", "aux"),
    ],
)
def test_what_forward_writes_beside_its_outputs_is_refused_by_its_line(kind, attribute):
    with pytest.raises(
        shardgraph.CaptureError, match=rf"writes to the attribute '0\.{attribute}' .*test_behaviours\.py:\d+"
    ):
        compiled(nn.Sequential(Leaves(kind)))(X)


@pytest.mark.parametrize("kind", ["nothing", "a buffer in place", "a flag, restored"])
def test_a_forward_that_leaves_nothing_else_behind_is_compiled(kind):
    model = Leaves(kind)
    expected = copy.deepcopy(model)
    torch.testing.assert_close(compiled(model)(X), expected(X))
    assert torch.equal(model.steps, expected.steps)


def test_a_constant_that_forward_sets_is_set_at_every_call():
    model = Leaves("a constant")
    sharded = compiled(model)
    sharded(X)
    assert (model.flag, model.rows) == (True, 2)
    model.flag = False
    sharded(X)
    assert model.flag is True


def test_a_constant_that_forward_sets_and_reads_needs_no_other_program():
    class Counts(nn.Linear):
        rows = None

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.rows is None:
                self.rows = len(x)
            return super().forward(x)

    model = Counts(4, 4)
    sharded = compiled(model)
    for _ in range(2):
        sharded(X)
    assert model.rows == 2
    assert [len(variants) for variants in sharded._programs.kept.values()] == [1]


def test_a_constant_may_send_the_next_call_another_way():
    model = Leaves("a constant that decides")
    original, sharded = copy.deepcopy(model), compiled(model)
    for _ in range(3):
        torch.testing.assert_close(sharded(X), original(X))


def test_attributes_that_forward_sets_are_as_the_originals_after_every_call():
    model = KeepsState()
    original, sharded = copy.deepcopy(model), compiled(model)
    programs = []
    for call in range(12):
        x = X[: 1 + call // 2 % 2]
        if call % 2 == 0:
            sharded.hidden = original.hidden = None  # of another number of rows
        torch.testing.assert_close(sharded(x), original(x))
        for mine, theirs in zip(model.state(), original.state(), strict=True):
            torch.testing.assert_close(mine, theirs)
        programs.append(sum(map(len, sharded._programs.kept.values())))
    assert programs[6:] == programs[5:6] * 6, "no call of a kind that was before is compiled again"


def test_a_count_that_forward_returns_is_refused():
    class Model(nn.Linear):
        def __init__(self) -> None:
            super().__init__(4, 4)
            self.calls = 0

        def forward(self, x: torch.Tensor) -> Any:
            self.calls = self.calls + 1
            return super().forward(x), self.calls

    with pytest.raises(shardgraph.CaptureError, match="a Python number that changes from call to call"):
        compiled(Model())(X)


@pytest.mark.parametrize("tensor", [False, True])
def test_state_with_a_default_in_the_class_is_refused_by_name(tensor):
    class Model(nn.Linear):
        state: Any = 0

        def forward(self, x: torch.Tensor) -> Any:
            y = super().forward(x) + self.state
            self.state = y.detach().mean() if tensor else self.state + 1
            return y

    model = Model(4, 4)
    original, sharded = copy.deepcopy(model), compiled(model)
    with pytest.raises(shardgraph.CaptureError, match=r"'state' changes from call to call, and Model has a default"):
        for _ in range(3):
            torch.testing.assert_close(sharded(X), original(X))


@pytest.mark.slow
def test_attributes_of_a_module_with_two_names_are_set_once():
    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = self.second = KeepsState()

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.second(self.first(x).tanh())

    model = Twice()
    original, sharded = copy.deepcopy(model), compiled(model)
    for _ in range(3):
        torch.testing.assert_close(sharded(X), original(X))
        for mine, theirs in zip(model.second.state(), original.first.state(), strict=True):
            torch.testing.assert_close(mine, theirs)


@pytest.mark.slow
def test_a_loss_of_an_attribute_that_forward_sets_trains_as_in_the_original():
    model = KeepsState()
    original, sharded = copy.deepcopy(model), compiled(model)
    optimizers = [torch.optim.SGD(each.parameters(), lr=0.1) for each in (model, original)]
    for _ in range(3):
        for each, called, optimizer in zip((model, original), (sharded, original), optimizers, strict=True):
            optimizer.zero_grad()
            (called(X).sum() + each.auxiliary + each.kept[1]["squares"].sum()).backward()
            optimizer.step()
    torch.testing.assert_close(model.state_dict(), original.state_dict())


@pytest.mark.slow
def test_gradients_flow_through_state_from_call_to_call():
    model = KeepsState(detach=False)
    original, sharded = copy.deepcopy(model), compiled(model)
    for each, called in ((model, sharded), (original, original)):
        (called(X).sum() + called(X).square().sum()).backward()
        each.hidden = each.hidden.detach()
        called(X).sum().backward()
    for mine, theirs in zip(model.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_a_buffer_that_forward_replaces_leaves_the_tensor_before_as_it_was():
    model = KeepsState()
    before = model.average
    compiled(model)(X)
    assert torch.equal(before, torch.zeros(4))
    assert model.average is not before


def test_a_step_with_its_loss_in_the_program_sets_attributes_too():
    model = KeepsState()
    original = copy.deepcopy(model)
    sharded = shardgraph.compile(model, "single", loss_fn=F.mse_loss, progress=False)
    loss = F.mse_loss(original(X), X)
    torch.testing.assert_close(sharded.train_step(X, target=X), loss.detach())
    for mine, theirs in zip(model.state(), original.state(), strict=True):
        torch.testing.assert_close(mine, theirs)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp", "ddp"])
def test_attributes_on_ranks_are_of_each_ranks_batch_and_buffers_the_mean(plan):
    for differences in on_ranks(ranks.attributes, args=(plan,)):
        assert max(differences.values()) < 1e-6, differences


@pytest.mark.parametrize("plan", ["fsdp", "tp"])
def test_verify_compares_attributes_that_forward_sets(plan):
    report = shardgraph.verify(KeepsState(), (torch.randn(4, 4),), plan, steps=1)
    assert report.ok, report


@pytest.mark.slow
def test_state_that_the_next_call_takes_another_way_for_is_verified_for_one_step():
    with pytest.raises(shardgraph.ShardGraphError, match="steps=1"):
        shardgraph.verify(KeepsState(), (torch.randn(4, 4),), "fsdp", steps=2)
    model = KeepsState()
    model(torch.randn(2, 4))
    report = shardgraph.verify(model, (torch.randn(4, 4),), "fsdp", steps=3)
    assert report.ok, report


@pytest.mark.slow
def test_attributes_of_a_call_are_refused_by_their_line_with_a_pipeline():
    pipeline = shardgraph.Pipeline(stages=("1",), schedule="looped-bfs", microbatches=2)
    with pytest.raises(shardgraph.PlanError, match=r"sets the attribute '1\.\w+' of the model at .*two_heads\.py:\d+"):
        shardgraph.compile(
            *(nn.Sequential(nn.Linear(4, 4), KeepsState()), "pp"),
            pipeline=pipeline,
            loss_fn=F.mse_loss,
            example_inputs=(X,),
            example_kwargs={"target": X},
            progress=False,
        )


def test_a_hook_that_collects_activations_is_refused():
    model, seen = nn.Linear(4, 4), []
    model.register_forward_hook(lambda module, args, output: seen.append(output))
    with pytest.raises(shardgraph.CaptureError, match="a variable of the function around a hook"):
        compiled(model)(X)
    assert seen == []


def test_a_forward_that_changes_a_container_it_is_given_is_refused():
    class Caches(nn.Linear):
        def forward(self, x: torch.Tensor, cache: list[torch.Tensor]) -> torch.Tensor:
            y = super().forward(x)
            cache.append(y)
            return y

    with pytest.raises(shardgraph.CaptureError, match="its argument 'cache'"):
        compiled(Caches(4, 4))(X, [X])
