"""Rules that need the model and the plan alone."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.parallel import DataParallel, DistributedDataParallel

from shardgraph.findings.finding import Finding
from shardgraph.plans.plan import Plan


def of_model(model: nn.Module, plan: Plan) -> Iterator[Finding]:
    """What is found in ``model``, which is to be compiled under ``plan`` or is."""
    yield from _batch_norms(model, plan)
    yield from _scaler(plan)


def of_optimizer(optimizer: torch.optim.Optimizer, model: nn.Module) -> Iterator[Finding]:
    """What is found in an optimizer that is to train ``model``, which may be compiled."""
    own = {id(parameter): name for name, parameter in model.named_parameters()}
    held = {id(parameter) for group in optimizer.param_groups for parameter in group["params"]}
    strange = len(held - own.keys())
    if strange:
        yield Finding(
            "stale-optimizer",
            "warning",
            f"{strange} of its {len(held)} parameters are not parameters of the model, so stepping changes nothing "
            "that is trained",
            type(optimizer).__name__,
            "make the optimizer after compile, of sharded.parameters()",
        )
        return
    left = [name for key, name in own.items() if key not in held and _requires_grad(model, name)]
    if left and len(left) < len(own):
        yield Finding(
            "not-optimized",
            "warning",
            f"{len(left)} parameters that require a gradient are in no group, such as {left[0]}",
            type(optimizer).__name__,
            "give the optimizer all of sharded.parameters(), or freeze them: requires_grad_(False)",
        )


def _requires_grad(model: nn.Module, name: str) -> bool:
    return model.get_parameter(name).requires_grad


def sharded_already(model: nn.Module) -> Iterator[Finding]:
    """Modules of a model that is not compiled which another library shards or replicates."""
    for name, module in model.named_modules():
        kind = type(module).__name__
        if isinstance(module, (DistributedDataParallel, DataParallel)) or kind in ("FullyShardedDataParallel",):
            remedy = "compile the module inside of it: model.module"
        elif kind.startswith("FSDP") or any(isinstance(each, DTensor) for each in module.parameters(recurse=False)):
            remedy = "compile the model before fully_shard or distribute_tensor is applied to it"
        else:
            continue
        message = f"{kind} divides or replicates parameters already, and the plan would do so again"
        yield Finding("double-sharding", "warning", message, name or "the model", remedy)
        return


def _batch_norms(model: nn.Module, plan: Plan) -> Iterator[Finding]:
    norms = [name for name, module in model.named_modules() if _is_local_norm(module)]
    if norms and plan.data_size > 1 and model.training:
        yield Finding(
            "local-batch-norm",
            "warning",
            f"{len(norms)} batch norms in training mode take their statistics from each rank's own batch, so they are "
            f"not those of one device with the batches of all {plan.data_size}",
            norms[0],
            "nn.SyncBatchNorm.convert_sync_batchnorm(model) before compile, if a rank's batch is small",
        )


def _is_local_norm(module: nn.Module) -> bool:
    return isinstance(module, _BatchNorm) and not isinstance(module, nn.SyncBatchNorm) and module.training


def _scaler(plan: Plan) -> Iterator[Finding]:
    if plan.precision.parameters == "float16":
        yield Finding(
            "float16",
            "warning",
            "gradients below 6e-8 are zero in float16, unless the loss is scaled",
            "precision",
            "train with shardgraph.GradScaler, or with precision='bf16'",
        )
