"""FairScale's FSDP: each option and method, against the unsharded model."""

from __future__ import annotations

import inspect
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from shardgraph import ShardGraphError
from shardgraph.fairscale import FSDP, FullyShardedDataParallel, checkpoint_wrapper
from tests import wrapped
from tests.standing import on_ranks

NAMES = [name for name, _ in wrapped.Net().named_parameters()]
INNER = [name for name in NAMES if not name.startswith("last")]


@pytest.mark.quick("reshard_after_forward")
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"reshard_after_forward": False},
        {"move_params_to_cpu": True, "move_grads_to_cpu": False},
        {
            "flatten_parameters": False,
            "bucket_cap_mb": 0,
            "clear_autocast_cache": True,
            "gradient_predivide_factor": 2.0,
        },
    ],
    ids=lambda options: "-".join(options) or "defaults",
)
def test_it_trains_like_the_model(options: dict[str, Any]):
    on_ranks(wrapped.trains_like_the_model, args=(options,))


def test_nested_ones_train_like_the_model_and_are_annotations_of_the_outer_one():
    for kinds, annotated in on_ranks(wrapped.nested_ones_train_like_the_model, args=({}, {})):
        assert kinds == ["Linear", "Sequential", "Tanh"]
        assert annotated == sorted(f"('{name}', reshard())" for name in INNER)


def test_parts_without_an_outer_one_train_like_the_model():
    assert on_ranks(wrapped.parts_without_an_outer_one_train_like_the_model) == [len(NAMES)] * 2


@pytest.mark.quick("inner ones kept")
@pytest.mark.parametrize(
    ("options", "inner", "again"),
    [
        ({}, None, 4),  # the weights of all layers but the first, whose input needs no gradient
        ({"reshard_after_forward": False}, None, 0),
        ({}, {}, 3),
        ({"disable_reshard_on_root": False}, {}, 4),
        ({"disable_reshard_on_root": False}, {"reshard_after_forward": False}, 1),
    ],
    ids=["alone", "alone, kept", "inner ones", "inner ones, root resharded", "inner ones kept"],
)
def test_parameters_that_are_resharded_are_gathered_again_in_backward(options, inner, again):
    assert on_ranks(wrapped.gathers_with, args=(options, inner))[0] == (len(NAMES), again)


def test_each_moves_its_own_parameters_to_host_memory():
    assert on_ranks(wrapped.offloaded_by, args=({"cpu_offload": True}, None))[0] == NAMES
    assert on_ranks(wrapped.offloaded_by, args=({"move_params_to_cpu": True}, {}))[0] == ["last.weight", "last.bias"]
    assert on_ranks(wrapped.offloaded_by, args=({}, {"move_params_to_cpu": True}))[0] == INNER


LOW, BF16, FULL, DOUBLE = torch.float16, torch.bfloat16, torch.float32, torch.float64


@pytest.mark.parametrize(
    ("options", "output", "buffer", "reduced"),
    [
        ({"mixed_precision": True}, LOW, LOW, LOW),
        ({"mixed_precision": True, "compute_dtype": BF16, "fp32_reduce_scatter": True}, BF16, BF16, FULL),
        ({"mixed_precision": True, "compute_dtype": BF16, "buffer_dtype": FULL}, BF16, FULL, BF16),
        ({"buffer_dtype": DOUBLE}, FULL, DOUBLE, FULL),
    ],
    ids=["fp16", "bf16, reduced in fp32", "bf16 with buffers in fp32", "buffers in fp64"],
)
def test_computation_reductions_and_buffers_have_their_dtypes(options, output, buffer, reduced):
    found = on_ranks(wrapped.in_mixed_precision, args=(options,))[0]
    assert found == {
        "equal": True, "output": output, "buffer": buffer, "gradient": FULL, "reduced": [str(reduced)]
    }  # fmt: skip


def test_an_inner_one_in_full_precision_computes_so():
    assert on_ranks(wrapped.inner_in_full_precision)[0] == (True, ["reshard()", "reshard()", 'precision("float32")'])


def test_inputs_are_cast_to_full_precision():
    assert on_ranks(wrapped.casts_inputs_to_full_precision) == [FULL, FULL]


def test_the_state_is_that_of_the_unsharded_model():
    count = len(NAMES)
    assert on_ranks(wrapped.states, args=({},)) == [(True, count, "cpu")] * 2
    assert on_ranks(wrapped.states, args=({"state_dict_on_rank_0_only": True},)) == [
        (True, count, "cpu"),
        (True, 0, ""),
    ]
    assert on_ranks(wrapped.states, args=({"state_dict_device": "meta"},)) == [(False, count, "meta")] * 2


def test_the_state_loads_into_another_also_as_part_of_a_model():
    on_ranks(wrapped.state_loads_into_another)


def test_shards_load_on_as_many_ranks_and_others_are_refused():
    (first, why), (second, _) = on_ranks(wrapped.local_state_loads_into_another)
    assert first + second == sum(parameter.numel() for parameter in wrapped.Net().parameters())
    assert "state_dict() loads on any number" in why


def test_summoned_parameters_are_whole_and_what_is_written_stays_unless_volatile():
    outside = ["last.weight", "last.bias"]
    found = {"same": True, "written": True, "volatile": True, "outside": outside, "restored": True}
    assert on_ranks(wrapped.summons) == [found] * 2


def test_the_optimizers_state_is_gathered_and_sharded_again():
    assert on_ranks(wrapped.state_of_the_optimizer) == [(False, NAMES), (True, NAMES)]


def test_gradients_accumulate_without_communication_and_are_clipped_by_the_norm_of_all():
    for ours, theirs in on_ranks(wrapped.accumulates_and_clips):
        assert ours == pytest.approx(theirs, rel=1e-9)


def test_an_overflow_on_one_rank_skips_the_step_on_all():
    assert on_ranks(wrapped.an_overflow_on_one_rank_skips_the_step_on_all) == [(4.0, True)] * 2


@pytest.mark.slow
def test_a_checkpointed_module_keeps_the_structure_of_its_output_and_its_gradients():
    found = on_ranks(wrapped.checkpointed, args=(None,))[0]
    assert found["type"] == "Answer" and found["keys"] == ["answer", "doubled", "head"] and not found["recomputed"]
    assert on_ranks(wrapped.checkpointed, args=(False,))[0] == {
        **found, "recomputed": 1, "annotations": ["recompute()"]
    }  # fmt: skip
    assert on_ranks(wrapped.checkpointed, args=(True,))[0] == {
        **found, "recomputed": 1, "annotations": ["recompute()", "offload()"]
    }  # fmt: skip


@pytest.mark.parametrize(
    ("options", "why"),
    [
        ({"process_group_reduce_scatter": object()}, "on one group"),
        ({"no_broadcast_optim_state": True}, "gathered from all ranks"),
        ({"allow_reset_parameters": True}, "before it is wrapped"),
        ({"compute_dtype": torch.bfloat16}, "give mixed_precision=True"),
        ({"fp32_reduce_scatter": True}, "give mixed_precision=True"),
        ({"move_grads_to_cpu": True}, "Move both"),
        ({"compute_device": "meta"}, "computes on cpu"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_cannot_be_is_refused_in_words(options: dict[str, Any], why: str):
    with pytest.raises(ShardGraphError, match=re.escape(why)):
        FSDP(nn.Linear(2, 2), **options)


def test_an_inner_one_cannot_reduce_in_a_dtype_of_its_own():
    inner = FSDP(nn.Linear(2, 2), mixed_precision=True, fp32_reduce_scatter=True)
    with pytest.raises(ShardGraphError, match="reduces all gradients in one dtype"):
        FSDP(nn.Sequential(inner), mixed_precision=True)


def test_a_verbose_one_prints_its_plan():
    assert "prefetch" in repr(FSDP(nn.Linear(2, 2), verbose=True)) and "prefetch" not in repr(FSDP(nn.Linear(2, 2)))


def test_attributes_of_the_module_are_there():
    model = nn.Linear(2, 2)
    wrapper = FSDP(model)
    assert wrapper.module is model and wrapper.out_features == 2 and list(dict(wrapper.named_parameters())) == [
        "weight", "bias"
    ]  # fmt: skip


def test_annotations_of_a_checkpointed_module_are_under_its_name_in_the_model():
    model = FSDP(nn.Sequential(nn.Linear(2, 2), checkpoint_wrapper(nn.Linear(2, 2))))
    assert [(pattern, str(each)) for pattern, each in model.plan.annotations] == [("1", "recompute()")]


def test_every_option_is_in_the_table():
    document = (Path(__file__).parent.parent / "docs" / "fairscale.md").read_text()
    options = list(inspect.signature(FullyShardedDataParallel).parameters)[1:]
    assert [option for option in options if f"`{option}`" not in document] == []


def test_the_tests_that_the_table_names_exist():
    folder = Path(__file__).parent
    named = set(re.findall(r"`(test_\w+\.py)::(test_\w+)`", (folder.parent / "docs" / "fairscale.md").read_text()))
    assert named and [each for each in sorted(named) if f"def {each[1]}(" not in (folder / each[0]).read_text()] == []


@pytest.mark.slow
def test_recomputed_layers_and_a_mixture_of_experts_train_like_the_model():
    assert on_ranks(wrapped.mixture_trains_like_the_model) == [True, True]
