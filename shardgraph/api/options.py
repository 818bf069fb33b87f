"""What the arguments that several functions of this package share may be, by name."""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh

from shardgraph import arguments
from shardgraph.arguments import BOOL, BYTES, CALLABLE, INPUTS, KEYWORDS, MESH, MODEL, PATH, SECONDS, TEXT, WHOLE
from shardgraph.cost_models.cluster import Cluster
from shardgraph.module.lengths import Lengths
from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import RECOMPUTE, Plan
from shardgraph.plans.precision import Precision
from shardgraph.runtime.loss_weight import LOSS_WEIGHTS
from shardgraph.runtime.sample_rows import RANDOM


def _plan_hint(value: Any) -> str:
    return "; inputs of one call are example_inputs=(x,)" if isinstance(value, (torch.Tensor, tuple, list)) else ""


PLAN = arguments.of_plan(arguments.instance("the name of a plan, such as 'fsdp', a Plan", Plan, hint=_plan_hint) | PATH)
RUN_MESH = MESH | arguments.instance("a DeviceMesh", DeviceMesh)

OPTIONS = {
    "model": MODEL,
    "example_inputs": INPUTS,
    "example_kwargs": KEYWORDS,
    "plan": PLAN,
    "mesh": MESH,
    "pipeline": arguments.of_plan(
        arguments.instance("a shardgraph.Pipeline, such as Pipeline(schedule='1f1b', microbatches=8)", Pipeline)
    ),
    "precision": arguments.of_plan(
        arguments.instance("'bf16', 'fp16', 'fp8' or a shardgraph.Precision", str, Precision)
    ),
    "loss_fn": arguments.Kind("a function loss_fn(output, target)", callable),
    "loss_weight": arguments.one_of(LOSS_WEIGHTS),
    "random": arguments.one_of(RANDOM),
    "backend": TEXT,
    "cluster": arguments.instance("a Cluster, the name of a device, such as 'H100'", Cluster) | PATH,
    "optimizer": TEXT,
    "recompute": arguments.of_plan(arguments.one_of(RECOMPUTE)),
    "memory": BYTES,
    "loss_chunk": BYTES,
    "offload": arguments.of_plan(
        arguments.instance("'parameters', 'activations', 'all' or a shardgraph.Offload", str, Offload)
    ),
    "gradient_statistics": BOOL,
    "lengths": arguments.instance("a shardgraph.Lengths", Lengths),
    "initialize": BOOL,
    "training": BOOL,
    "fold": BOOL,
    "scheduled": BOOL,
    "progress": BOOL,
    "timeout": SECONDS,
    "seconds": arguments.of_plan(SECONDS),
    "devices": arguments.of_plan(WHOLE),
    "global_batch": arguments.of_plan(WHOLE),
    "directory": PATH,
}

MAKES_OPTIMIZER = arguments.Kind("a function that makes an optimizer of parameters", CALLABLE.fits)
