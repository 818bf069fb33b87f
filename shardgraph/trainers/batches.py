"""Which plans, options and precisions fit trainers whose data loaders give each rank a batch of its own."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from shardgraph.errors import ShardGraphError
from shardgraph.plans.plan import Plan
from shardgraph.plans.resolve import named_or_loaded, resolve_plan
from shardgraph.runtime.mesh import run_axes


def check_own_batches(plan: str | Path | Plan, mesh: Any, trainer: str) -> None:
    """Raise ShardGraphError for a plan under which ranks share a batch, or train copies of the model."""
    resolved = resolve_plan(plan, run_axes(mesh, named_or_loaded(plan)))
    if resolved.pipeline is None and not resolved.replicas and resolved.data_size == resolved.world_size:
        return
    raise ShardGraphError(
        f"plan {resolved.name!r} has ranks that share a batch or train copies of their own, and {trainer} gives every "
        "rank a batch of its own for one model: use 'ddp', 'zero1', 'zero2', 'fsdp', 'hsdp' or 'ep', or call "
        f"shardgraph.compile, and train_step, without {trainer}"
    )


def check_options(options: Mapping[str, Any], trainer: str) -> None:
    """Raise ShardGraphError for options of ``compile`` that a trainer's loop has no use for, or cannot follow."""
    for option in ("loss_fn", "loss_weight", "pipeline"):
        if option in options:
            raise ShardGraphError(
                f"the option {option!r} is for train_step of a compiled module, and a loop of {trainer} calls the "
                "model and backward: leave it out"
            )
    if "global_batch" in options:
        raise ShardGraphError(
            f"the option 'global_batch' finds plans whose ranks share a batch, or make several calls in a step, and "
            f"{trainer} gives every rank a batch of its own: leave it out, or call shardgraph.compile without {trainer}"
        )


def check_lightning_precision(precision: str, whose: str) -> None:
    """Raise ShardGraphError for a precision of Lightning, or Fabric, that casts or scales in a way of its own."""
    if precision not in ("32-true", "bf16-mixed", "64-true"):
        raise ShardGraphError(
            f"precision={precision!r} of {whose} cannot be under a plan: use 'bf16-mixed', or "
            "options={'precision': 'bf16'} of the strategy"
        )
