"""Bytes of the model's state in training, in closed form: parameters, gradients and optimizer state.

S. Rajbhandari et al., "ZeRO: memory optimizations toward training trillion parameter models", arXiv:1910.02054,
section 3.1 and figure 1. Activations and gathered parameters are not included; see
:mod:`shardgraph.passes.analysis.liveness` for a program's whole memory.
"""

from __future__ import annotations

from collections.abc import Mapping

from shardgraph.errors import ShardGraphError, nearest

MIXED_ADAM = {"parameters": 2, "gradients": 2, "optimizer": 12}
"""Bytes per parameter: 16-bit parameters and gradients; a 32-bit copy and Adam's two moments."""

SHARDED: dict[str, frozenset[str]] = {
    "ddp": frozenset(),
    "zero1": frozenset({"optimizer"}),
    "zero2": frozenset({"optimizer", "gradients"}),
    "fsdp": frozenset({"optimizer", "gradients", "parameters"}),
}
"""What each plan shards over the ranks; ``fsdp`` is ZeRO-3."""


def model_state(parameters: int, ranks: int, plan: str, kept: Mapping[str, int] = MIXED_ADAM) -> dict[str, float]:
    """Bytes of each of ``ranks`` for a model with ``parameters`` elements, by kind.

    ``kept`` has the bytes per element of each kind, before sharding.

    Raises:
        ShardGraphError: the plan is none of ``SHARDED``, or a number is not positive.
    """
    if plan not in SHARDED:
        raise ShardGraphError(f"there is no plan {plan!r}; there are {', '.join(SHARDED)}{nearest(plan, SHARDED)}")
    if parameters <= 0 or ranks <= 0:
        raise ShardGraphError(f"{parameters} parameters on {ranks} ranks: both must be positive")
    return {kind: parameters * nbytes / (ranks if kind in SHARDED[plan] else 1) for kind, nbytes in kept.items()}
