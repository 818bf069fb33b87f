"""A model that is captured is only read: what is traced is a copy of its modules."""

import threading
from dataclasses import replace

import pytest
import torch
from torch import nn

from shardgraph import CaptureError, Precision
from shardgraph.capture.capture import capture
from shardgraph.capture.private_copy import private_copy
from shardgraph.capture.stacks import Stack
from shardgraph.ir import Parameter, placeholders
from shardgraph.plans.annotations.kinds import output, replicate
from shardgraph.report.folding import shortened
from shardgraph.torch_api import FakeTensor


class Model(nn.Module):
    """Tied parameters, a buffer, a plain tensor, a hook, a lock and a list of its own modules."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.ones(4))
        self.mask = torch.tensor([1.0, 0.0, 1.0, 1.0])
        self.lock = threading.Lock()
        self.order = [self.first, self.second]
        self.calls = 0
        self.first.register_forward_hook(self.doubled)

    def doubled(self, module, args, result):
        return result * 2 * self.scale

    def forward(self, x):
        for each in self.order:
            x = each(x)
        return x * self.mask


X = torch.randn(3, 4)
CPU = torch.device("cpu")


def everything(model):
    """Every object that a module holds, by where."""
    found = {}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            found[path, key] = value
            if isinstance(value, dict):
                found |= {(path, key, name): each for name, each in value.items()}
    return found


def test_capture_leaves_every_attribute_what_it_was():
    model = Model()
    before, text = everything(model), {key: repr(value) for key, value in everything(model).items()}
    annotated = (("first", output(replicate("tp"))),)  # by hooks, as precision is
    capture(
        model, (X,), {}, device=CPU, annotations=annotated, precision=replace(Precision.of("bf16"), buffers="bfloat16")
    )
    after = everything(model)
    assert before.keys() == after.keys() and all(after[key] is value for key, value in before.items())
    assert text == {key: repr(value) for key, value in after.items()}


def test_a_thread_that_runs_the_model_meanwhile_sees_its_own_tensors():
    model, stop, seen = Model(), threading.Event(), []
    expected = model(X).detach()

    def run() -> None:
        while not stop.is_set():
            held = [type(tensor) for tensor in (*model.parameters(), *model.buffers(), model.mask)]
            try:
                seen.append(FakeTensor not in held and torch.equal(model(X), expected))
            except Exception as error:  # told to the test
                seen.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        for _ in range(3):
            capture(model, (X,), {}, device=CPU)
    finally:
        stop.set()
        thread.join(timeout=60)
    assert seen and all(each is True for each in seen)


def test_tied_parameters_are_one_input():
    joint = capture(Model(), (X,), {}, device=CPU)
    named = [role.fqn for role in placeholders(joint.module) if isinstance(role, Parameter)]
    assert named == ["first.weight", "first.bias", "second.bias"]


def test_modules_and_methods_in_attributes_and_hooks_are_the_copy_s_own():
    model = Model()
    copy = private_copy(model)
    assert copy.order[0] is copy.first is not model.first
    assert next(iter(copy.first._forward_hooks.values())).__self__ is copy
    assert copy.first.weight is copy.second.weight is model.first.weight


def test_what_cannot_be_copied_is_shared():
    model = Model()
    assert private_copy(model).lock is model.lock


def test_tensors_in_attributes_take_no_memory_in_a_copy():
    model = Model()
    model.cache = {"keys": [torch.zeros(3)], "teacher": nn.Linear(2, 2)}
    copy = private_copy(model)
    assert copy.cache is not model.cache and copy.cache["keys"][0] is model.cache["keys"][0]
    assert copy.cache["teacher"] is model.cache["teacher"]


def test_what_forward_writes_into_an_attribute_is_the_copy_s():
    class Marks(Model):
        def forward(self, x):
            self.calls = 7
            return super().forward(x)

    model = Marks()
    capture(model, (X,), {}, device=CPU)
    assert model.calls == 0


def test_parameters_that_forward_reads_from_a_list_are_refused_and_not_frozen():
    class Listed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(4, 4)
            self.flat = [self.linear.weight, self.linear.bias]

        def forward(self, x):
            return nn.functional.linear(x, *self.flat)

    with pytest.raises(CaptureError):
        capture(Listed(), (X,), {}, device=CPU)


def test_a_shortened_model_is_a_copy():
    model = nn.Sequential(nn.ModuleList([nn.Linear(2, 2) for _ in range(5)]))
    short = shortened(model, (Stack("0", 5), 2))
    assert len(short[0]) == 2 and len(model[0]) == 5 and short[0][0].weight is model[0][0].weight
