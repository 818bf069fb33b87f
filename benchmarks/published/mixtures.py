"""Mixtures of experts whose published runs do not repeat their dimensions: those of each model's own configuration.

Sources: config.json of Qwen/Qwen3-30B-A3B, Qwen/Qwen3-235B-A22B, openai/gpt-oss-120b, deepseek-ai/DeepSeek-V3,
moonshotai/Kimi-K2-Instruct and meta-llama/Llama-4-Maverick-17B-128E on huggingface.co. What changes a step little is
left out: norms of queries and keys, sinks and windows of attention, the prediction of several tokens.
"""

from __future__ import annotations

from dataclasses import replace

from benchmarks.published.decoder import Latent, Mixture, Shape

_DEEPSEEK = Shape(
    layers=61,
    width=7168,
    heads=128,
    kv_heads=128,
    hidden=18432,
    vocabulary=129280,
    mlp="swiglu",
    classic=False,
    mixture=Mixture(256, 8, 2048, shared=2048, dense=3),
    latent=Latent(query=1536, key=512, plain=128, rotary=64, value=128),
)

MIXTURES = {
    "qwen3_30b_a3b": Shape(
        layers=48,
        width=2048,
        heads=32,
        kv_heads=4,
        hidden=6144,
        vocabulary=151936,
        mlp="swiglu",
        classic=False,
        head=128,
        mixture=Mixture(128, 8, 768),
    ),
    "qwen3_235b_a22b": Shape(
        layers=94,
        width=4096,
        heads=64,
        kv_heads=4,
        hidden=12288,
        vocabulary=151936,
        mlp="swiglu",
        classic=False,
        head=128,
        mixture=Mixture(128, 8, 1536),
    ),
    "gpt oss 120b": Shape(
        layers=36,
        width=2880,
        heads=64,
        kv_heads=8,
        hidden=2880,
        vocabulary=201088,
        mlp="swiglu",
        classic=False,
        head=64,
        mixture=Mixture(128, 4, 2880),
    ),
    "deepseekv3": _DEEPSEEK,
    "kimi_k2": replace(
        _DEEPSEEK, heads=64, kv_heads=64, vocabulary=163840, mixture=Mixture(384, 8, 2048, shared=2048, dense=1)
    ),
    "llama4-maverick-400b": Shape(
        layers=48,
        width=5120,
        heads=40,
        kv_heads=8,
        hidden=16384,
        vocabulary=202048,
        mlp="swiglu",
        classic=False,
        mixture=Mixture(128, 1, 8192, shared=8192, every=2),
    ),
}
"""Shapes by the name of a table's column ``model`` in lower case."""
