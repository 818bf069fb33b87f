"""The public names, with the modules that they are loaded from when they are first used."""

from . import nn as nn
from .api.analyze import analyze as analyze
from .api.annotate import annotate as annotate
from .api.compare import compare as compare
from .api.compile import compile as compile
from .api.emit import emit as emit
from .api.flight_record import flight_record as flight_record
from .api.front import front as front
from .api.lint import lint as lint
from .api.plan import plan as plan
from .api.prove import prove as prove
from .api.verify import verify as verify
from .api.visualize import visualize as visualize
from .api.what_if import what_if as what_if
from .calibration import calibrate as calibrate
from .capture.decisions import assume as assume
from .capture.rewrites import rewrite as rewrite
from .cost_models.cluster import Cluster as Cluster
from .cost_models.device import (
    Device as Device,
)
from .cost_models.device import (
    Link as Link,
)
from .cost_models.device import (
    Rate as Rate,
)
from .errors import (
    ArgumentError as ArgumentError,
)
from .errors import (
    BackwardError as BackwardError,
)
from .errors import (
    CaptureError as CaptureError,
)
from .errors import (
    CheckpointError as CheckpointError,
)
from .errors import (
    ClusterError as ClusterError,
)
from .errors import (
    CollectiveError as CollectiveError,
)
from .errors import (
    DeadlockError as DeadlockError,
)
from .errors import (
    GraphInvariantError as GraphInvariantError,
)
from .errors import (
    InitializationError as InitializationError,
)
from .errors import (
    LaunchError as LaunchError,
)
from .errors import (
    ModelCheckError as ModelCheckError,
)
from .errors import (
    OffloadError as OffloadError,
)
from .errors import (
    PassOrderError as PassOrderError,
)
from .errors import (
    PlanError as PlanError,
)
from .errors import (
    RandomStateError as RandomStateError,
)
from .errors import (
    RankFailedError as RankFailedError,
)
from .errors import (
    RankMismatchError as RankMismatchError,
)
from .errors import (
    ReplicaError as ReplicaError,
)
from .errors import (
    ShardGraphError as ShardGraphError,
)
from .errors import (
    ShardOperationError as ShardOperationError,
)
from .health.nonfinite import (
    NonFinite as NonFinite,
)
from .health.nonfinite import (
    find_nonfinite as find_nonfinite,
)
from .health.replicas import (
    Replicas as Replicas,
)
from .health.replicas import (
    check_replicas as check_replicas,
)
from .module.grad_scaler import GradScaler as GradScaler
from .module.gradient_norm import clip_grad_norm_ as clip_grad_norm_
from .module.layerwise_grad_scaler import LayerwiseGradScaler as LayerwiseGradScaler
from .module.lengths import Lengths as Lengths
from .module.sharded import ShardedModule as ShardedModule
from .offline import (
    consolidate as consolidate,
)
from .offline import (
    split as split,
)
from .optim.adascale import AdaScale as AdaScale
from .optim.averaged_weights import AveragedWeights as AveragedWeights
from .optim.gossip import StochasticGradientPush as StochasticGradientPush
from .optim.local_sgd import (
    LocalSGD as LocalSGD,
)
from .optim.local_sgd import (
    SlowMo as SlowMo,
)
from .optim.sharded import ShardedOptimizer as ShardedOptimizer
from .plans.annotations.constrain import constrain as constrain
from .plans.annotations.kinds import (
    ignored as ignored,
)
from .plans.annotations.kinds import (
    input as input,
)
from .plans.annotations.kinds import (
    keep_gathered as keep_gathered,
)
from .plans.annotations.kinds import (
    offload as offload,
)
from .plans.annotations.kinds import (
    output as output,
)
from .plans.annotations.kinds import (
    precision as precision,
)
from .plans.annotations.kinds import (
    recompute as recompute,
)
from .plans.annotations.kinds import (
    replicate as replicate,
)
from .plans.annotations.kinds import (
    reshard as reshard,
)
from .plans.annotations.kinds import (
    save as save,
)
from .plans.annotations.kinds import (
    shard as shard,
)
from .plans.annotations.kinds import (
    stage as stage,
)
from .plans.batch import Batch as Batch
from .plans.offload_plan import Offload as Offload
from .plans.pipeline_plan import Pipeline as Pipeline
from .plans.plan import (
    ParameterPlan as ParameterPlan,
)
from .plans.plan import (
    Plan as Plan,
)
from .plans.precision import Precision as Precision
from .plans.presets import preset as preset
from .proof.prove import Proof as Proof
from .report.analysis import Analysis as Analysis
from .runtime.elastic import elastic as elastic
from .runtime.launch import launch as launch
from .saves.loading import (
    Loaded as Loaded,
)
from .saves.loading import (
    checkpoints as checkpoints,
)
from .saves.loading import (
    load_checkpoint as load_checkpoint,
)
from .saves.saving import (
    Save as Save,
)
from .saves.saving import (
    save_checkpoint as save_checkpoint,
)
from .saves.saving import (
    wait_for_saves as wait_for_saves,
)
from .tracking import (
    MemoryTrace as MemoryTrace,
)
from .tracking import (
    MemoryTracker as MemoryTracker,
)
from .tracking import (
    WaitTracker as WaitTracker,
)

__version__: str
