"""Modules that cannot be captured as they are written, and are captured with another forward."""

from __future__ import annotations

import copy

import pytest
import torch
import transformers
from torch import nn
from transformers.models.ibert.quant_modules import QuantAct

import shardgraph
from shardgraph.module.programs import Programs
from tests import families


def longcat():
    return families.build("longcat_flash")


def jetmoe():
    return families.build("jetmoe")


def dbrx():
    ffn = {"ffn_hidden_size": 24, "moe_num_experts": 4, "moe_top_k": 2, "hidden_size": 16}
    config = transformers.DbrxConfig(
        d_model=16,
        n_heads=2,
        n_layers=2,
        max_seq_len=32,
        vocab_size=64,
        ffn_config=ffn,
        attn_config={"kv_n_heads": 2, "clip_qkv": 8.0},
    )
    config.attn_config.rope_theta = config.rope_theta = 10000.0
    config.rope_parameters = {"rope_type": "default", "rope_theta": 10000.0}
    torch.manual_seed(0)
    ids = torch.randint(0, 64, (4, 8))
    return transformers.DbrxForCausalLM(config).train(), {"input_ids": ids, "labels": ids}


def switch():
    """Without dropout, whose numbers are drawn in another order."""
    sparse = {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "num_experts": 4, "expert_capacity": 8}
    sizes = {"d_model": 16, "d_kv": 8, "d_ff": 32, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2}
    off = {"dropout_rate": 0.0, "router_jitter_noise": 0.0}
    config = transformers.SwitchTransformersConfig(vocab_size=64, decoder_start_token_id=0, **sparse, **sizes, **off)
    return transformers.SwitchTransformersForConditionalGeneration(config).train(), translated()


def nllb():
    """Likewise; layers are dropped at random, and set attributes only where they are not."""
    sparse = {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "num_experts": 4, "expert_capacity": 8}
    sizes = {"d_model": 16, "encoder_layers": 2, "decoder_layers": 2, "encoder_ffn_dim": 32, "decoder_ffn_dim": 32}
    heads = {"encoder_attention_heads": 2, "decoder_attention_heads": 2, "max_position_embeddings": 64}
    off = {"dropout": 0.0, "attention_dropout": 0.0, "activation_dropout": 0.0, "moe_token_dropout": 0.0}
    config = transformers.NllbMoeConfig(vocab_size=64, router_jitter_noise=0.0, **sparse, **sizes, **heads, **off)
    assert config.encoder_layerdrop
    return transformers.NllbMoeForConditionalGeneration(config).train(), translated()


def translated():
    torch.manual_seed(0)
    ids = torch.randint(3, 64, (4, 8))
    return {"input_ids": ids, "labels": ids, "attention_mask": torch.ones_like(ids)}


@pytest.mark.slow
@pytest.mark.parametrize("make", [longcat, jetmoe, dbrx, switch, nllb])
def test_experts_in_a_loop_are_captured_as_grouped_products_with_equal_gradients(make):
    model, call = make()
    report = shardgraph.verify(model, (), "fsdp", mesh={"dp": 2}, example_kwargs=call, steps=2)
    assert report.ok, str(report)


def xmod(ln_before_adapter):
    model, call = families.build("xmod")
    for module in model.modules():
        if hasattr(module, "adapter_modules"):
            module.ln_before_adapter = ln_before_adapter
    return model, call | {"lang_ids": torch.tensor([0, 2, 0, 0])}


@pytest.mark.slow
@pytest.mark.parametrize("ln_before_adapter", [True, False])
def test_adapters_of_the_languages_of_a_batch_are_captured_with_equal_gradients(ln_before_adapter):
    model, call = xmod(ln_before_adapter)
    report = shardgraph.verify(model, (), "fsdp", mesh={"dp": 2}, example_kwargs=call, steps=2)
    assert report.ok, str(report)


class Ranged(nn.Module):
    """A layer of I-BERT, which keeps the range of what it is given."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.layer, self.kept = nn.Linear(4, 4), QuantAct(8, act_range_momentum=momentum)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.kept(self.layer(x), identity=x)[0].square().mean()


@pytest.mark.parametrize("momentum", [0.95, -1])
def test_ranges_of_activations_begin_with_the_first_batch_and_follow_the_later_ones(momentum):
    report = shardgraph.verify(Ranged(momentum), (torch.randn(8, 4),), "fsdp", steps=3)
    assert report.ok, str(report)
    assert "buffer kept.x_max after step 2" in report.errors


def test_a_range_of_what_is_not_a_number_is_told_as_by_the_layer():
    sharded = shardgraph.compile(Ranged(0.95), "single", example_inputs=(torch.ones(2, 4),), progress=False)
    with pytest.raises(AssertionError, match="NaN detected"):
        sharded(torch.full((2, 4), torch.nan))


class Hit(nn.Module):
    """It computes for the rows that it finds."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found = (self.layer(x).sum(1) > 0).nonzero().flatten()
        return torch.zeros_like(x).index_add(0, found, self.layer(x[found]))


class Derived(Hit):
    """With the forward of its base."""


def masked(self: Hit, x: torch.Tensor) -> torch.Tensor:
    y = self.layer(x)
    return y * (y.sum(1, keepdim=True) > 0)


@pytest.fixture
def rewritten():
    shardgraph.rewrite(Hit, masked)
    yield
    shardgraph.rewrite(Hit, None)


@pytest.mark.parametrize("kind", [Hit, Derived])
def test_a_class_can_be_given_a_forward_that_is_captured(kind, rewritten, monkeypatch):
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(4, 4), kind()), torch.randn(8, 4)
    sharded = shardgraph.compile(copy.deepcopy(model), "single", progress=False)
    torch.testing.assert_close(sharded(x), model(x))
    monkeypatch.setattr(Programs, "_compile", None)
    torch.testing.assert_close(sharded(x + 1), model(x + 1))


def test_outside_of_programs_a_class_computes_as_it_is_written(rewritten):
    sharded = shardgraph.compile(nn.Sequential(Hit()), "single", example_inputs=(torch.ones(2, 4),), progress=False)
    assert Hit.forward is not masked
    sharded.original[0](torch.ones(2, 4))


def test_without_another_forward_the_line_is_named():
    with pytest.raises(shardgraph.CaptureError, match=r"nonzero.*test_rewrites\.py:\d+"):
        shardgraph.compile(nn.Sequential(Hit()), "single", example_inputs=(torch.ones(2, 4),), progress=False)


def test_a_rewrite_is_of_a_class_of_modules():
    with pytest.raises(TypeError, match="a class of modules"):
        shardgraph.rewrite(dict, masked)
