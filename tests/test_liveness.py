"""Predicted peak memory, against bytes counted by hand and against a measured run."""

from __future__ import annotations

import operator
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx

from shardgraph import ir
from shardgraph.ir import Buffer, Gradient, Input, Output, Parameter, Saved, Tangent
from shardgraph.ir.attributes import MEMORY_KIND, ROLE, ROLES, VALUE, Labels, write
from shardgraph.passes.analysis.liveness import MemoryProfile, profile_memory, settle_memory
from shardgraph.passes.lowering import build_program
from shardgraph.plans.presets import preset
from shardgraph.runtime.measure import PeakMemory
from tests.as_run import as_run

aten = torch.ops.aten
KB = 1024


class Builder:
    """Hand-built graphs whose values are vectors of whole kilobytes."""

    def __init__(self) -> None:
        self.graph = fx.Graph()

    def given(self, role: ir.Role, kilobytes: int) -> fx.Node:
        node = self.graph.placeholder(f"p{len(self.graph.nodes)}")
        write(node, {ROLE: role, VALUE: self.vector(kilobytes)})
        return node

    def call(self, target: Callable, *args, kilobytes: int, labels: Labels | None = None) -> fx.Node:
        node = self.graph.call_function(target, args)
        write(node, {**(labels or {}), VALUE: self.vector(kilobytes)})
        return node

    def profile(self, *results: tuple[ir.Role, fx.Node]):
        output = self.graph.output(tuple(node for _, node in results))
        ROLES.set(output, [role for role, _ in results])
        return profile_memory(fx.GraphModule({}, self.graph))

    @staticmethod
    def vector(kilobytes: int) -> torch.Tensor:
        return torch.empty(kilobytes * KB // 4, device="meta")


def composition(profile: MemoryProfile) -> dict[str, int]:
    """Bytes at the peak by kind."""
    peak = profile.timeline.index(profile.peak_bytes)
    return {kind: line[peak] for kind, line in profile.compositions.items() if line[peak]}


@pytest.fixture
def build() -> Builder:
    return Builder()


def test_temporaries_die_after_their_last_use(build: Builder) -> None:
    x = build.given(Input(0), 4)
    a = build.call(aten.cumsum.default, x, 0, kilobytes=4)
    b = build.call(aten.cumsum.default, a, 0, kilobytes=4)
    c = build.call(aten.cumsum.default, b, 0, kilobytes=4)
    profile = build.profile((Output(0), c))
    assert profile.timeline == (4 * KB, 8 * KB, 12 * KB, 12 * KB, 8 * KB)
    assert profile.nodes[profile.timeline.index(profile.peak_bytes)][1] == b.name
    assert composition(profile) == {"inputs": 4 * KB, "temporaries": 8 * KB}


def test_what_computes_element_by_element_is_in_the_memory_of_an_operand_that_dies(build: Builder) -> None:
    x = build.given(Input(0), 4)
    a = build.call(aten.neg.default, x, kilobytes=4)
    b = build.call(aten.neg.default, a, kilobytes=4)
    c = build.call(aten.add.Tensor, x, b, kilobytes=4)
    assert build.profile((Output(0), c)).timeline == (4 * KB, 8 * KB, 8 * KB, 8 * KB, 8 * KB)


def test_a_view_costs_nothing_and_keeps_its_base(build: Builder) -> None:
    x = build.given(Input(0), 4)
    a = build.call(aten.neg.default, x, kilobytes=4)
    view = build.call(aten.slice.Tensor, a, 0, 0, 256, kilobytes=1)
    b = build.call(aten.neg.default, x, kilobytes=4)
    assert build.profile((Output(0), view), (Output(1), b)).timeline == (4 * KB, 8 * KB, 8 * KB, 12 * KB, 12 * KB)


def test_an_unsafe_view_costs_nothing(build: Builder) -> None:
    x = build.given(Input(0), 4)
    view = build.call(aten._unsafe_view.default, x, [2, 512], kilobytes=4)
    assert build.profile((Output(0), view)).peak_bytes == 4 * KB


def test_an_in_place_operation_costs_nothing(build: Builder) -> None:
    x = build.given(Input(0), 4)
    a = build.call(aten.neg.default, x, kilobytes=4)
    b = build.call(aten.add_.Tensor, a, 1, kilobytes=4)
    assert build.profile((Output(0), b)).peak_bytes == 8 * KB


@pytest.mark.parametrize("target", [ir.trim_shard, ir.local_chunk])
def test_cutting_a_shard_costs_nothing(build: Builder, target: Callable) -> None:
    x = build.given(Input(0), 4)
    cut = build.call(target, x, 2 * KB, "dp", kilobytes=2)
    assert build.profile((Output(0), cut)).peak_bytes == 4 * KB


@pytest.mark.parametrize(("rows", "expected"), [(KB, 4 * KB), (2 * KB, 12 * KB)])
def test_padding_a_shard_costs_only_where_rows_are_missing(build: Builder, rows: int, expected: int) -> None:
    x = build.given(Input(0), 4)
    padded = build.call(ir.pad_shard, x, rows, kilobytes=rows * 4 // KB)
    assert build.profile((Output(0), padded)).peak_bytes == expected


@pytest.mark.parametrize(
    ("shapes", "parts", "expected"), [([KB], 1, 8), ([512, 512], 1, 8), ([KB], 2, 8), ([512, 512], 2, 12)]
)
def test_unpacking_costs_only_what_does_not_lie_together(build: Builder, shapes, parts: int, expected: int) -> None:
    given = build.call(aten.neg.default, build.given(Input(0), 4), kilobytes=4)
    unpacked = build.call(ir.buckets.unpack_parts, given, [[each] for each in shapes], parts, kilobytes=4)
    VALUE.set(unpacked, [build.vector(4 // len(shapes)) for _ in shapes])
    pieces = [build.call(operator.getitem, unpacked, i, kilobytes=4 // len(shapes)) for i in range(len(shapes))]
    assert build.profile(*((Output(i), piece) for i, piece in enumerate(pieces))).peak_bytes == expected * KB


def test_saved_values_and_tangents_die_but_parameters_stay(build: Builder) -> None:
    saved, tangent = build.given(Saved(0), 4), build.given(Tangent(0), 4)
    build.given(Parameter("w"), 2)
    product = build.call(aten.mul.Tensor, saved, tangent, kilobytes=4)
    gradient = build.call(aten.cumsum.default, product, 0, kilobytes=4)
    assert build.profile((Gradient(Parameter("w")), gradient)).timeline[-2:] == (10 * KB, 6 * KB)


def test_saved_values_that_share_a_storage_are_counted_once(build: Builder) -> None:
    one, other = build.given(Saved(0), 4), build.given(Saved(1), 4)
    other.meta["val"] = one.meta["val"].view(2, -1)
    assert build.profile().peak_bytes == 4 * KB


def test_the_peak_is_composed_by_kind(build: Builder) -> None:
    w, b, x = build.given(Parameter("w"), 1), build.given(Buffer("b"), 2), build.given(Input(0), 3)
    gathered = build.call(ir.ALL_GATHER, w, 4, "dp", kilobytes=4, labels={MEMORY_KIND: "gathered"})
    full = build.call(ir.WAIT, gathered, kilobytes=4, labels={MEMORY_KIND: "gathered"})
    saved = build.call(aten.mul.Tensor, full, x, kilobytes=5)
    out = build.call(aten.mul.Tensor, saved, b, kilobytes=6)
    local = build.call(aten.mul.Tensor, out, full, kilobytes=7)
    assert composition(build.profile((Output(0), out), (Saved(0), saved), (Gradient(Parameter("w")), local))) == {
        "parameters": 1 * KB,
        "buffers": 2 * KB,
        "inputs": 3 * KB,
        "gathered parameters": 4 * KB,
        "saved": 5 * KB,
        "activations": 6 * KB,
        "gradients": 7 * KB,
    }


def test_a_collective_holds_its_input_until_its_wait(build: Builder) -> None:
    x = build.given(Input(0), 4)
    a = build.call(aten.neg.default, x, kilobytes=4)
    start = build.call(ir.REDUCE_SCATTER, a, "sum", 2, "dp", kilobytes=2)
    b = build.call(aten.neg.default, x, kilobytes=4)
    wait = build.call(ir.WAIT, start, kilobytes=2)
    profile = build.profile((Output(0), b), (Output(1), wait))
    assert profile.timeline == (4 * KB, 8 * KB, 10 * KB, 14 * KB, 14 * KB, 10 * KB)


def test_an_all_reduce_of_what_nobody_else_reads_takes_no_memory(build: Builder) -> None:
    x = build.given(Input(0), 4)
    a = build.call(aten.neg.default, x, kilobytes=4)
    start = build.call(ir.ALL_REDUCE, a, "sum", "dp", kilobytes=4)
    b = build.call(aten.neg.default, x, kilobytes=4)
    wait = build.call(ir.WAIT, start, kilobytes=4)
    profile = build.profile((Output(0), b), (Output(1), wait))
    assert profile.timeline == (4 * KB, 8 * KB, 8 * KB, 12 * KB, 12 * KB, 12 * KB)


def test_an_all_reduce_of_what_belongs_to_the_caller_works_on_a_copy(build: Builder) -> None:
    x = build.given(Input(0), 4)
    start = build.call(ir.ALL_REDUCE, x, "sum", "dp", kilobytes=4)
    wait = build.call(ir.WAIT, start, kilobytes=4)
    profile = build.profile((Output(0), wait))
    assert profile.timeline == (4 * KB, 8 * KB, 8 * KB, 8 * KB)


def test_results_that_share_memory_with_inputs_or_with_each_other_are_not_their_own(build: Builder) -> None:
    x = build.given(Input(0), 4)
    view = build.call(aten.view.default, x, [-1], kilobytes=4)
    both = build.call(aten.neg.default, x, kilobytes=4)
    alone = build.call(aten.neg.default, x, kilobytes=4)
    again = build.call(aten.view.default, alone, [-1], kilobytes=4)
    output = build.graph.output((view, both, both, again))
    ROLES.set(output, [Output(i) for i in range(4)])
    assert settle_memory(fx.GraphModule({}, build.graph)) == {Output(3)}


def test_a_result_that_repeats_elements_is_not_its_own() -> None:
    with FakeTensorMode():
        gm = make_fx(lambda x: (x.sum().expand(8), x.neg()[:2], x.neg()))(torch.empty(8))
    ROLE.set(next(iter(gm.graph.nodes)), Input(0))
    ir.set_outputs(gm, [(Output(i), value) for i, value in enumerate(gm.graph.output_node().args[0])])
    assert settle_memory(gm) == {Output(2)}


# -- against a measured run ------------------------------------------------------------------------


def mlp(w1, w2, x):
    return F.gelu(x @ w1.t()) @ w2.t()


def mlp_step(w1, w2, x):
    loss = F.cross_entropy(F.gelu(F.linear(x, w1)) @ w2.t(), torch.zeros(32, dtype=torch.int64))
    return (loss, *torch.autograd.grad(loss, (w1, w2)))


def normed_attention(w1, w2, x):
    q, k, v = F.layer_norm(x @ w1.t(), (64,)).view(4, 8, 64).split(16, dim=-1)[:3]
    return torch.softmax(q @ k.transpose(-1, -2), -1) @ v


def batched_linear(w1, w2, x):
    return F.linear(F.linear(x.view(4, 8, 32), w1).relu(), w2).sum()


def normed_attention_step(w1, w2, x):
    return torch.autograd.grad(normed_attention(w1, w2, x).sum(), (w1, x))


@pytest.mark.parametrize("handed_over", [False, True], ids=["held", "handed over"])
@pytest.mark.parametrize("step", [mlp, mlp_step, normed_attention, normed_attention_step, batched_linear])
def test_the_prediction_equals_the_measurement(step: Callable, handed_over: bool) -> None:
    with FakeTensorMode(allow_non_fake_inputs=True):
        args = [torch.empty(64, 32), torch.empty(16, 64), torch.empty(32, 32)]
        fake = [arg.requires_grad_() for arg in args]
    gm = make_fx(step, tracing_mode="real")(*fake)
    inputs = [node for node in gm.graph.nodes if node.op == "placeholder"]
    for index, node in enumerate(inputs):
        ROLE.set(node, Saved(index) if handed_over else Input(index))
    gm.graph.eliminate_dead_code()
    returned = gm.graph.output_node().args[0]
    returned = tuple(returned) if isinstance(returned, (tuple, list)) else (returned,)
    ir.set_outputs(gm, [(Output(i), value) for i, value in enumerate(returned)])
    predicted = profile_memory(gm)

    run = as_run(gm)
    real = [torch.randn(value.shape) for value in args]
    memory = PeakMemory().track(real)
    held = [] if handed_over else list(real)
    values = list(real)
    del real
    with torch.no_grad(), memory:
        run(values)
    assert memory.peak_bytes == predicted.peak_bytes
    del held


def test_the_prediction_holds_for_both_halves_of_a_compiled_program() -> None:
    model = nn.Sequential(nn.Embedding(100, 64), nn.TransformerEncoderLayer(64, 4, 128, 0.0), nn.Linear(64, 100))
    ids = torch.randint(0, 100, (4, 16))
    program = build_program(model, preset("single", ()), (ids,))
    values = [
        ids if isinstance(role, Input) else torch.randn(node.meta["val"].shape)
        for role, node in ir.placeholders(program.forward).items()
    ]
    results: list = []
    forward = PeakMemory().track(values)
    with torch.no_grad(), forward:
        results += as_run(program.forward)(list(values))
    assert forward.peak_bytes == profile_memory(program.forward).peak_bytes
    del values

    made = dict(zip((role for role, _ in ir.outputs(program.forward)), results, strict=True))
    values = [
        made[role] if isinstance(role, Saved) else torch.ones(node.meta["val"].shape)
        for role, node in ir.placeholders(program.backward).items()
    ]
    made.clear()
    results.clear()
    backward = PeakMemory().track(values)
    with torch.no_grad(), backward:
        as_run(program.backward)(values)
    assert backward.peak_bytes == profile_memory(program.backward).peak_bytes
