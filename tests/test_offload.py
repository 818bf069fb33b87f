"""Offloaded parameters: in host memory or on disk, on the device a few at a time, with the same training."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import fx, nn

import shardgraph
from shardgraph import Offload, ParameterPlan, Plan, PlanError, keep_gathered, offload, preset
from shardgraph.cost_models.device import Host, Link, Rate
from shardgraph.ir import ALL_GATHER, Gradient, Parameter, is_wait, outputs, placeholders
from shardgraph.ir.copies import TO_DEVICE, TO_HOST
from shardgraph.passes.analysis.places import on_host
from shardgraph.passes.lowering import build_program
from shardgraph.passes.program import Program
from shardgraph.plans.remembered import annotated
from shardgraph.plans.resolve import resolve_plan
from shardgraph.report.step import program_memory
from shardgraph.runtime.host import is_on_host
from shardgraph.runtime.measure import PeakMemory
from tests import ranks
from tests.machines import toy_cluster, toy_device
from tests.standing import on_ranks
from tests.zoo import Deep, make, shorter

pytestmark = pytest.mark.usefixtures("shared_captures")

DP = {"dp": 2}
ROUNDED = ("llama", "t5")  # their norms compute in single precision, and along other axes in another order
aten = torch.ops.aten


class Wide(nn.Module):
    """Layers whose parameters are most of the memory; gives its loss."""

    def __init__(self, layers: int = 8) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(128, 512), nn.GELU(), nn.Linear(512, 128)) for _ in range(layers)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def planned(plan: str | Plan = "single", given: str | Offload | None = "parameters", mesh=None, model=None) -> Plan:
    mesh = mesh or ({} if plan == "single" else DP)
    chosen = resolve_plan(plan, tuple(mesh.items()))
    chosen = chosen if given is None else replace(chosen, offload=Offload.of(given))
    return chosen if model is None else annotated(chosen, model)


def built(plan: str | Plan = "single", given: str | Offload | None = "parameters", model=None, mesh=None) -> Program:
    model = model or Deep(3)
    return build_program(model, planned(plan, given, mesh, model), (torch.zeros(2, 4, 32),))


def copies(gm: fx.GraphModule, target=TO_DEVICE) -> list[fx.Node]:
    return [node for node in gm.graph.nodes if node.target is target]


# -- the same training -----------------------------------------------------------------------------


@pytest.mark.quick("odd-mlp-single-mesh0", "odd-mlp-zero2-mesh3")
@pytest.mark.parametrize(
    ("kind", "plan", "mesh"),
    [
        ("odd-mlp", "single", {"dp": 1}),
        ("odd-mlp", "ddp", DP),
        ("odd-mlp", "zero1", DP),
        ("odd-mlp", "zero2", {"dp": 3}),
        ("odd-mlp", "fsdp", {"dp": 3}),
        ("odd-mlp", "hsdp", {"dp_replicate": 2, "dp_shard": 2}),
        ("tied-transformer", "fsdp", DP),
        ("gpt2", "single", {"dp": 1}),
        pytest.param("llama", "fsdp+tp", {"dp": 2, "tp": 2}, marks=pytest.mark.slow),
        pytest.param("tied-transformer", "single", {"dp": 1}, marks=pytest.mark.slow),
        pytest.param("tied-transformer", "tp+sp", {"tp": 2}, marks=pytest.mark.slow),
        pytest.param("gpt2", "zero2", DP, marks=pytest.mark.slow),
        pytest.param("gpt2", "fsdp", DP, marks=pytest.mark.slow),
        pytest.param("llama", "single", {"dp": 1}, marks=pytest.mark.slow),
        pytest.param("llama", "hsdp", {"dp_replicate": 2, "dp_shard": 2}, marks=pytest.mark.slow),
        pytest.param("llama", "fsdp+cp", {"dp": 2, "cp": 2}, marks=pytest.mark.slow),
        pytest.param("mixture", "fsdp+ep", {"dp": 2, "ep": 2}, marks=pytest.mark.slow),
        pytest.param("conv-batch-norm", "fsdp", DP, marks=pytest.mark.slow),
        pytest.param("t5", "fsdp", DP, marks=pytest.mark.slow),
    ],
)
def test_three_steps_with_offloaded_parameters_equal_the_unsharded_model(kind, plan, mesh):
    model, (args, kwargs) = make(kind, 4)
    if "cp" in mesh:
        args, kwargs = shorter((args, kwargs), 8)
    options = dict(mesh=mesh, example_kwargs=kwargs, steps=3, fp64=True, tolerance=1e-5 if kind in ROUNDED else 1e-6)
    report = shardgraph.verify(model, args, plan, offload="parameters", **options)
    assert report.ok, report


@pytest.mark.quick("*single*")
@pytest.mark.parametrize(
    "options",
    [
        {"precision": "bf16"},
        {"recompute": "full"},
        {"plan": "single", "mesh": {"dp": 1}, "precision": "bf16", "recompute": "full"},
        {"plan": "pp+fsdp", "mesh": {"pp": 2, "dp": 2}},
        {"plan": "pp+zero2", "mesh": {"pp": 2, "dp": 2}},
    ],
    ids=str,
)
def test_offloading_goes_with_precision_recomputation_and_pipelines(options):
    options = {"plan": "fsdp", "mesh": DP, "fp64": "precision" not in options} | options
    report = shardgraph.verify(Deep(4), (torch.randn(8, 4, 32),), steps=3, offload="parameters", **options)
    assert report.ok, report


def test_what_is_annotated_is_offloaded_and_the_rest_is_not():
    model = Deep(3)
    shardgraph.annotate(model, {"layers.1.**": offload(), "layers.1.1.weight": keep_gathered()})
    report = shardgraph.verify(model, (torch.randn(4, 4, 32),), "fsdp", mesh=DP, steps=3, fp64=True)
    assert report.ok, report
    program = built("fsdp", None, model)
    on = {role.fqn for role, node in placeholders(program.forward).items() if node in on_host(program.forward)}
    assert on == {name for name, _ in model.named_parameters() if name.startswith("layers.1.")}


def test_two_ranks_train_with_offloaded_parameters_as_the_unsharded_model():
    for found in on_ranks(ranks.offloaded, 2, timeout=250):
        assert found["parity"] < 1e-9
        assert found["places"] == {"parameters": True, "gradients": True, "states": True}
        assert found["accumulated"] < 1e-9
        assert found["reloaded"] == 0.0
        assert found["pipeline"] < 1e-9


# -- what is in the graph --------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["single", "ddp", "fsdp"])
def test_parameters_are_copied_in_forward_and_again_in_backward(plan):
    program = built(plan)
    used_twice = 3 * 3  # of a layer both weights, and that of the norm, with its bias at least once
    assert len(copies(program.forward)) == 3 * 6
    assert len(copies(program.backward)) >= used_twice
    given = {role for role, node in placeholders(program.forward).items() if node in on_host(program.forward)}
    assert given == {role for role in placeholders(program.forward) if isinstance(role, Parameter)}


@pytest.mark.parametrize("plan", ["zero1", "zero2"])
def test_what_is_kept_gathered_is_copied_once_in_a_step(plan):
    program = built(plan)
    assert len(copies(program.forward)) == 3 * 6 and copies(program.backward) == []


def test_keep_gathered_keeps_the_copy_of_one_process():
    model = Deep(3)
    shardgraph.annotate(model, {"**": keep_gathered()})
    program = built("single", "parameters", model)
    assert len(copies(program.forward)) == 3 * 6 and copies(program.backward) == []


def test_gradients_of_offloaded_parameters_arrive_on_the_host():
    for plan in ("single", "fsdp"):
        backward = built(plan).backward
        given = [
            value for role, value in outputs(backward) if isinstance(role, Gradient) and isinstance(value, fx.Node)
        ]
        assert len(given) == 3 * 6 and set(given) <= on_host(backward)


def test_shards_are_copied_before_they_are_gathered():
    for gather in (node for node in built("fsdp").forward.graph.nodes if node.target is ALL_GATHER):
        assert is_wait(gather.args[0]) and gather.args[0].args[0].target is TO_DEVICE


def test_stored_parameters_are_copied_and_then_cast():
    program = build_program(
        Deep(3), replace(planned("fsdp"), precision=shardgraph.Precision.of("bf16")), (torch.zeros(2, 4, 32),)
    )
    assert {node.meta["val"].dtype for node in copies(program.forward)} == {torch.float32}
    assert {n.args[0].target for n in program.forward.graph.nodes if n.target is ALL_GATHER} == {aten._to_copy.default}


def test_no_sync_leaves_gradients_on_the_device():
    local = built("fsdp").graph("local")
    assert copies(local, TO_HOST) == [] and not on_host(local) & {n for _, n in outputs(local) if n is not None}


# -- overlap ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("plan", ["single", "fsdp"])
def test_copies_are_under_way_while_the_device_computes(plan):
    """Between the start of a copy and its wait stand operations, but for the first of a graph."""
    model = Deep(3)  # of which a bucket would hold all gradients until the last is there
    program = build_program(model, replace(planned(plan, model=model), bucket=0), (torch.zeros(2, 4, 32),))
    for half, target in ((program.forward, TO_DEVICE), (program.backward, TO_DEVICE), (program.backward, TO_HOST)):
        nodes = list(half.graph.nodes)
        behind = 0
        for start in copies(half, target):
            wait = next(user for user in start.users if is_wait(user))
            between = nodes[nodes.index(start) + 1 : nodes.index(wait)]
            behind += any("aten" in str(node.target) for node in between)
        assert behind >= len(copies(half, target)) / 2


def under_way(gm: fx.GraphModule, target) -> int:
    """The most bytes of copies that are started and not yet awaited."""
    now = most = 0
    for node in gm.graph.nodes:
        if node.target is target:
            now += node.meta["val"].nbytes
            most = max(most, now)
        elif is_wait(node) and node.args[0].target is target:
            now -= node.args[0].meta["val"].nbytes
    return most


@pytest.mark.parametrize("plan", ["single", "fsdp"])
def test_no_more_is_under_way_than_the_largest_copy(plan):
    chosen = planned(plan)
    program = built(replace(chosen, bucket=0), None, mesh=dict(chosen.mesh))  # Deep is as large as a bucket
    for half, target in ((program.forward, TO_DEVICE), (program.backward, TO_DEVICE), (program.backward, TO_HOST)):
        assert under_way(half, target) == max(node.meta["val"].nbytes for node in copies(half, target))


def test_without_prefetch_each_copy_is_awaited_at_once():
    program = build_program(Deep(3), replace(planned(), prefetch=0), (torch.zeros(2, 4, 32),))
    assert all(start.next in start.users for start in copies(program.forward))


# -- memory ----------------------------------------------------------------------------------------


def trained(
    given: str | Offload | None, memory: int | None = None, fused: bool | None = None
) -> tuple[list[float], PeakMemory, Program]:
    """Losses of a model from ``meta``, what its whole life took, and its program.

    In host memory the optimizer's kernels are the fused ones, which round as others do on some CPUs and not on all.
    """
    torch.manual_seed(0)
    with torch.device("meta"):
        model = Wide()
    x = torch.randn(8, 128)
    with PeakMemory().track([x]) as meter:
        sharded = shardgraph.compile(model, "single", offload=given, memory=memory, example_inputs=(x,))
        optimizer = torch.optim.AdamW(sharded.parameters(), lr=1e-3, fused=fused)
        losses = []
        for _ in range(3):
            loss = sharded(x)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
    return losses, meter, sharded.program


@pytest.mark.slow
def test_training_state_of_four_times_the_memory_of_the_device_trains_within_it():
    state = 16 * sum(parameter.numel() for parameter in Wide().parameters())
    budget = state // 4
    with pytest.raises(PlanError, match="no recomputation brings plan 'single'"):
        trained(None, memory=budget)
    losses, meter, program = trained("parameters", memory=budget)
    assert losses == trained(None, fused=True)[0]
    assert meter.peak_bytes <= budget
    predicted = program_memory(program, "adamw")
    assert predicted.peak_bytes == pytest.approx(meter.peak_bytes, rel=0.02)
    host = max(map(sum, zip(*predicted.host.values(), strict=True)))
    assert host == pytest.approx(meter.host_peak_bytes, rel=0.02) and host >= state


@pytest.mark.slow
def test_layers_are_on_the_device_one_after_the_other():
    def peak(layers: int) -> int:
        return program_memory(build_program(Wide(layers), planned(), (torch.zeros(1, 128),)), "adamw").peak_bytes

    layer = 4 * sum(parameter.numel() for parameter in Wide(1).parameters())
    assert peak(24) - peak(8) < 0.5 * layer  # what is saved for backward grows, what is copied does not
    assert peak(24) < 3 * layer


def test_a_model_on_meta_is_made_on_the_host():
    with torch.device("meta"):
        model = Wide()
    with PeakMemory() as meter:
        sharded = shardgraph.compile(model, "single", offload="parameters")
    assert meter.peak_bytes == 0
    assert meter.host_peak_bytes >= sum(parameter.nbytes for parameter in sharded.parameters())
    assert all(is_on_host(parameter) for parameter in sharded.parameters())


def test_the_analysis_says_what_is_where_and_what_copies_take():
    x = torch.zeros(8, 128)
    whole, less = (shardgraph.analyze(Wide(), (x,), "single", mesh={"dp": 1}, cluster="H100", offload=given)
                   for given in (None, "parameters"))  # fmt: skip
    assert whole.host_memory == 0 and less.host_memory >= 16 * sum(p.numel() for p in Wide().parameters())
    assert less.peak_memory < whole.peak_memory / 4
    assert {"to host", "to device"} == {row.stream for row in less.rows if row.kind == "copy"}
    assert less.summary()["copies"]["to device"] > less.summary()["copies"]["to host"] > 0
    assert "host memory" in str(less) and "host memory" not in str(whole)
    assert [row.label for row in less.rows if row.kind == "optimizer"] == ["adamw update on the host"]
    assert less.time.optimizer > whole.time.optimizer


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["single", "fsdp"])
def test_layers_that_are_folded_are_analysed_as_all_of_them_are(plan):
    mesh = {"dp": 1} if plan == "single" else DP
    folded, every = (
        shardgraph.analyze(
            Wide(14), (torch.zeros(8, 128),), plan, mesh=mesh, cluster="H100", offload="parameters", fold=fold
        )
        for fold in (True, False)
    )
    assert folded.peak_memory == every.peak_memory and folded.host_memory == every.host_memory
    assert folded.time.total == pytest.approx(every.time.total)


@pytest.mark.slow
def test_expressions_know_what_is_on_the_device():
    rates = Host(Link(1e10, 0.0), Rate(1e10))
    cluster = replace(toy_cluster(), device=replace(toy_device(), host=rates))
    analysis = shardgraph.analyze(
        Deep(2), (torch.zeros(4, 6, 32),), "fsdp", mesh=DP, cluster=cluster, offload="parameters"
    )
    assert analysis.symbolic().at()["peak_memory"] == analysis.peak_memory
    more = shardgraph.analyze(Deep(2), (torch.zeros(8, 6, 32),), "fsdp", mesh=DP, cluster=cluster, offload="parameters")
    assert analysis.symbolic().at(batch=8)["peak_memory"] == more.peak_memory
    assert analysis.symbolic().at()["optimizer"] == pytest.approx(analysis.time.optimizer)


# -- asking for it ---------------------------------------------------------------------------------


def test_offloading_is_part_of_a_plan_and_of_its_text():
    plan = planned("fsdp", Offload(parameters=True, activations=True, disk="/scratch"))
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert "offload: {parameters: true, activations: true, disk: /scratch}" in plan.to_yaml()
    assert "offload" not in preset("fsdp", DP).to_yaml()
    own = replace(preset("fsdp", DP), parameters=(("*", ParameterPlan(("shard(0)",), offload=True)),))
    assert Plan.from_yaml(own.to_yaml()) == own and "in host memory" in str(own)
    assert own.resolve({"w": torch.Size([4])})["w"].offload


@pytest.mark.parametrize(("name", "expected"), [
    ("parameters", Offload(parameters=True)),
    ("activations", Offload(activations=True)),
    ("all", Offload(parameters=True, activations=True)),
])  # fmt: skip
def test_offloading_has_names(name, expected):
    assert Offload.of(name) == expected


def test_what_cannot_be_offloaded_is_named():
    with pytest.raises(PlanError, match=r"no offloading 'parameter'; there are .*; did you mean 'parameters'"):
        Offload.of("parameter")
    with pytest.raises(PlanError, match=r"offload.parameters is 1; it may be True or False"):
        Offload(parameters=1)
    with pytest.raises(PlanError, match=r"unknown field offload.parametres; did you mean 'parameters'"):
        Plan.from_yaml(preset("ddp", DP).to_yaml() + "offload: {parametres: true}\n")
    with pytest.raises(PlanError, match=r"'layer.0': offload.. matches none of the parameters or modules"):
        shardgraph.annotate(Deep(2), {"layer.0": offload()})
