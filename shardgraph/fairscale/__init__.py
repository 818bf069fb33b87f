"""FairScale's names over shardgraph's plans, passes and optimizers."""

from shardgraph.fairscale.adascale import AdaScale
from shardgraph.fairscale.balance import balance_by_size, balance_by_time
from shardgraph.fairscale.checkpoint_wrapper import checkpoint_wrapper
from shardgraph.fairscale.fsdp import FullyShardedDataParallel
from shardgraph.fairscale.grad_scaler import ShardedGradScaler
from shardgraph.fairscale.layerwise_gradient_scaler import LayerwiseGradientScaler
from shardgraph.fairscale.mevo import MEVO, MemoryEfficientVocabOutput
from shardgraph.fairscale.model_parallel import (
    ColumnParallelLinear,
    ParallelEmbedding,
    RowParallelLinear,
    VocabParallelEmbedding,
    initialize_model_parallel,
)
from shardgraph.fairscale.moe import MOELayer, Top2Gate
from shardgraph.fairscale.offload_model import OffloadModel
from shardgraph.fairscale.oss import OSS
from shardgraph.fairscale.pipe import Pipe
from shardgraph.fairscale.sharded_ddp import ShardedDataParallel
from shardgraph.fairscale.skip import Namespace, pop, skippable, stash, verify_skippables
from shardgraph.fairscale.slowmo import SlowMoDistributedDataParallel
from shardgraph.fairscale.wrap import auto_wrap, default_auto_wrap_policy, enable_wrap, wrap

FSDP = FullyShardedDataParallel

__all__ = [
    "FSDP",
    "MEVO",
    "OSS",
    "AdaScale",
    "ColumnParallelLinear",
    "FullyShardedDataParallel",
    "LayerwiseGradientScaler",
    "MOELayer",
    "MemoryEfficientVocabOutput",
    "Namespace",
    "OffloadModel",
    "ParallelEmbedding",
    "Pipe",
    "RowParallelLinear",
    "ShardedDataParallel",
    "ShardedGradScaler",
    "SlowMoDistributedDataParallel",
    "Top2Gate",
    "VocabParallelEmbedding",
    "auto_wrap",
    "balance_by_size",
    "balance_by_time",
    "checkpoint_wrapper",
    "default_auto_wrap_policy",
    "enable_wrap",
    "initialize_model_parallel",
    "pop",
    "skippable",
    "stash",
    "verify_skippables",
    "wrap",
]
