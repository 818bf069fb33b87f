"""The emitted module against the original, in one process: what it takes, what it returns, what it refuses."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

import shardgraph
from shardgraph import CaptureError
from shardgraph.module.sharded import module_of
from shardgraph.passes.analysis.liveness import profile_memory
from tests.zoo import make, scalar


@dataclass
class Result:
    """A dataclass that nobody registered with pytree."""

    value: torch.Tensor
    note: str


class Configurable(nn.Module):
    """One linear layer, and a forward given by the test."""

    def __init__(self, body) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.mask = torch.tensor([1.0, 0.0, 1.0, 2.0])  # an attribute, not a buffer
        self.config = SimpleNamespace(name="mine")
        self.body = body

    def forward(self, *args, **kwargs):
        return self.body(self, *args, **kwargs)


def pair(body):
    torch.manual_seed(0)
    model = Configurable(body)
    return shardgraph.compile(copy.deepcopy(model), "single"), model


def both(body, *args, **kwargs):
    sharded, model = pair(body)
    return sharded(*args, **kwargs), model(*args, **kwargs)


X = torch.arange(8.0).view(2, 4) / 8
SEEN: list[int] = []


def test_a_dataclass_is_returned():
    mine, theirs = both(lambda m, x: Result(m.linear(x), "hello"), X)
    assert type(mine) is Result and mine.note == "hello" and torch.equal(mine.value, theirs.value)


def test_a_model_output_of_transformers_is_returned_with_its_cache():
    model, (args, kwargs) = make("llama", 2)
    mine = shardgraph.compile(copy.deepcopy(model), "single")(*args, **kwargs)
    theirs = model(*args, **kwargs)
    assert type(mine) is type(theirs)
    torch.testing.assert_close(mine.logits, theirs.logits)
    torch.testing.assert_close(mine.past_key_values.layers[1].keys, theirs.past_key_values.layers[1].keys)


def test_nested_inputs_and_keywords_are_taken():
    def body(m, pair, *, extra):
        return m.linear(pair["a"]) + pair["b"][0] * extra

    mine, theirs = both(body, {"a": X, "b": [X + 1]}, extra=X * 2)
    assert torch.equal(mine, theirs)


def test_a_plain_tensor_attribute_may_change_between_calls():
    sharded, model = pair(lambda m, x: m.linear(x) * m.mask)
    assert torch.equal(sharded(X), model(X))
    sharded.original.mask = model.mask = torch.full((4,), 3.0)
    assert torch.equal(sharded(X), model(X))


def test_an_input_returned_as_it_is_stays_the_same_object():
    sharded, _ = pair(lambda m, x: (m.linear(x), x))
    assert sharded(X)[1] is X


def test_gradients_flow_through_outputs_that_are_views_of_each_other():
    def body(m, x):
        y = m.linear(x)
        return y, y.t(), y.view(-1)[2:6]

    sharded, model = pair(body)
    for module in (sharded, model):
        a, b, c = module(X)
        (a.sum() + (b * X.t()).sum() + c.square().sum()).backward()
    torch.testing.assert_close(sharded.linear.weight.grad, model.linear.weight.grad)


def test_gradients_flow_to_inputs():
    sharded, model = pair(lambda m, x: m.linear(x).square())
    inputs = [X.clone().requires_grad_() for _ in range(2)]
    for module, x in zip((sharded, model), inputs, strict=True):
        module(x).sum().backward()
    torch.testing.assert_close(inputs[0].grad, inputs[1].grad)


def test_an_input_written_in_place_is_written():
    def body(m, x):
        x.add_(1)
        return m.linear(x)

    sharded, model = pair(body)
    mine, theirs = X.clone(), X.clone()
    assert torch.equal(sharded(mine), model(theirs)) and torch.equal(mine, theirs)


def test_a_second_backward_works_with_retain_graph():
    sharded, model = pair(lambda m, x: m.linear(x).square())
    for module in (sharded, model):
        loss = module(X).sum()
        loss.backward(retain_graph=True)
        loss.backward()
    torch.testing.assert_close(sharded.linear.weight.grad, model.linear.weight.grad)


def test_autocast_around_a_call_is_respected():
    sharded, model = pair(lambda m, x: m.linear(x))
    with torch.autocast("cpu", torch.bfloat16):
        mine, theirs = sharded(X), model(X)
    assert mine.dtype == theirs.dtype == torch.bfloat16
    for module, output in ((sharded, mine), (model, theirs)):
        output.float().sum().backward()
        assert module.linear.weight.grad.dtype == torch.float32
    torch.testing.assert_close(sharded.linear.weight.grad, model.linear.weight.grad)


def test_batch_norm_statistics_follow_the_original():
    model, (args, kwargs) = make("conv-batch-norm", 4)
    sharded = shardgraph.compile(copy.deepcopy(model), "single")
    for _ in range(3):
        scalar(sharded(*args, **kwargs)).backward()
        scalar(model(*args, **kwargs)).backward()
    torch.testing.assert_close(dict(sharded.named_buffers()), dict(model.named_buffers()))


def test_one_rank_draws_the_dropout_of_the_original():
    model, (args, _) = make("tied-transformer", 2)
    sharded = shardgraph.compile(copy.deepcopy(model), "single")
    torch.manual_seed(5)
    mine = sharded(*args)
    torch.manual_seed(5)
    torch.testing.assert_close(mine, model(*args))


@pytest.mark.slow
def test_eval_and_frozen_parameters_get_programs_of_their_own():
    model, (args, _) = make("tied-transformer", 2)
    sharded = shardgraph.compile(copy.deepcopy(model), "single")
    sharded.eval()
    torch.testing.assert_close(sharded(*args), model.eval()(*args))
    sharded.blocks.requires_grad_(False)
    sharded.zero_grad()
    scalar(sharded(*args)).backward()
    assert sharded.blocks.layers[0].linear1.weight.grad is None and sharded.embedding.weight.grad is not None


def test_new_shapes_compile_once_each():
    sharded, model = pair(lambda m, x: m.linear(x))
    for rows in (1, 2, 3, 2, 1):
        x = torch.randn(rows, 4)
        torch.testing.assert_close(sharded(x), model(x))
    assert len(sharded._programs.kept) == 3


def test_a_number_that_decides_a_shape_still_works():
    sharded, model = pair(lambda m, x, n: m.linear(x).repeat(n, 1))
    for n in (1, 2, 3):
        torch.testing.assert_close(sharded(X, n), model(X, n))


def test_a_value_read_from_a_tensor_scales_as_in_the_original():
    sharded, model = pair(lambda m, x: m.linear(x) * x.sum().item())
    for module in (sharded, model):
        module(X).sum().backward()
    torch.testing.assert_close(sharded.linear.weight.grad, model.linear.weight.grad)


def test_train_step_is_forward_loss_and_backward():
    torch.manual_seed(0)
    model = nn.Linear(4, 3)
    sharded = shardgraph.compile(copy.deepcopy(model), "single", loss_fn=F.mse_loss)
    target = torch.ones(2, 3)
    loss = sharded.train_step(X, target=target)
    expected = F.mse_loss(model(X), target)
    expected.backward()
    torch.testing.assert_close(loss, expected.detach())
    torch.testing.assert_close(sharded.weight.grad, model.weight.grad)


def test_train_step_without_a_loss_says_what_to_give():
    sharded, _ = pair(lambda m, x: m.linear(x))
    with pytest.raises(shardgraph.ShardGraphError, match="loss_fn"):
        sharded.train_step(X, target=X)


def test_train_step_without_the_target_of_its_loss_says_so():
    sharded = shardgraph.compile(nn.Linear(4, 4), "single", loss_fn=nn.functional.mse_loss)
    with pytest.raises(shardgraph.ShardGraphError, match=r"needs the target of loss_fn\(output, target\).*target="):
        sharded.train_step(X)


def test_fused_and_foreach_optimizers_and_schedulers_step():
    sharded, _ = pair(lambda m, x: m.linear(x))
    for kind in ({"fused": True}, {"foreach": True}):
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.1, **kind)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
        before = sharded.linear.weight.detach().clone()
        sharded(X).sum().backward()
        optimizer.step()
        scheduler.step()
        assert not torch.equal(before, sharded.linear.weight)


def test_attributes_of_the_original_are_there():
    sharded, _ = pair(lambda m, x: m.linear(x))
    assert sharded.config.name == "mine" and isinstance(sharded.linear, nn.Linear)


def test_graphs_can_be_printed_and_run_again():
    sharded, model = pair(lambda m, x: m.linear(x))
    with pytest.raises(shardgraph.ShardGraphError, match="nothing has been compiled"):
        _ = sharded.forward_graph
    sharded(X)
    assert isinstance(sharded.forward_graph, fx.GraphModule) and "addmm" in sharded.forward_graph.code
    again = sharded.forward_graph(model.linear.weight.detach(), model.linear.bias.detach(), model.mask, X)
    torch.testing.assert_close(again[0], model(X).detach())


def test_example_inputs_compile_at_once():
    sharded = shardgraph.compile(nn.Linear(4, 4), "single", example_inputs=(X,))
    assert "addmm" in sharded.forward_graph.code


def test_the_program_predicts_its_memory():
    sharded = shardgraph.compile(nn.Linear(4, 4), "single", example_inputs=(X,))
    profile = profile_memory(sharded.forward_graph)
    assert profile.peak_bytes >= 4 * (16 + 4 + 8 + 8)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (lambda m, x: m.linear(x) + (1 if m.linear(x).sum() > 0 else 2), r"(?s)Data-dependent.*test_module\.py:\d+"),
        (lambda m, x: (m.linear(x), m.linear.weight), "returns the parameter 'linear.weight' itself"),
        (
            lambda m, x: m.linear(x)[m.linear(x) > 0],
            r"index.* whose shape depends on values, at .*test_module\.py:\d+.*torch\.where",
        ),
        (
            lambda m, x: m.linear(x) + m.linear(x).nonzero().sum(),
            r"nonzero.* whose shape depends on values, at .*test_module\.py:\d+",
        ),
        (lambda m, x: (SEEN.append(1), m.linear(x))[1], r"forward writes to .*SEEN, which is not the model's"),
        (lambda m, x: (setattr(m.linear.bias, "data", 2 * x[0]), m.linear(x))[1], "replaces the data of a parameter"),
    ],
    ids=["a branch", "a parameter", "a mask", "nonzero", "a global", "data"],
)
def test_what_cannot_be_captured_is_refused_with_the_users_line(body, message):
    sharded, _ = pair(body)
    with pytest.raises(shardgraph.CaptureError, match=message):
        sharded(X)


def test_a_backward_hook_of_a_submodule_is_refused_with_what_works():
    model = nn.Sequential(nn.Linear(4, 4))
    model[0].register_full_backward_hook(lambda *_: None)
    with pytest.raises(shardgraph.CaptureError, match=r"has a backward hook .*register it on the compiled module"):
        shardgraph.compile(model, "single", example_inputs=(X,))


def test_a_training_step_with_a_loss_needs_the_target():
    sharded = shardgraph.compile(nn.Linear(4, 4), "single", loss_fn=nn.functional.mse_loss)
    with pytest.raises(shardgraph.ShardGraphError, match=r"needs the target of loss_fn.*target=\.\.\."):
        sharded.train_step(X)


def test_an_added_parameter_without_values_is_refused_by_name():
    sharded = shardgraph.compile(nn.Sequential(nn.Linear(4, 4)), "single")
    sharded(X)
    sharded.original.append(nn.Linear(4, 4, device="meta"))
    with pytest.raises(shardgraph.ShardGraphError, match=r"'1\.weight' was added after .* is on meta: give it values"):
        sharded(X)


def test_a_parameter_of_no_compiled_module_is_told_by_its_shape():
    with pytest.raises(shardgraph.ShardGraphError, match=r"shape \[3, 2\] is not of a compiled module"):
        module_of(nn.Linear(2, 3).weight)


def test_a_checkpoint_of_another_model_is_refused():
    sharded, _ = pair(lambda m, x: m.linear(x))
    with pytest.raises(shardgraph.CheckpointError, match="another model"):
        sharded.load_state_dict(nn.Linear(3, 3).state_dict())


def test_an_unknown_backend_is_refused():
    with pytest.raises(shardgraph.ShardGraphError, match="there are eager, inductor"):
        shardgraph.compile(nn.Linear(2, 2), backend="inductr")


def test_a_mesh_without_ranks_is_refused_with_what_would_start_them():
    with pytest.raises(shardgraph.PlanError, match=r"shardgraph\.launch"):
        shardgraph.compile(nn.Linear(2, 2), "fsdp", mesh={"dp": 2})


def test_a_training_step_without_any_loss_says_what_gives_one():
    sharded = shardgraph.compile(nn.Linear(3, 3), "single")
    with pytest.raises(
        shardgraph.ShardGraphError, match=r"needs a loss, which is one number: give shardgraph.compile a loss_fn"
    ):
        sharded.train_step(torch.randn(2, 3))
    with pytest.raises(shardgraph.ShardGraphError, match=r"has a target and no loss to make of it"):
        sharded.train_step(torch.randn(2, 3), target=torch.randn(2, 3))


@pytest.mark.parametrize(
    "args, kwargs, said",
    [
        ((), {}, "missing a required argument: 'input'"),
        ((torch.zeros(2, 3), 1), {}, "too many positional arguments"),
        ((torch.zeros(2, 3),), {"mask": 1}, "got an unexpected keyword argument 'mask'"),
    ],
)
def test_arguments_that_forward_does_not_take_are_told_as_python_does_with_what_it_takes(args, kwargs, said):
    sharded = shardgraph.compile(nn.Linear(3, 2), "single")
    with pytest.raises(CaptureError, match=f"Linear cannot be called like this: {said}; it is forward\\(input"):
        sharded(*args, **kwargs)
