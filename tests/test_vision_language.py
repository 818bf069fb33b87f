"""Models of texts with images or sound, whose Python asks where images are and how large, train as they are."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import LlavaConfig, LlavaForConditionalGeneration

import shardgraph
from tests import vision_language
from tests.standing import on_ranks


@pytest.mark.quick("fsdp-internvl", "fsdp-llava")
@pytest.mark.parametrize("kind", vision_language.MODELS)
@pytest.mark.parametrize("plan", ["fsdp", "tp"])
def test_a_model_of_several_kinds_of_input_trains_like_the_unsharded_one(plan, kind):
    model, call = vision_language.build(kind)
    report = shardgraph.verify(model, (), plan, example_kwargs=call)
    assert report.ok, str(report)


@pytest.mark.slow
def test_other_images_than_those_of_the_first_call_are_another_program():
    model, call = vision_language.build("qwen2_vl")
    sharded = shardgraph.compile(copy.deepcopy(model), "single", progress=False)
    for grids, seen in (([[1, 4, 4]] * 4, 4), ([[1, 2, 8], [1, 8, 2], [1, 4, 4], [1, 2, 8]], 4), ([[1, 4, 8]] * 4, 8)):
        ids = torch.randint(3, 90, (4, 16))
        ids[:, 2 : 2 + seen] = vision_language.IMAGE
        sizes = torch.tensor(grids)
        images = {"image_grid_thw": sizes, "pixel_values": torch.randn(int(sizes.prod(1).sum()), 3 * 2 * 8 * 8)}
        kinds = {"mm_token_type_ids": (ids == vision_language.IMAGE).long()}
        given = call | {"input_ids": ids, "labels": ids, **images, **kinds}
        torch.testing.assert_close(sharded(**given).loss, model(**given).loss)


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("plan", ["ddp", "fsdp"])
def test_ranks_may_have_images_of_other_sizes(plan):
    for errors in on_ranks(vision_language.trained_on_other_images, args=(plan,)):
        assert max(errors) < 1e-5


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_deep_model_of_two_stacks_is_planned_from_few_layers_of_each():
    config = copy.deepcopy(vision_language.MODELS["llava"][1])
    config["vision_config"]["num_hidden_layers"], config["text_config"]["num_hidden_layers"] = 16, 18
    _, call = vision_language.build("llava")
    model = LlavaForConditionalGeneration(LlavaConfig(image_token_index=vision_language.IMAGE, **config))
    few, whole = (
        shardgraph.analyze(model, example_kwargs=call, plan="ddp", mesh={"dp": 2}, cluster="H100", fold=fold)
        for fold in (True, False)
    )
    assert few.peak_memory == pytest.approx(whole.peak_memory, rel=1e-2)
    assert few.time.total == pytest.approx(whole.time.total, rel=1e-2)
