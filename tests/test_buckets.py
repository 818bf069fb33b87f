"""Small collectives in buckets: which are merged, and that nothing else changes."""

from __future__ import annotations

import math
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import shardgraph
from shardgraph import ir, preset
from shardgraph.ir import buckets
from shardgraph.ir.attributes import REDUCES
from shardgraph.passes.lowering import build_program
from shardgraph.passes.schedule.members import bucket_of
from shardgraph.plans.plan import Plan
from shardgraph.plans.presets import BUCKET
from shardgraph.proof.prove import prove
from tests import bucketed, ranks
from tests.machines import toy_cluster
from tests.standing import on_ranks
from tests.test_analysis import llama, text
from tests.two_heads import TwoHeads

MESHES = {"hsdp": {"replica": 2, "shard": 2}}
X = torch.randn(4, 16)


class Net(nn.Sequential):
    """Residual-free blocks of small parameters, one of which does not divide by two."""

    def __init__(self, blocks: int = 4) -> None:
        super().__init__(
            *(nn.Sequential(nn.Linear(16, 16), nn.LayerNorm(16), nn.Tanh()) for _ in range(blocks)), nn.Linear(16, 7)
        )


def planned(name: str, bucket: int = bucketed.BUCKET, **fields) -> Plan:
    return replace(preset(name, MESHES.get(name, {"dp": 2})), bucket=bucket, **fields)


def build(plan: Plan, model: nn.Module | None = None):
    return build_program(model or Net(), plan, (X,))


def issued(gm) -> Counter[str]:
    return Counter(node.target.__name__.split(".")[0] for node in ir.collectives(gm))


@pytest.mark.quick("fsdp-forward3-backward3", "hsdp-forward4-backward4", "zero1-forward1-backward1")
@pytest.mark.parametrize(
    ("plan", "forward", "backward"),
    [
        ("ddp", {}, {"all_reduce": 1}),
        ("zero1", {"all_gather_into_tensor": 1}, {"all_reduce": 1}),
        ("zero2", {"all_gather_into_tensor": 1}, {"reduce_scatter_tensor": 1}),
        ("fsdp", {"all_gather_into_tensor": 1}, {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1}),
        (
            "hsdp",
            {"all_gather_into_tensor": 1},
            {"all_gather_into_tensor": 1, "reduce_scatter_tensor": 1, "all_reduce": 1},
        ),
    ],
)
def test_a_model_of_small_parameters_has_one_collective_of_each_kind(plan, forward, backward):
    program = build(planned(plan))
    assert issued(program.forward) == forward
    assert issued(program.backward) == backward


def test_a_bucket_of_zero_bytes_leaves_each_parameter_its_own():
    parameters = len(list(Net().parameters()))
    assert issued(build(planned("fsdp", 0)).forward) == {"all_gather_into_tensor": parameters}


def test_no_bucket_is_larger_than_the_plan_allows():
    program = build(planned("fsdp", 8 * 1024), Net(12))
    packed = [node for gm in program.graphs.values() for node in gm.graph.nodes if node.target is buckets.pack]
    whole = [node.meta["val"].nbytes * (2 if node.args[1] == 1 else 1) for node in packed]  # shards are halves
    assert len(packed) > 3 and max(whole) <= 8 * 1024


def test_gradients_are_reduced_in_the_buckets_in_which_parameters_are_gathered():
    program = build(planned("fsdp", 8 * 1024), Net(12))
    gathered = [len(node.args[0]) for node in program.forward.graph.nodes if node.target is buckets.pack]
    reduced = [len(node.args[1]) for node in program.backward.graph.nodes if node.target is buckets.unpack]
    assert len(gathered) > 1 and gathered == reduced[::-1]


def reductions_of_layers(model: nn.Module) -> list[tuple[Any, str]]:
    """Those of gradients in layers, with the names of the parameters, where matrices are divided as in Megatron-LM."""
    plan = preset("fsdp+tp+sp", {"dp": 2, "tp": 4})
    [(_, every)] = plan.parameters
    rows = ("*.[qkv]_proj.*", "*.gate_proj.*", "*.up_proj.*", "*embed_tokens.*")
    along = dict.fromkeys(rows, "split(0)") | {"*.o_proj.*": "split(1)", "*.down_proj.*": "split(1)"}
    rules = [(name, replace(every, placements=("shard(0)", cut))) for name, cut in along.items()]
    plan = replace(plan, bucket=1 << 26, parameters=(("*", every), *rules))
    backward = build_program(model, plan, (), kwargs=text(2, 512)).backward
    reduced = [node for node in ir.collectives(backward) if ".layers." in REDUCES.get(node, "")]
    return [(node.target, REDUCES.of(node)) for node in reduced]


@pytest.mark.slow
def test_gradients_that_are_summed_over_operator_axes_too_are_reduced_apart_from_the_others():
    """Those of norms, where sequences are divided. So they share both reductions, and the others their one."""
    found = reductions_of_layers(llama(2, hidden_size=256, num_key_value_heads=4, vocab_size=64))
    norms = [target for target, fqns in found if "layernorm" in fqns]
    assert norms == [ir.REDUCE_SCATTER, ir.ALL_REDUCE]
    assert [target for target, fqns in found if "layernorm" not in fqns] == [ir.REDUCE_SCATTER]


@pytest.mark.slow
def test_one_gradient_that_is_summed_over_more_axes_is_reduced_with_the_others_of_its_bucket():
    model = llama(1, hidden_size=256, num_key_value_heads=4, vocab_size=2**15)
    model.model.layers[0].input_layernorm = model.model.norm = nn.Identity()
    (first, together), (second, alone) = reductions_of_layers(model)
    assert first == ir.REDUCE_SCATTER and "q_proj" in together and "layernorm" in together
    assert second == ir.ALL_REDUCE and alone == "model.layers.0.post_attention_layernorm.weight"


def test_a_plan_has_the_same_buckets_for_every_call():
    trained = build(planned("fsdp", 8 * 1024), Net(12))
    with torch.no_grad():
        evaluated = build_program(Net(12).eval(), planned("fsdp", 8 * 1024), (X[:2],))
    assert bucket_of(trained.context) == bucket_of(evaluated.context)


def test_buckets_do_not_cross_the_boundary_of_a_layer_that_is_larger_than_a_bucket():
    layer = sum(parameter.nbytes for parameter in Net(1)[0].parameters())
    crossing = bucket_of(build(planned("fsdp", 8 * layer)).context)
    assert len({*crossing.values()}) == 1
    within = bucket_of(build(planned("fsdp", layer - 1)).context)
    pairs = {(name.split(".")[0], bucket) for name, bucket in within.items()}
    assert len(pairs) == len({layer for layer, _ in pairs}) == len({bucket for _, bucket in pairs}) == 5


@pytest.mark.parametrize("name", ["ddp", "fsdp", "fsdp+tp", "pp+zero2", "fsdp+ep", "local-sgd"])
def test_named_plans_have_buckets(name):
    axes = {"fsdp+tp": {"dp": 2, "tp": 2}, "pp+zero2": {"pp": 2, "dp": 2}, "fsdp+ep": {"dp": 2, "ep": 2}}
    assert preset(name, axes.get(name, {"dp": 2})).bucket == BUCKET > 0


def test_a_tensor_of_more_than_an_eighth_of_a_bucket_has_a_collective_of_its_own():
    weights = 16 * 16 * 4
    program = build(planned("fsdp", 8 * weights - 1))
    starts = {start.args[0].meta["val"].shape for start in ir.collectives(program.forward)}
    assert torch.Size([8, 16]) in starts  # half of a weight's rows
    assert issued(program.forward) == {"all_gather_into_tensor": 4 + 1}


def test_tensors_of_different_dtypes_are_not_merged():
    model = Net()
    model[4].to(torch.float64)
    model[3].append(Cast())
    program = build(planned("ddp"), model)
    assert issued(program.backward) == {"all_reduce": 2}


class Cast(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.double()


@pytest.mark.quick("0-4")
@pytest.mark.parametrize(("bucket", "issued_together"), [(0, 4), (40, 2), (1 << 20, 1)])
def test_averages_of_running_statistics_are_merged(bucket, issued_together):
    norms = nn.BatchNorm1d(4), nn.BatchNorm1d(4)  # each with a mean and a variance of 16 bytes
    model = nn.Sequential(nn.Linear(16, 4), norms[0], nn.ReLU(), nn.Linear(4, 4), norms[1])
    program = build(replace(preset("zero2", {"dp": 2}), bucket=bucket), model)
    assert issued(program.forward)["all_reduce"] == issued_together
    assert shardgraph.prove(program).ok
    assert shardgraph.verify(model, (X,), program.plan, steps=3).ok


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_what_is_packed_is_unpacked_equal(parts):
    tensors = [torch.randn(6, 5), torch.randn(6), torch.randn(12, 1, 2)]
    flat = buckets.pack(tensors, parts)
    assert flat.shape == (sum(t.numel() for t in tensors),) and flat.is_contiguous()
    shapes = [tuple(t.shape) for t in tensors]
    unpacked = buckets.unpack(flat, shapes) if parts == 1 else buckets.unpack_parts(flat, shapes, parts)
    for mine, theirs in zip(unpacked, tensors, strict=True):
        assert torch.equal(mine, theirs) and mine.is_contiguous()


def test_a_rank_of_a_reduce_scatter_gets_its_part_of_every_tensor():
    tensors = [torch.arange(4.0), torch.arange(10.0, 16).view(2, 3)]
    first, second = buckets.pack(tensors, 2).chunk(2)
    assert first.tolist() == [0, 1, 10, 11, 12] and second.tolist() == [2, 3, 13, 14, 15]


def test_parts_unpacked_of_a_gather_do_not_keep_the_buffer_alive():
    flat = torch.randn(8)
    one, other = buckets.unpack_parts(flat, [(2,), (6,)], 2)
    assert {one.untyped_storage().data_ptr(), other.untyped_storage().data_ptr()}.isdisjoint(
        {flat.untyped_storage().data_ptr()}
    )


@pytest.mark.quick("fsdp", "hsdp")
@pytest.mark.parametrize("plan", ["ddp", "zero1", "zero2", "fsdp", "hsdp"])
def test_a_program_with_buckets_is_proved_and_equal(plan):
    report = shardgraph.verify(Net(), (torch.randn(8, 16),), planned(plan), fp64=True)
    assert report.ok, report
    assert report.proof.ok, report.proof


def test_a_bucket_that_is_unpacked_otherwise_is_not_proved():
    program = build(planned("fsdp"))
    assert prove(program).ok
    (unpacked,) = program.backward.graph.find_nodes(op="call_function", target=buckets.unpack)
    shapes = list(unpacked.args[1])
    assert len(shapes) > 2
    unpacked.args = (unpacked.args[0], shapes[::-1])
    assert not prove(program).ok


@pytest.mark.parametrize("options", [{"offload": "parameters"}, {"precision": "bf16"}, {"gradient_statistics": True}])
def test_buckets_go_with_offload_precision_and_statistics(options):
    fields = {
        "offload": {"offload": shardgraph.Offload(parameters=True)},
        "precision": {"precision": shardgraph.Precision.of("bf16")},
        "gradient_statistics": {"gradient_statistics": True},
    }[next(iter(options))]
    program = build(planned("fsdp", **fields))
    assert issued(program.backward)["reduce_scatter_tensor"] == 1
    assert prove(program).ok


def test_gathers_of_offloaded_parameters_are_not_merged_since_each_waits_for_its_copy():
    program = build(planned("fsdp", offload=shardgraph.Offload(parameters=True)))
    assert issued(program.forward) == {"all_gather_into_tensor": len(list(Net().parameters()))}


def test_stages_of_a_pipeline_reduce_their_gradients_in_buckets():
    pipeline = shardgraph.Pipeline(2, "gpipe")
    plan = replace(preset("pp+fsdp", {"pp": 2, "dp": 2}, pipeline), bucket=bucketed.BUCKET)
    report = shardgraph.verify(Net(), (torch.randn(8, 16),), plan, loss_fn=lambda output: output.square().mean())
    assert report.ok, report
    assert report.proof.ok, report.proof


@pytest.mark.quick("odd-mlp-fsdp")
@pytest.mark.timeout(280)
@pytest.mark.parametrize(
    ("name", "plan"), [("odd-mlp", "fsdp"), ("tied-transformer", "zero1"), ("conv-batch-norm", "ddp")]
)
def test_five_steps_equal_the_unsharded_model_on_two_ranks(name, plan):
    for worst in on_ranks(bucketed.parity, 2, args=(name, plan, {"dp": 2})):
        assert worst < 1e-9


@pytest.mark.quick("zero1")
@pytest.mark.timeout(280)
@pytest.mark.parametrize("plan", ["fsdp", "ddp", "zero1"])
def test_no_sync_and_losses_that_reach_some_parameters_reduce_as_without_buckets(plan):
    for differences in on_ranks(bucketed.accumulation, args=(plan,)):
        assert max(differences.values()) < 1e-6, differences
    for gradients in on_ranks(bucketed.ranks_use_other_heads, args=(plan,)):
        assert gradients["neither"] == {"shared"}
        assert gradients["each its own"] == {"shared", "first", "second"}
        assert gradients["worst"] < 1e-6


@pytest.mark.slow
@pytest.mark.timeout(280)
def test_the_memory_of_a_step_with_buckets_is_predicted():
    plans = ["fsdp merged", "zero2 merged", "ddp merged"]
    for found in on_ranks(ranks.peak_memory, 2, args=(["odd-mlp", "tied-transformer"], plans)):
        for name, phases in found.items():
            for phase, (predicted, measured) in phases.items():
                assert math.isclose(predicted, measured, rel_tol=0.01), (name, phase, predicted, measured)


@pytest.mark.slow
def test_buckets_are_priced_with_one_latency_each():
    seconds = {
        bucket: shardgraph.analyze(Net(24), (X,), planned("fsdp", bucket), cluster="A100").time.communication
        for bucket in (0, bucketed.BUCKET)
    }
    assert seconds[bucketed.BUCKET] < 0.1 * seconds[0]


def test_a_plan_with_buckets_is_written_and_read():
    plan = planned("fsdp", 4096)
    assert Plan.from_yaml(plan.to_yaml()) == plan
    assert "bucket: 4096" in plan.to_yaml()


@pytest.mark.parametrize("bucket", [-1, 1.5, True, "8MiB"])
def test_a_bucket_is_a_number_of_bytes(bucket):
    with pytest.raises(shardgraph.ShardGraphError, match=r"bucket is .*; it may be a whole number of bytes, or 0"):
        replace(preset("fsdp", {"dp": 2}), bucket=bucket)


@pytest.mark.slow
@pytest.mark.parametrize("plan", ["fsdp", "zero2", "zero1", "ddp"])
def test_sizes_of_a_program_with_buckets_are_known_as_symbols(plan):
    def analysis(rows: int, dp: int) -> shardgraph.Analysis:
        buckets = replace(preset(plan, {"dp": dp}), bucket=bucketed.BUCKET)
        return shardgraph.analyze(Net(), (X.new_zeros(rows, *X.shape[1:]),), buckets, cluster=toy_cluster(nodes=4))

    costs = analysis(4, 2).symbolic()
    for rows, dp in [(4, 2), (8, 4), (16, 8)]:
        concrete, found = analysis(rows, dp), costs.at(batch=rows, dp=dp)
        assert found["peak_memory"] == concrete.peak_memory
        assert found["sent"] == sum(row.sent for row in concrete.rows)


def test_which_gradients_depend_on_which_outputs_is_as_without_buckets():
    plain, merged = (build_program(TwoHeads(), planned("ddp", bucket), (X[:, :4],)) for bucket in (0, bucketed.BUCKET))
    assert issued(merged.backward) == {"all_reduce": 1}
    assert merged.reached == plain.reached and merged.optional == plain.optional != []


def test_parameters_whose_value_backward_needs_are_as_without_buckets():
    plain, merged = (build(planned("zero2", bucket)) for bucket in (0, bucketed.BUCKET))
    assert merged.needed == plain.needed != frozenset()
