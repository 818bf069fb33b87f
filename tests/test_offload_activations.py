"""Offload of activations: what goes to the host and when, that training is the same, and the memory as predicted."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import Offload, PlanError, annotate, ir, offload, preset, recompute
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.device import Host, Link, Rate
from shardgraph.ir import Input, Saved
from shardgraph.ir.copies import TO_DEVICE, TO_HOST
from shardgraph.passes.analysis.liveness import profile_memory, profile_step
from shardgraph.passes.analysis.names import module_of
from shardgraph.passes.lowering import build_program
from shardgraph.passes.offload import offload_activations
from shardgraph.passes.offload.window import awaited, started, staying
from shardgraph.passes.program import Program
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.remembered import annotated
from shardgraph.report.analysis import analyze_program
from shardgraph.report.step import program_memory
from shardgraph.runtime.host import is_on_host
from shardgraph.runtime.measure import PeakMemory
from tests import pipelines, ranks
from tests.as_run import as_run
from tests.machines import toy_cluster
from tests.standing import on_ranks
from tests.zoo import Deep, make, scalar, shorter

pytestmark = pytest.mark.usefixtures("shared_captures")

DP, PP = {"dp": 2}, {"pp": 2}
ACTIVATIONS = Offload(activations=True)


def linked(bandwidth: float) -> Cluster:
    """A toy cluster whose devices copy so many bytes/s to and from their host."""
    host = Host(Link(bandwidth, 0.0), optimizer=Rate(1e10))
    return replace(toy_cluster(), device=replace(toy_cluster().device, host=host))


LINKED = linked(1e10)


def rows(count: int = 512) -> torch.Tensor:
    return torch.randn(count, 32, generator=torch.Generator().manual_seed(0))


def program_of(model: nn.Module, *args: torch.Tensor, offload: Offload = ACTIVATIONS, **changes) -> Program:
    """The program of one process without a group."""
    return build_program(model, annotated(replace(preset("single", ()), offload=offload, **changes), model), args)


def copied(program: Program) -> list[str]:
    """The module and name of each value that goes to the host, in order."""
    return [f"{module_of(n.args[0])} {n.args[0].name}" for n in program.forward.graph.nodes if n.target is TO_HOST]


# -- training --------------------------------------------------------------------------------------


@pytest.mark.quick("odd-mlp-ddp-mesh4-more4")
@pytest.mark.parametrize(
    ("name", "plan", "mesh", "more"),
    [
        ("tied-transformer", "single", {"dp": 1}, {}),
        ("tied-transformer", "fsdp+tp", {"dp": 2, "tp": 2}, {"recompute": "full"}),
        ("unet", "zero2", DP, {}),
        ("conv-batch-norm", "zero1", DP, {}),
        ("odd-mlp", "ddp", DP, {"precision": "bfloat16"}),
        ("mixture", "fsdp+ep", {"dp": 2, "ep": 2}, {}),
        ("gpt2", "fsdp", DP, {"recompute": "selective", "loss_chunk": "2KiB"}),
        pytest.param("llama", "fsdp+tp+sp", {"dp": 2, "tp": 2}, {}, marks=pytest.mark.slow),
        pytest.param("llama", "cp", {"cp": 2}, {}, marks=pytest.mark.slow),
        pytest.param("t5", "hsdp", {"a": 2, "b": 2}, {"recompute": "full"}, marks=pytest.mark.slow),
        pytest.param("bert", "fsdp", DP, {"offload": "all"}, marks=pytest.mark.slow),
        pytest.param("vit", "zero2", DP, {}, marks=pytest.mark.slow),
        pytest.param("mixtral", "fsdp", DP, {}, marks=pytest.mark.slow),
    ],
)
def test_a_model_trains_like_the_unsharded_one(name, plan, mesh, more):
    model, call = make(name, 4)
    args, kwargs = shorter(call, 8) if plan == "cp" else call
    given = {"mesh": mesh, "example_kwargs": kwargs, "offload": "activations", "steps": 3, "fp64": True}
    report = shardgraph.verify(model, args, plan, **given | more)
    assert report.ok and report.plan.offload.activations, str(report)


@pytest.mark.slow
@pytest.mark.parametrize(
    "pipeline", [Pipeline(4, "gpipe"), Pipeline(4, "zbv"), Pipeline(4, "1f1b", checkpoint="always")]
)
def test_a_pipeline_trains_like_the_unsharded_model(pipeline):
    model, (args, kwargs) = make("tied-transformer", 8)
    plan = replace(preset("pp", PP, pipeline), offload=ACTIVATIONS)
    report = shardgraph.verify(model, args, plan, mesh=PP, example_kwargs=kwargs, steps=2, fp64=True)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("schedule", ["1f1b", pytest.param("zbv", marks=pytest.mark.slow)])
def test_the_ranks_of_a_pipeline_train_like_the_unsharded_model(schedule):
    assert max(on_ranks(pipelines.offloaded_error, 2, args=(schedule,), timeout=100)) < 1e-9


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_train_like_the_unsharded_model_also_with_gradients_that_are_added_up():
    for worst, accumulated in on_ranks(ranks.offloaded_activations, 2, timeout=100):
        assert worst < 1e-9 and accumulated < 1e-9


@pytest.mark.slow
def test_a_wrong_copy_is_found_and_the_pass_named(monkeypatch):
    def swaps(gm, *rest):
        rewrite(gm, *rest)
        one, other = [n for n in gm.graph.nodes if n.target is TO_DEVICE and n.meta["val"].shape[1] == 128][:2]
        one.args, other.args = other.args, one.args

    rewrite = offload_activations._copy_back
    monkeypatch.setattr(offload_activations, "_copy_back", swaps)
    report = shardgraph.verify(Deep(6), (rows(64),), "fsdp", mesh=DP, offload="activations")
    assert not report.ok and report.first_divergence.made_by == "offload-activations"


# -- what goes to the host -------------------------------------------------------------------------


def test_what_backward_begins_with_stays_and_all_else_that_layers_make_goes():
    program = program_of(Deep(6), rows())
    modules = {name.split()[0] for name in copied(program)}
    assert {f"layers.{i}.{j}" for i in range(5) for j in (0, 1, 2)} <= modules
    assert "layers.5.2" not in modules  # its result is what backward reads second


def test_what_stays_on_the_device_anyway_is_not_copied():
    model, (args, _) = make("odd-mlp", 64)  # returns two values that backward reads
    program = program_of(model, *args, offload=ACTIVATIONS)
    returned = {value for role, value in ir.outputs(program.forward) if isinstance(role, ir.Output)}
    for node in program.forward.graph.nodes:
        if node.target is TO_HOST:
            assert node.args[0].op == "call_function" and node.args[0] not in returned


class Gated(nn.Module):
    """Backward reads three views of what it projects."""

    def __init__(self) -> None:
        super().__init__()
        self.project, self.out = nn.Linear(16, 48), nn.Linear(16, 16)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b, c = self.project(x).chunk(3, -1)
        return x + self.out(a * b * c)


def test_a_storage_goes_once_however_many_views_of_it_backward_reads():
    model, x = nn.Sequential(*[Gated() for _ in range(3)]), torch.randn(4, 16)
    modules = [name.split()[0] for name in copied(program_of(model, x))]
    assert modules.count("0.project") == modules.count("1.project") == 1
    assert shardgraph.verify(model, (x,), "fsdp", mesh=DP, offload="activations", fp64=True).ok


def test_what_is_small_stays():
    program = program_of(Deep(6), rows())
    assert not any(name.endswith(("getitem_1", "getitem_2", "getitem_4")) for name in copied(program))  # of norms
    kept = [role for role, node in ir.outputs(program.forward) if isinstance(role, Saved) and "getitem" in node.name]
    assert len(kept) >= 2 * 6


def test_an_annotation_sends_what_its_modules_make():
    model = Deep(6)
    annotate(model, {"layers.[1-2].2": offload()})
    assert [name.split()[0] for name in copied(program_of(model, rows(), offload=Offload()))] == ["layers.1.2"]


def test_what_an_annotated_layer_is_computed_again_from_goes():
    model = Deep(6)
    annotate(model, {"layers.*": [recompute(), offload()]})
    program = program_of(model, rows(), offload=Offload())
    assert copied(program) == [f" {name}" for name in ("add", "add_1", "add_2", "add_3")]  # not what is read first


def test_a_plan_with_offloaded_activations_is_kept_as_a_file():
    plan = replace(preset("fsdp", DP), offload=ACTIVATIONS)
    assert shardgraph.Plan.from_yaml(plan.to_yaml()) == plan and "activations" in str(plan)


# -- when ------------------------------------------------------------------------------------------


def test_in_forward_a_window_of_bytes_lies_on_the_device_behind_what_is_done():
    sizes, moves = [3, 1, 2, 2, 4, 1], [True] * 5 + [False]
    until = awaited(sizes, moves, 4)
    for now in range(len(sizes)):
        behind = [i for i in range(now + 1) if until[i] > now]
        assert sum(sizes[i] for i in behind) <= 4 or len(behind) == 1
    assert until == [2, 3, 4, 4, 5, 5]


def test_in_backward_a_window_of_bytes_lies_on_the_device_ahead_of_what_is_reached():
    sizes = [1, 4, 2, 2, 3, 9, 1]
    since = started(sizes, 4)
    assert since == sorted(since) and all(at < i for i, at in enumerate(since))
    for now in range(-1, len(sizes)):
        ahead = [i for i, at in enumerate(since) if at <= now < i]
        assert sum(sizes[i] for i in ahead) <= 4 or len(ahead) == 1
    assert staying(sizes, 4) == 1 and staying([9, 1], 4) == 1 and staying([1, 3, 1], 4) == 2


def copies_and_uses(program: Program) -> Iterator[tuple[int, int, int]]:
    """Where in forward each copy starts after its value is made and is awaited, counted in computing operations."""
    place, count = {}, 0
    for node in program.forward.graph.nodes:
        count += node.op == "call_function" and module_of(node) != "" and node.target is not TO_HOST
        place[node] = count
    for node in place:
        if node.target is TO_HOST:
            (wait,) = node.users
            yield place[node.args[0]], place[node], place[wait]


def test_a_copy_starts_when_its_value_is_made_and_is_awaited_layers_later():
    model = Deep(8)
    program = program_of(model, rows())
    spans = list(copies_and_uses(program))
    assert all(start == made for made, start, _ in spans)
    assert sum(wait > start for _, start, wait in spans) > 0.9 * len(spans)
    backward = list(program.backward.graph.nodes)
    for node in backward:
        if node.target is TO_DEVICE:
            (wait,) = node.users
            used = min(backward.index(user) for user in wait.users)
            assert backward.index(wait) < used
            assert used - backward.index(node) < len(backward) / 4  # ahead of it, and not from the beginning on


def test_copies_are_hidden_behind_computation_where_the_link_is_fast_enough():
    program = program_of(Deep(8), rows(4096))
    without = analyze_program(program_of(Deep(8), rows(4096), offload=Offload()), LINKED).time.total
    fast, slow = (analyze_program(program, linked(bandwidth)) for bandwidth in (6e10, 1e9))
    busy = [fast.timeline.busy(stream) for stream in ("to host", "to device")]
    assert min(busy) > 0.1 * without and fast.time.total < 1.05 * without
    assert slow.time.total > slow.timeline.busy("to host") + slow.timeline.busy("to device")


# -- memory ----------------------------------------------------------------------------------------


@pytest.mark.quick("deep")
@pytest.mark.parametrize(
    "name",
    ["deep", "tied-transformer", *(pytest.param(name, marks=pytest.mark.slow) for name in ("unet", "gpt2", "odd-mlp"))],
)
def test_predicted_peaks_of_device_and_host_are_the_measured_ones(name):
    model, (args, kwargs) = (Deep(6), ((rows(),), {})) if name == "deep" else make(name, 4)
    sharded = shardgraph.compile(model, "single", offload="activations", loss_fn=lambda out, target: scalar(out))
    optimizer, target = torch.optim.AdamW(sharded.parameters()), torch.zeros(1)

    def step() -> None:
        sharded.train_step(*args, target=target, **kwargs)
        optimizer.step()
        optimizer.zero_grad()

    step()
    states = [value for state in optimizer.state.values() for value in state.values()]
    with PeakMemory().track([*sharded.parameters(), *sharded.buffers(), *states, *args, *kwargs.values()]) as memory:
        step()
    predicted = program_memory(sharded.program, "adamw")
    on_host = max(map(sum, zip(*predicted.host.values(), strict=True)))
    assert copied(sharded.program) and memory.host_peak_bytes == on_host
    assert memory.peak_bytes == pytest.approx(predicted.peak_bytes, rel=0.005)


def test_the_bytes_of_each_half_are_those_of_the_prediction():
    program = program_of(Deep(6), rows())
    values = [
        rows() if isinstance(role, Input) else torch.randn(node.meta["val"].shape)
        for role, node in ir.placeholders(program.forward).items()
    ]
    forward = PeakMemory().track(values)
    with torch.no_grad(), forward:
        results = as_run(program.forward)(list(values))
    assert forward.peak_bytes == profile_memory(program.forward).peak_bytes
    del values
    made = dict(zip((role for role, _ in ir.outputs(program.forward)), results, strict=True))
    del results
    values = [
        made.pop(role) if isinstance(role, Saved) else torch.ones(node.meta["val"].shape)
        for role, node in ir.placeholders(program.backward).items()
    ]
    on_host = [value for value in values if is_on_host(value)]
    assert len(on_host) == len(copied(program))
    backward = PeakMemory().track(values)
    del on_host
    made.clear()
    with torch.no_grad(), backward:
        as_run(program.backward)(values)
    assert backward.peak_bytes == profile_memory(program.backward).peak_bytes


@pytest.mark.slow
def test_memory_no_longer_grows_with_the_layers_activations():
    def peak(layers: int, **given) -> int:
        model = Deep(layers)
        found = program_memory(program_of(model, rows(4096), **given), "adamw").peak_bytes
        return found - 4 * sum(parameter.nbytes for parameter in model.parameters())

    layer = (32 + 128 + 128 + 32) * 4096 * 4
    assert peak(16, offload=Offload()) - peak(8, offload=Offload()) > 7.5 * layer
    assert peak(16) - peak(8) < 0.2 * layer  # norms' statistics stay
    assert peak(16) < 4 * layer


def test_in_backward_memory_falls_as_before():
    program = program_of(Deep(12), rows(4096))
    memory = profile_step(program.forward, program.backward)
    held = [sum(line[i] for line in memory.host.values()) for i in range(len(memory.timeline))]
    highest = held.index(max(held))
    assert all(b >= a for a, b in pairwise(held[: highest + 1])) and all(b <= a for a, b in pairwise(held[highest:]))
    assert held[-1] == 0


@pytest.mark.slow
def test_equal_layers_are_analysed_as_all_of_them_would_be():
    given = {"plan": replace(preset("fsdp", DP), offload=ACTIVATIONS), "cluster": LINKED}
    folded, whole = (shardgraph.analyze(Deep(16), (rows(),), **given, fold=fold) for fold in (True, False))
    assert folded.peak_memory == whole.peak_memory and folded.host_memory == whole.host_memory
    assert folded.time.total == pytest.approx(whole.time.total)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_a_pipelines_predicted_peak_is_the_measured_one():
    for measured, predicted in on_ranks(pipelines.offloaded_peaks, 2, timeout=100):
        assert measured == pytest.approx(predicted, rel=0.02)


@pytest.mark.slow
def test_memory_for_recomputation_is_found_on_top_of_what_is_offloaded():
    offloaded = shardgraph.analyze(Deep(6), (rows(),), "fsdp", mesh=DP, cluster=LINKED, offload="activations")
    budget = offloaded.peak_memory - 100_000
    both = shardgraph.analyze(Deep(6), (rows(),), "fsdp", mesh=DP, cluster=LINKED, offload="activations", memory=budget)
    assert both.peak_memory <= budget and both.plan.recompute not in ("none", "budget")
    assert both.plan.offload == ACTIVATIONS


# -- calls -----------------------------------------------------------------------------------------


def test_a_forward_without_gradients_copies_nothing():
    sharded = shardgraph.compile(Deep(6), "single", offload="activations")
    with torch.no_grad():
        sharded(rows())
    assert not copied(sharded.program)


def test_forwards_may_come_before_their_backwards_and_a_graph_may_be_used_twice():
    torch.manual_seed(0)
    original = Deep(6)
    sharded = shardgraph.compile(Deep(6), "single", offload="activations")
    sharded.load_state_dict(original.state_dict())
    given = [rows(64), 2 * rows(64)]
    losses = [sharded(x) for x in given]
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    losses[0].backward()
    (2 * original(given[0]) + original(given[1])).backward()
    for mine, theirs in zip(sharded.parameters(), original.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad)


def test_what_forward_has_sent_is_let_go_without_backward():
    sharded = shardgraph.compile(Deep(6), "single", offload="activations")
    with PeakMemory() as memory:
        sharded(rows())
        once = memory.host_peak_bytes
        sharded(rows())
    assert memory.host_peak_bytes == once > 0


# -- errors ----------------------------------------------------------------------------------------


def test_an_annotation_that_names_nothing_that_is_kept_is_an_error():
    model = nn.Sequential(nn.Linear(8, 8), nn.Flatten(), nn.Linear(8, 8), nn.GELU())
    annotate(model, {"1": offload()})
    with pytest.raises(PlanError, match=r"'1': offload\(\) names modules of which nothing is kept .* of '0'"):
        program_of(model, torch.randn(4, 8), offload=Offload())


def test_a_model_without_anything_to_train_is_told():
    model = Deep(2).requires_grad_(False)
    with pytest.raises(PlanError, match=r"nothing of the model requires a gradient.*no_grad"):
        shardgraph.analyze(model, (rows(),), "single", cluster=LINKED, offload="activations")
    with torch.no_grad():
        shardgraph.compile(model, "single", offload="activations")(rows())
