"""Layers that are written to be sharded: plain PyTorch with static shapes, captured like any other module.

:class:`MoE` is a mixture-of-experts layer, :class:`TopKGate` its router.
"""

from __future__ import annotations

from shardgraph.nn.gating import TopKGate
from shardgraph.nn.moe import MoE

__all__ = ["MoE", "TopKGate"]
