"""shardgraph: a compiler for distributed training with PyTorch.

    sharded = shardgraph.compile(model, plan="fsdp")

captures an unmodified module as one graph, shards it, inserts the collectives that the plan requires, and returns a
module that trains like the original on every rank of the run. Read next: :func:`compile`, :class:`Plan`,
:func:`verify`, :func:`launch`.
"""

from shardgraph import nn
from shardgraph.api.analyze import analyze
from shardgraph.api.annotate import annotate
from shardgraph.api.compile import compile
from shardgraph.api.prove import prove
from shardgraph.api.verify import verify
from shardgraph.api.visualize import visualize
from shardgraph.calibration import calibrate
from shardgraph.cost_models.cluster import Cluster
from shardgraph.cost_models.device import Device, Link, Rate
from shardgraph.errors import (
    BackwardError,
    CaptureError,
    CheckpointError,
    ClusterError,
    CollectiveError,
    DeadlockError,
    GraphInvariantError,
    InitializationError,
    LaunchError,
    OffloadError,
    PassOrderError,
    PlanError,
    RandomStateError,
    RankMismatchError,
    ShardGraphError,
)
from shardgraph.module.grad_scaler import GradScaler
from shardgraph.module.gradient_norm import clip_grad_norm_
from shardgraph.module.layerwise_grad_scaler import LayerwiseGradScaler
from shardgraph.module.sharded import ShardedModule
from shardgraph.offline import consolidate, split
from shardgraph.optim.adascale import AdaScale
from shardgraph.optim.averaged_weights import AveragedWeights
from shardgraph.optim.gossip import StochasticGradientPush
from shardgraph.optim.local_sgd import LocalSGD, SlowMo
from shardgraph.optim.sharded import ShardedOptimizer
from shardgraph.plans.annotations.constrain import constrain
from shardgraph.plans.annotations.kinds import (
    input,
    keep_gathered,
    offload,
    output,
    precision,
    recompute,
    replicate,
    reshard,
    save,
    shard,
    stage,
)
from shardgraph.plans.offload_plan import Offload
from shardgraph.plans.pipeline_plan import Pipeline
from shardgraph.plans.plan import ParameterPlan, Plan
from shardgraph.plans.precision import Precision
from shardgraph.plans.presets import preset
from shardgraph.proof.prove import Proof
from shardgraph.report.analysis import Analysis
from shardgraph.runtime.launch import launch
from shardgraph.tracking import MemoryTrace, MemoryTracker

__version__ = "0.1.0"

__all__ = [
    "AdaScale",
    "Analysis",
    "AveragedWeights",
    "BackwardError",
    "CaptureError",
    "CheckpointError",
    "Cluster",
    "ClusterError",
    "CollectiveError",
    "DeadlockError",
    "Device",
    "GradScaler",
    "GraphInvariantError",
    "InitializationError",
    "LaunchError",
    "LayerwiseGradScaler",
    "Link",
    "LocalSGD",
    "MemoryTrace",
    "MemoryTracker",
    "Offload",
    "OffloadError",
    "ParameterPlan",
    "PassOrderError",
    "Pipeline",
    "Plan",
    "PlanError",
    "Precision",
    "Proof",
    "RandomStateError",
    "RankMismatchError",
    "Rate",
    "ShardGraphError",
    "ShardedModule",
    "ShardedOptimizer",
    "SlowMo",
    "StochasticGradientPush",
    "analyze",
    "annotate",
    "calibrate",
    "clip_grad_norm_",
    "compile",
    "consolidate",
    "constrain",
    "input",
    "keep_gathered",
    "launch",
    "nn",
    "offload",
    "output",
    "precision",
    "preset",
    "prove",
    "recompute",
    "replicate",
    "reshard",
    "save",
    "shard",
    "split",
    "stage",
    "verify",
    "visualize",
]
