"""Plans are data: they print, round-trip, resolve, and refuse what they cannot be."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from shardgraph import ParameterPlan, Plan, PlanError, preset
from shardgraph.plans.resolve import resolve_plan

SHAPES = {
    "a.weight": torch.Size([7, 5]),
    "a.bias": torch.Size([7]),
    "scale": torch.Size([]),
    "empty": torch.Size([0, 4]),
}


@pytest.mark.parametrize("name", ["single", "ddp", "zero1", "zero2", "fsdp"])
def test_a_preset_round_trips_through_yaml(name):
    plan = preset(name, {"dp": 4})
    assert Plan.from_yaml(plan.to_yaml()) == plan


def test_a_plan_round_trips_through_a_file(tmp_path):
    plan = replace(preset("hsdp", {"dp_replicate": 2, "dp_shard": 4}), note="naïve: yes, 'quoted'", prefetch=0)
    plan.save(tmp_path / "plan.yaml")
    assert Plan.load(tmp_path / "plan.yaml") == plan


def test_the_last_matching_pattern_wins():
    keep = ParameterPlan(("shard(0)",), reshard_after_forward=False)
    plan = replace(preset("fsdp", {"dp": 2}), parameters=(*preset("fsdp", {"dp": 2}).parameters, ("a.*", keep)))
    resolved = plan.resolve(SHAPES)
    assert not resolved["a.weight"].reshard_after_forward


def test_parameters_without_rows_are_replicated():
    resolved = preset("fsdp", {"dp": 2}).resolve(SHAPES)
    assert resolved["scale"].placements == resolved["empty"].placements == ("replicate",)
    assert resolved["a.bias"].placements == ("shard(0)",)


def test_a_pattern_that_matches_nothing_is_refused_with_the_nearest_name():
    plan = replace(
        preset("fsdp", {"dp": 2}),
        parameters=(*preset("fsdp", {"dp": 2}).parameters, ("a.wieght", ParameterPlan(("shard(0)",)))),
    )
    with pytest.raises(PlanError, match=r"'a\.wieght'.*did you mean 'a\.weight'"):
        plan.resolve(SHAPES)


def test_a_parameter_that_no_pattern_matches_is_refused():
    plan = replace(preset("fsdp", {"dp": 2}), parameters=(("a.*", ParameterPlan(("shard(0)",))),))
    with pytest.raises(PlanError, match="says nothing of 'scale', 'empty'"):
        plan.resolve(SHAPES)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (("prefetch: 4", "prefetch: -1"), "prefetch is -1; it may be a whole number from 0"),
        (("prefetch: 4", "prefetsh: 4"), "unknown field prefetsh; did you mean 'prefetch'"),
        (("schema: 1", "schema: 9"), "schema is 9; it may be 1"),
        (("dp: 2", "dp: zero"), "mesh.dp is 'zero'; it may be a whole number"),
        (("shard(0)", "shard(1)"), r"placements is 'shard\(1\)'; it may be 'replicate' or 'shard\(0\)'"),
        (("reduce_scatter", "average"), "gradient is 'average'; it may be 'all_reduce' or 'reduce_scatter'"),
        (("name: fsdp\n", ""), "the field name is missing"),
        (
            ("reshard_after_forward: true", "reshard_after_forward: 3"),
            "reshard_after_forward is 3; it may be true or false",
        ),
    ],
)
def test_an_invalid_file_is_refused_naming_the_field(edit, message):
    text = preset("fsdp", {"dp": 2}).to_yaml()
    assert edit[0] in text
    with pytest.raises(PlanError, match=message):
        Plan.from_yaml(text.replace(*edit))


def test_a_gradient_that_a_file_does_not_say_follows_from_the_placement(tmp_path):
    (path := tmp_path / "plan.yaml").write_text(
        "schema: 1\nname: mine\nmesh: {dp: 2}\n"
        "parameters: {'*': {placements: [replicate]}, head.*: {placements: [shard(0)]}}\n"
    )
    rules = dict(Plan.load(path).parameters)
    assert rules["*"].gradient == "all_reduce" and rules["head.*"].gradient == "reduce_scatter"


def test_a_missing_plan_file_is_refused(tmp_path):
    with pytest.raises(PlanError, match="cannot read the plan file"):
        Plan.load(tmp_path / "none.yaml")


def test_an_unknown_preset_is_refused_with_the_nearest_name():
    with pytest.raises(PlanError, match="did you mean 'fsdp'"):
        resolve_plan("fspd", (("dp", 2),))


def test_hsdp_asks_for_two_axes():
    with pytest.raises(PlanError, match="dp_replicate"):
        preset("hsdp", {"dp": 4})


def test_a_plan_for_another_mesh_is_refused():
    with pytest.raises(PlanError, match=r"4 ranks.*2 ranks"):
        resolve_plan(preset("fsdp", {"dp": 4}), (("dp", 2),))


def test_auto_says_what_it_chose_and_why():
    assert "nothing to shard" in str(resolve_plan("auto", ()))
    unseen = str(resolve_plan("auto", (("dp", 2),)))
    assert "least memory per rank on 2 ranks; without example inputs nothing was priced" in unseen
    assert "no other plan, recomputation or mesh compared" in unseen


def test_the_plan_in_the_documentation_is_a_plan():
    text = (Path(__file__).parent.parent / "docs" / "plans.md").read_text()
    block = text[text.index("    schema: 1") :].partition("\n\n")[0]
    plan = Plan.from_yaml("\n".join(line.removeprefix("    ") for line in block.splitlines()))
    assert plan.world_size == 2 and not dict(plan.parameters)["lm_head.weight"].reshard_after_forward
