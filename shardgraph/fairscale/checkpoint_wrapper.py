"""FairScale's checkpoint_wrapper is the annotation ``recompute()``."""

from __future__ import annotations

from torch import nn

from shardgraph.api.annotate import annotate
from shardgraph.arguments import BOOL, MODEL, checked
from shardgraph.plans.annotations.kinds import Annotation, offload, recompute


@checked(module=MODEL, offload_to_cpu=BOOL)
def checkpoint_wrapper(module: nn.Module, offload_to_cpu: bool = False) -> nn.Module:
    """``fairscale.nn.checkpoint_wrapper``: ``module``, which backward recomputes from its inputs.

    The module itself is returned, annotated: the plan that it, or a model with it inside, is compiled under applies
    that. What it returns (a dict, a named tuple, nested tensors) is of no importance.

    Args:
        module: a module, before it is compiled or wrapped in FSDP.
        offload_to_cpu: what it is recomputed from is in host memory until backward.
    """
    annotations: list[Annotation] = [recompute(), offload()] if offload_to_cpu else [recompute()]
    annotate(module, {"": annotations})
    return module
